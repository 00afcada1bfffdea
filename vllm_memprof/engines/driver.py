"""Runs of an engine without a server: memprof's own options, and the modes of a driver.

A driver is started as ``python -m <module> MODE OPTIONS ENGINE-ARGUMENT...`` under the engine's
interpreter; ``launch.engine`` writes the options. Standard library alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


class OptionError(Exception):
    """What was asked for is not there: a file, an image, a rank. Said without a traceback."""


@dataclass(frozen=True)
class Options:
    """Memprof's own options, as ``launch.request.LaunchRequest`` names and explains them."""

    model: str
    prompts_file: str | None = None
    prompts: Sequence[str] = ()
    images_dir: str | None = None
    at_once: bool = False
    max_tokens: int = 16
    repeat: int = 1
    concurrency: int = 1
    on_error: str = "stop"
    sleep_cycles: int = 0
    ranks: str = "all"
    rank: int | None = None
    until: str = "kv"
    devices: int | None = None  # of the simulated machine; without it every rank is run

    @property
    def skips(self) -> bool:
        """A request that cannot be read, or that the engine refuses, does not end the run."""
        return self.on_error == "skip"


#: Runs a mode with the engine's arguments; returns the exit status.
Mode = Callable[[Options, list[str]], int]


def run_driver(modes: Mapping[str, Mode], argv: Sequence[str] | None = None) -> int:
    """Run the mode of a command line, None: of this process's; returns the exit status."""
    mode, options, *engine_args = sys.argv[1:] if argv is None else argv
    try:
        return modes[mode](Options(**json.loads(options)), engine_args)
    except OptionError as error:
        print(f"memprof {mode}: error: {error}", file=sys.stderr)
        return 2
