"""Versions of what an engine stack installs."""

from __future__ import annotations

from vllm_memprof.sim.stacks import Stack, normalize


def version_of(stack: Stack, package: str) -> str | None:
    """The version that the stack installs, None where it leaves the package out."""
    pins = {name: version for chunk in stack.chunks for name, version in chunk.pins}
    pins |= {build.name: build.version for build in stack.builds}
    return pins.get(normalize(package))
