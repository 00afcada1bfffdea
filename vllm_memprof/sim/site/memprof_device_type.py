"""Give vllm-ascend the device type that a build of it for the simulated device would have.

Entry point ``vllm.platform_plugins``: vLLM calls `register` in each of its processes, forked,
spawned or on Ray, before it looks at a platform, and so before vllm-ascend reads its own type.
The file that the build left (``vllm_ascend/_build_info.py``) is not touched; the attribute of the
loaded module is set. vllm-ascend then checks it against the device, as on hardware
(``vllm_ascend/utils.py::check_ascend_device_type``, 0.13.0 to 0.23.0). Releases before 0.12 have a
SoC in its place, whose beginning they look at (``utils.py::is_310p``, 0.11.0).

Beside an NPU torch is its build for the CPU, which has no NCCL; a stack has the one of the package
index, for CUDA. Programs ask torch for NCCL: without it vLLM takes Gloo
(``vllm/distributed/parallel_state.py::init_distributed_environment``, 0.23.0).
"""

import os

#: A device type as vllm-ascend spells it; set where the installed one differs. (sim/runtime.py)
ENV_DEVICE_TYPE = "MEMPROF_SIM_DEVICE_TYPE"


def register():
    """Set the type where the launcher asked for one. Returns None: this is no platform."""
    from torch.distributed import distributed_c10d

    distributed_c10d._NCCL_AVAILABLE = False
    device_type = os.environ.get(ENV_DEVICE_TYPE)
    if device_type:
        from vllm_ascend import _build_info

        _build_info.__device_type__ = device_type
        _build_info.__soc_version__ = f"ascend{device_type.strip('_')}"
