"""Who called: the first frame that is neither ours nor a mere forwarder to the allocator."""

from __future__ import annotations

import os
from types import FrameType

#: Path fragments of frames that forward ``empty_cache`` and say nothing about who wanted it.
_FORWARDERS = (
    "/vllm_memprof/capture/",
    "/torch/",
    "/torch_npu/",
    "/vllm_ascend/patch/platform/patch_torch_accelerator.py",
    "/vllm/utils/mem_utils.py",
    "/vllm/platforms/interface.py",
    "/contextlib.py",
)


def find_site(frame: FrameType | None) -> tuple[str | None, str | None]:
    """The call site as ``("worker.py:459", "NPUWorker._init_device")``, two Nones where every frame forwards."""
    while frame is not None:
        path = frame.f_code.co_filename
        if not any(fragment in path for fragment in _FORWARDERS):
            name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)  # co_qualname: Python 3.11
            return f"{os.path.basename(path)}:{frame.f_lineno}", name
        frame = frame.f_back
    return None, None
