"""Compute how often the book names the kind of known failures: ``python -m scripts.clinic FOLDER``.

FOLDER has a folder per case, with ``log.txt`` and ``case.toml`` (``kind``, ``answerable``,
``basis``). Exit status 1 where less is named than is wanted.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from vllm_memprof.logs.to_record import sorted_lines
from vllm_memprof.record.cause import NamedFailure

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: Whether a case can be answered for certain -> the share that is wanted.
WANTED = {True: 0.9, False: 0.6}


def first_failure(log: Path) -> NamedFailure | None:
    """Return what a log is said to have failed of."""
    with log.open("rb") as stream:
        return next((failure for _, failure in sorted_lines([stream.read()])[1]), None)


def main(folder: Path) -> int:
    """Print the cases that are named otherwise, and the shares; return the exit status."""
    right: Counter[bool] = Counter()
    cases: Counter[bool] = Counter()
    served: Counter[str] = Counter()
    wrong = False
    for path in sorted(folder.glob("*/case.toml")):
        case = tomllib.loads(path.read_text())
        failure = first_failure(path.parent / "log.txt")
        kind = "none" if failure is None else failure.kind
        certain = case["answerable"] == "yes" and case["basis"] != "inferred"
        cases[certain] += 1
        right[certain] += kind == case["kind"]
        if failure is not None:
            served[f"{failure.kind}: {failure.title}"] += 1
        blames = case["kind"] == "not-memory-at-all" and failure is not None and failure.is_memory
        wrong |= blames or (failure is None and case["kind"] != "none")
        if kind != case["kind"] or blames:
            print(f"{path.parent.name}: {case['kind']} is wanted, {kind} was named")
    for row, count in served.most_common():
        print(f"{count:4} {row}")
    for certain, least in WANTED.items():
        print(f"{right[certain]} of {cases[certain]}, at least {least:.0%} wanted")
        wrong |= right[certain] < least * cases[certain]
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
