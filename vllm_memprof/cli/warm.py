"""``memprof plan`` as the fork of a process that has imported all that it needs.

Plans of a sweep or a search are many, and half of a small plan's processor time is the import of
memprof. ``engines.warm`` is the process that forks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from vllm_memprof.cli import main

_MODULES = (
    "pydantic",
    "vllm_memprof.cli.commands.plan",
    "vllm_memprof.launch.prepare",
    "vllm_memprof.sim.presets",
    "vllm_memprof.report.documents",
)


def import_ahead() -> None:
    """Import what every plan imports."""
    for name in _MODULES:
        import_module(name)
    import_module("vllm_memprof.cli.run").import_report()


def main_in_fork(argv: Sequence[str]) -> int:
    """Run one command with the arguments of ``memprof``, its reports aside; returns the status."""
    sys.argv[1:] = argv
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    return main(list(argv))
