"""What a stack installs."""

from __future__ import annotations

from vllm_memprof.sim.stacks import Stack, normalize


def version_of(stack: Stack, package: str) -> str | None:
    """Return the version that the stack installs, None where it leaves the package out."""
    pins = dict(pin for chunk in stack.chunks for pin in chunk.pins)
    pins |= {build.name: build.version for build in stack.builds}
    return pins.get(normalize(package))
