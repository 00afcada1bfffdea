"""Write ``docs/causes/*.md`` from the book of causes, a page per kind of failure.

python -m scripts.write_causes_docs          rewrite the pages
python -m scripts.write_causes_docs --check  exit status 1 when a page differs
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from vllm_memprof.causes.book import BOOK, ORIGINS
from vllm_memprof.causes.rows import Row
from vllm_memprof.record.cause import KINDS, Cure

FOLDER = Path(__file__).parent.parent / "docs" / "causes"
MADE = "<!-- Made by scripts/write_causes_docs.py from vllm_memprof/causes/book: edit it there. -->"


def wrapped(said: str, indent: str = "") -> str:
    """Return prose in lines of 100 characters."""
    return textwrap.fill(
        said, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def change(cure: Cure) -> str:
    """Return a cure as an item of a list."""
    name = cure.argument or cure.environment
    value = cure.value or ""
    joined = f"`{name}={value}`" if cure.environment and value else f"`{name} {value}`"
    said = cure.action or joined.replace(" `", "`")
    whose = "" if cure.engine is None else f" ({cure.engine})"
    return wrapped(f"- {said}{whose}: {cure.why}", "  ")


def entry(row: Row) -> str:
    """Return the section of a row."""
    memory = KINDS[row.kind] if row.memory is None else row.memory
    facts = [] if memory else ["No memory is short."]
    if row.beside:
        facts.append("Known by what stands around the message, so it may be another cause.")
    elif not row.certain:
        facts.append("Likely, not certain, from the message alone.")
    if row.source:
        facts.append(f"Source: {row.source}.")
    parts = [f"## {row.title[0].upper()}{row.title[1:]}", f"```text\n{row.example}\n```"]
    parts += [wrapped(" ".join(facts))] if facts else []
    return "\n\n".join([*parts, "\n".join(change(cure) for cure in row.cures)])


def pages() -> dict[str, str]:
    """Return the pages by their name."""
    found = {}
    for kind in KINDS:
        rows = [row for row in BOOK if row.kind == kind]
        if rows:
            sections = "\n\n".join(map(entry, rows))
            found[f"{kind}.md"] = f"{MADE}\n# {kind}\n\n{sections}\n"
    listed = "\n".join(
        f"- [{kind}]({kind}.md): {sum(row.kind == kind for row in BOOK)} errors"
        for kind in KINDS
        if f"{kind}.md" in found
    )
    origins = ", ".join(f"{name} ({len(rows)})" for name, rows in ORIGINS.items())
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
