"""Advice after a failure: the reason of a failed run enters, a sentence or nothing leaves."""

from __future__ import annotations

import os
import re
from pathlib import Path

from vllm_memprof.engines.base import EngineRow
from vllm_memprof.errors import LaunchError, did_you_mean
from vllm_memprof.files import read_table
from vllm_memprof.launch.interpreter import ask
from vllm_memprof.launch.request import LaunchRequest

_UNKNOWN_OPTION = re.compile(r"unrecognized arguments?: (--[\w.-]+)")
_OPTION = re.compile(r"""^    ([a-z]\w+): |["']--([a-z][a-z0-9-]+)["']""", re.MULTILINE)


def engine_options(python: str, row: EngineRow) -> list[str]:
    """Return the options that the sources of an installed engine name; none if they are not read.

    A field of a class of options is an option, and so is every text like one.
    """
    code = (
        "import importlib.util, json, sys; "
        "print(json.dumps([*importlib.util.find_spec(sys.argv[1]).submodule_search_locations]))"
    )
    try:
        (folder,) = ask(python, os.environ, "-c", code, row.package)
        files = [file for pattern in row.option_files for file in Path(folder).glob(pattern)]
        texts = [file.read_text() for file in files]
    except (OSError, LaunchError, ValueError):
        return []
    names = {name for text in texts for pair in _OPTION.findall(text) for name in pair if name}
    return sorted(f"--{name.replace('_', '-')}" for name in names)


def advise(reason: str | None, python: str, row: EngineRow) -> str | None:
    """Return what to try after a failure, where the engine's message is a known one.

    Args:
        reason: of the failure.
        python: the interpreter of the engine, whose sources name its options.
        row: the engine.
    """
    text = " ".join((reason or "").split())
    if unknown := _UNKNOWN_OPTION.search(text):
        own = [f"--{name.replace('_', '-')}" for name in LaunchRequest.__dataclass_fields__]
        known = [*own, *engine_options(python, row)]
        return f"to try: {did_you_mean(unknown[1], known, f'leave {unknown[1]} out')}"
    rows = read_table(Path(__file__).with_name("advice.toml"))["advice"]
    found = (row["advice"] for row in rows if re.search(row["pattern"], text))
    return next((f"to try: {advice}" for advice in found), None)
