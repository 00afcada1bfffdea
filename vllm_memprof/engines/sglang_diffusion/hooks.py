"""What runs before and after the calls of SGLang's diffusion runtime that ``hooks.json`` names.

No engine module is imported. The runtime, ``sglang.multimodal_gen``, is an engine of its own: other
processes, other plug-ins, no KV cache.
"""

from __future__ import annotations

from pathlib import Path

from vllm_memprof.capture import actions as shared
from vllm_memprof.capture.hook import Half
from vllm_memprof.capture.hooks.rows import read_rows
from vllm_memprof.engines.sglang_diffusion import actions

#: By the id of a row; phases open and close where nothing is said.
_ENTER: dict[str, Half | None] = {
    "sgd.role.worker": actions.enter_worker,
    "sgd.role.launcher": actions.enter_launcher,
    "sgd.device_init": shared.begin_device_init,
    "sgd.component_load": actions.begin_component,
    "sgd.request": actions.begin_request,
    "sgd.stage": actions.begin_stage,
}
_LEAVE: dict[str, Half | None] = {
    "sgd.role.worker": actions.leave_worker,
    "sgd.device_init": actions.leave_device_init,
    "sgd.request": actions.leave_request,
    "sgd.event_loop": actions.leave_event_loop,
}
HOOKS = tuple(read_rows(Path(__file__).parent, _ENTER, _LEAVE))
