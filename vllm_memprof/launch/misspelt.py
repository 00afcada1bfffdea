"""A misspelt option of the engine is refused before the engine starts, whose parser is slow to
import: an option that neither its sources nor its plug-ins' spell, and that is like one of its own.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path

from vllm_memprof.engines.base import EngineRow
from vllm_memprof.errors import UsageError, nearest
from vllm_memprof.launch.interpreter import InterpreterFacts
from vllm_memprof.launch.request import LaunchRequest
from vllm_memprof.options import options

#: A field of a class of options is an option, and so is every text like one.
_OPTION = re.compile(r"""^    ([a-z]\w+): |["']--([a-z][\w-]+)["']""", re.MULTILINE)


def engine_options(facts: InterpreterFacts, row: EngineRow) -> set[str]:
    """Return the options that the sources of an engine name, without dashes before them."""
    found = set[str]()
    for folder in facts.folders.get(row.name, ()):
        for pattern in row.option_files:
            for file in Path(folder).glob(pattern):
                found |= {one or other for one, other in _OPTION.findall(_read(file))}
    return {name.replace("_", "-") for name in found}


def refuse_misspelt(engine_args: Iterable[str], facts: InterpreterFacts, row: EngineRow) -> None:
    """Refuse the first option that is spelt nowhere in the engine and like one that is.

    Raises:
        UsageError: with the option that it is like.
    """
    given = [name.partition(".")[0] for name, _ in options(engine_args) if name.startswith("--")]
    known = engine_options(facts, row) if given else set()
    own = {name.replace("_", "-") for name in LaunchRequest.__dataclass_fields__}
    for option in given:
        name = option.removeprefix("--no-").removeprefix("--")
        if any(each.startswith(name) for each in known):  # parsers take a beginning for the whole
            continue
        like = nearest(name, known | own) if known else []
        either = re.escape(name).replace(r"\-", "[-_]")
        spelt = re.compile(rf"(?<![\w-])(?:--)?{either}(?![\w-])")
        folders = map(Path, facts.folders.get(row.name, ()))
        sources = (file for folder in folders for file in folder.rglob("*.py"))
        if not like or any(spelt.search(_read(file)) for file in sources):
            continue
        versions = ((engine, facts.versions.get(package)) for package, engine in row.known_as)
        engine = next((f"{name} {at}" for name, at in versions if at), row.title)
        raise UsageError(f"the engine ({engine}) has no option {option}; nearest: --{like[0]}")


def _read(file: Path) -> str:
    with contextlib.suppress(OSError, ValueError):
        return file.read_text("utf-8")
    return ""
