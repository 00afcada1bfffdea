"""``memprof plan`` as the fork of a process that has imported all that it needs.

Plans of a sweep or a search are many, and half of a small plan's processor time is the import of
memprof. ``engines.warm`` is the process that forks.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

import vllm_memprof.cli.commands.plan
import vllm_memprof.launch.prepare
import vllm_memprof.report.table
import vllm_memprof.sim.presets  # noqa: F401
from vllm_memprof.cli import main
from vllm_memprof.cli.run import import_report as import_ahead  # noqa: F401

with suppress(ImportError):  # Typer 0.29 imports it for the first option
    import pydantic  # noqa: F401


def main_in_fork(argv: list[str]) -> int:
    """Run one command with the arguments of ``memprof``, its reports aside; returns the status."""
    sys.argv[1:] = argv
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return main()
