"""Write ``docs/causes.md`` from the book of causes: errors by kind of failure, changes once.

python -m scripts.write_causes_docs          rewrite the page
python -m scripts.write_causes_docs --check  exit status 1 if it differs
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

from vllm_memprof.causes.book import Row, read_book
from vllm_memprof.record.cause import KINDS, Cure

PAGE = Path(__file__).parent.parent / "docs" / "causes.md"
MADE = "<!-- Made by scripts/write_causes_docs.py from vllm_memprof/causes: edit it there. -->"
#: What many lines begin with: a level and a file, the class of an error.
_COMMON = re.compile(r"^(?:(?:ERROR|INFO|WARNING) (?:\S+\] )?|[\w.]*(?:Error|Exception): )+")
ROWS = [row for rows in read_book().origins.values() for row in rows]
OPENING = (
    "Errors by the kind that `memprof explain` and a report name: what each means, its line in the "
    "log (an out-of-memory message once for each kind), and in brackets the numbers of [what to "
    "change](#what-to-change), (?) before them where it is likely, not certain. A change is called "
    "enough only if a plan tried it (`--prove`). An error that is not listed is shown as it is."
)


def wrapped(said: str, indent: str = "") -> str:
    """Return prose in lines of 100 characters."""
    return textwrap.fill(
        said, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def change(cure: Cure) -> str:
    """Return what a cure changes, without its reason."""
    name, value = cure.argument or cure.environment, cure.value or ""
    joined = f"{name}={value}" if cure.environment and value else f"{name} {value}".strip()
    whose = "" if cure.engine is None else f" ({cure.engine})"
    return (cure.action or f"`{joined}`") + whose


def short(row: Row) -> str:
    """Return the line of the log that shows a row, from where its pattern matches, cut short."""
    found = re.search(row.pattern, row.example, re.MULTILINE)  # as the reader does
    said = row.example[found.start() if found else 0 :].lstrip().partition("\n")[0]
    return textwrap.shorten(_COMMON.sub("", said.replace("`", "'")), 72, placeholder="…")


def meaning(row: Row) -> str:
    """Return what the error means."""
    title = row.title[0].upper() + row.title[1:]
    if row.is_memory != KINDS[row.kind]:
        title += " (memory)" if row.is_memory else " (no memory is short)"
    return title


def entries(kind: str, numbers: dict[str, int]) -> str:
    """Return the errors of a kind: what each means, what the log says, which changes answer it."""
    lines: dict[str, dict[str, dict[str, None]]] = {}
    seen: set[str] = set()
    for row in (row for row in ROWS if row.kind == kind):
        changes = ",".join(dict.fromkeys(str(numbers[cure.why]) for cure in row.cures))
        doubt = "" if row.certain and not row.beside else "(?) "
        known = lines.setdefault(meaning(row), {}).setdefault(f"{doubt}[{changes}]", {})
        said = f"`{short(row)}`"
        if said != "`…`" and said not in seen:
            known[said] = None
            seen.add(said)
    return "\n".join(
        wrapped(
            f"- {title}: "
            + "; ".join(f"{', '.join(known)} {changes}".strip() for changes, known in each.items()),
            "  ",
        )
        for title, each in lines.items()
    )


def page() -> str:
    """Return the page: the kinds with their errors, then what to change, a reason each."""
    reasons: dict[str, dict[str, None]] = {}
    for kind in KINDS:
        for row in ROWS:
            if row.kind == kind:
                for cure in row.cures:
                    reasons.setdefault(cure.why, {})[change(cure)] = None
    numbers = {why: number for number, why in enumerate(reasons, 1)}
    parts = [f"{MADE}\n# Causes of failures", wrapped(OPENING)]
    for kind, is_memory in KINDS.items():
        if errors := entries(kind, numbers):
            parts += [f"## {kind}"] + ([] if is_memory else ["No memory is short."]) + [errors]
    listed = [
        wrapped(f"{number}. {', '.join(reasons[why])}: {why}", " " * (len(str(number)) + 2))
        for why, number in numbers.items()
    ]
    return "\n\n".join([*parts, "## What to change", "\n".join(listed)]) + "\n"


def main(check: bool) -> int:
    """Write or compare the page; return the exit status."""
    wanted = page()
    if not check:
        PAGE.write_text(wanted)
    elif not PAGE.exists() or PAGE.read_text() != wanted:
        print("docs/causes.md is stale: python -m scripts.write_causes_docs")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
