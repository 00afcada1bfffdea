"""Write ``docs/causes/*.md`` from the book of causes, a page per kind of failure.

python -m scripts.write_causes_docs          rewrite the pages
python -m scripts.write_causes_docs --check  exit status 1 when a page differs
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from vllm_memprof.causes.book import Row, read_book
from vllm_memprof.record.cause import KINDS, Cure

FOLDER = Path(__file__).parent.parent / "docs" / "causes"
MADE = "<!-- Made by scripts/write_causes_docs.py from vllm_memprof/causes: edit it there. -->"
ORIGINS = read_book().origins
ROWS = [row for rows in ORIGINS.values() for row in rows]


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


def cell(said: str) -> str:
    """Return the text of a cell of a table."""
    return said.replace("|", "\\|")


def entry(row: Row, numbers: dict[Cure, int]) -> str:
    """Return the line of a row: what the log says, what it means, which changes answer it."""
    said = max(row.example.splitlines(), key=len).strip()
    title = row.title[0].upper() + row.title[1:]
    if row.is_memory != KINDS[row.kind]:
        title += " (memory)" if row.is_memory else " (no memory is short)"
    if row.beside or not row.certain:
        title += " (likely)"
    if row.source:
        title += f"; {row.source}"
    change = ", ".join(str(numbers[cure]) for cure in row.cures)
    return f"| `{cell(textwrap.shorten(said, 90, placeholder='…'))}` | {cell(title)} | {change} |"


def page(kind: str, rows: Sequence[Row]) -> str:
    """Return the page of a kind: its errors, then what to change, each once."""
    cures = list(dict.fromkeys(cure for row in rows for cure in row.cures))
    numbers = {cure: number for number, cure in enumerate(cures, 1)}
    table = ["| the log says | it means | change |", "|---|---|---|"]
    table += [entry(row, numbers) for row in rows]
    parts = [MADE + f"\n# {kind}"]
    parts += [] if KINDS[kind] else ["No memory is short."]
    parts.append("\n".join(table))
    if cures:
        listed = [wrapped(f"{n}. {change(cure)}: {cure.why}", "   ") for cure, n in numbers.items()]
        parts += ["## What to change", "\n".join(listed)]
    return "\n\n".join(parts) + "\n"


def pages() -> dict[str, str]:
    """Return the pages by their name."""
    found = {}
    for kind in KINDS:
        rows = [row for row in ROWS if row.kind == kind]
        if rows:
            found[f"{kind}.md"] = page(kind, rows)
    listed = "\n".join(
        f"- [{kind}]({kind}.md): {sum(row.kind == kind for row in ROWS)} errors"
        for kind in KINDS
        if f"{kind}.md" in found
    )
    origins = ", ".join(f"{name.replace('_', ' ')} ({len(rows)})" for name, rows in ORIGINS.items())
    opening = wrapped(
        "What a failed start or server may have failed of, as `memprof explain` and the report of "
        "a run name it in `failure`: the first cause in the log, not the last. A page has the "
        "errors that are known of a kind, each with lines as they look, and what to change. Of "
        "what to change nothing is called enough that was not tried."
    )
    found["README.md"] = (
        f"{MADE}\n# Causes of failures\n\n{opening}\n\n{listed}\n\n"
        + wrapped(f"By origin: {origins}. An error that none of them names is shown as it is.")
        + "\n"
    )
    return found


def main(check: bool) -> int:
    """Write or compare the pages; return the exit status."""
    wanted = pages()
    there = {path.name: path.read_text() for path in FOLDER.glob("*.md")}
    stale = sorted(
        name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name)
    )
    if check:
        for name in stale:
            print(f"docs/causes/{name} is stale: python -m scripts.write_causes_docs")
        return 1 if stale else 0
    FOLDER.mkdir(exist_ok=True)
    for name in stale:
        (FOLDER / name).unlink(missing_ok=True)
        if name in wanted:
            (FOLDER / name).write_text(wanted[name])
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
