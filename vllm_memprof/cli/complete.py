"""What a shell completes: devices, stacks, models, runs. Each imports what it reads when asked."""

from __future__ import annotations


def devices() -> list[str]:
    from vllm_memprof.launch.request import DEVICE_KINDS
    from vllm_memprof.sim.profiles import device_names

    return [*DEVICE_KINDS, *device_names()]


def stacks() -> list[str]:
    from vllm_memprof.sim.stacks import list_stacks

    return [stack.name for stack in list_stacks()]


def models() -> list[str]:
    from vllm_memprof.sim.presets import list_presets

    return [preset.name for preset in list_presets()]


def runs() -> list[str]:
    from vllm_memprof.launch.folder import DEFAULT_PARENT

    if not DEFAULT_PARENT.is_dir():
        return []
    names = sorted(path.name for path in DEFAULT_PARENT.iterdir() if path.is_dir())
    return [*names, *(f"{DEFAULT_PARENT}/{name}" for name in names)]
