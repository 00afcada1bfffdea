"""Draws a document as GitHub markdown: names are escaped, so that nothing in them acts as markup.

Tables that few readers need are folded away, and the whole stays below what a comment on GitHub may
have: what does not fit is named. Several engine starts share that room.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from vllm_memprof.accounting.model import Report
from vllm_memprof.document import (
    BAD,
    CODE,
    TOTAL,
    Document,
    FindingView,
    Line,
    Section,
)
from vllm_memprof.files import read_own
from vllm_memprof.report.documents import Found, document
from vllm_memprof.report.documents.first_screen import FirstScreen
from vllm_memprof.report.language import ENGLISH, Language, language
from vllm_memprof.report.sections.starts import starts_section
from vllm_memprof.text import fold, text

#: Characters a line of the widest layout has: GitHub scrolls tables sideways.
_WIDE = 200
#: Bytes of the longest report. GitHub takes comments of 65,536 characters.
MOST_BYTES = 60_000
#: Bytes of a first screen with the tables that it has room for.
SCREEN_BYTES = 12_000
#: Bytes that the tables leave to the line that names those left out.
_RESERVE = 2_000
#: Rows of a table that is shown without a click.
_OPEN_ROWS = 16
#: Findings of one kind that are listed; they differ in nothing but figures and ranks.
_LISTED = 3
#: Lines on the whole run that are listed.
_LISTED_LINES = 10
#: Characters of a text that the engine or the user gave, and of a command, which may have prompts.
_CHARACTERS, _COMMAND_CHARACTERS = 500, 2_000
_SPECIAL = re.compile(r"([\\`*_\[\]|~!^$])")
_DRAWN = read_own(__file__, "drawn.toml")
_OPTION, _REFERENCES = re.compile(_DRAWN["option"]), _DRAWN["references"].items()
_ENTITIES = str.maketrans(_DRAWN["entities"] | {"#": "&#35;"})  # no name of a table begins with #
#: What would begin a list or a line below a heading at the start of a line.
_START = re.compile(r"^(\d{0,9})([-+=.)])(?=\s|[-=]*$)")


def render_markdown(found: Found, lang: str = ENGLISH) -> str:
    """Return the whole document, for a file, an issue or a pull request.

    A first screen has the sections of its report behind it, folded away, as it has room for them.

    Args:
        found: what there is a document of.
        lang: one of ``language.LANGUAGES``.
    """
    say = language(lang)
    page = say(document(found, _WIDE))
    name = "memprof" if page.kind == "report" else f"memprof {page.kind}"
    lines = [f"# {name}: {escape(_cut(page.title))}", ""]
    if summary := [escape(_cut(line.value)) for line in page.head if line.summary]:
        first, *rest, last = summary
        named = say(text(", ")).join([f"**{first}**", *rest])
        lines += [say(text("{named}: **{verdict}**", named=named, verdict=last)), ""]
    lines += _lines([line for line in page.head if not line.summary], page, say)
    if page.findings is not None:
        lines += ["", *_findings(page.findings, page, say)]
    tail = ["", *_lines(page.tail, page, say)] if page.tail else []
    blocks = [(escape(each.title), _section(each, say)) for each in page.sections]
    room, where = MOST_BYTES, page.whole
    if isinstance(found, FirstScreen):
        lines += [line for section in page.sections for line in ("", *_table(section))] + tail
        room, where, tail = SCREEN_BYTES, "--full", []
        whole = say(document(found.report, _WIDE))
        findings = _findings(whole.findings or [], page, say)
        folded = [(findings[0].lstrip("# "), findings[2:])] if whole.findings else []
        folded += [(escape(each.title), _table(each)[2:]) for each in whole.sections]
        blocks = [(title, _folded(title, block)) for title, block in folded]
    drawn, out = _fitting([(title, ["", *block]) for title, block in blocks], room - _size(lines))
    lines += drawn + tail
    if out:
        told = text("Too long for a comment, see {where}: {names}", where=where, names=_named(out))
        lines += ["", say(told)]
    return "\n".join(lines) + "\n"


def render_markdown_starts(reports: list[Report], lang: str) -> str:
    """Return several engine starts: a table, then the reports that a comment has room for."""
    say = language(lang)
    opening = [*_section(say(starts_section(reports, _WIDE)), say), ""]
    drawn, out = _fitting(
        [(each.run.id or each.run.model, [render_markdown(each, lang)]) for each in reports],
        MOST_BYTES - _size(opening),
    )
    if out:
        left_out = text(
            "Too long for a comment, left out below: {count} of {all_of} starts, {names}.",
            count=len(out),
            all_of=len(reports),
            names=escape(_named([fold(out)])),
        )
        one = text("The report of one start: `memprof explain FILE#NUMBER --format markdown`.")
        opening += [say(left_out), say(one), ""]
    return "\n".join([*opening, *drawn])


def _fitting(blocks: Iterable[tuple[str, list[str]]], room: int) -> tuple[list[str], list[str]]:
    """Return the lines of the blocks that a comment has room for, and the titles of the others."""
    lines: list[str] = []
    out: list[str] = []
    for title, block in blocks:
        if _size(lines) + _size(block) <= room - _RESERVE:
            lines += block
        else:
            out.append(title)
    return lines, out


def _named(titles: list[str]) -> str:
    return _cut(", ".join(titles), _RESERVE // 4)


def _folded(summary: str, lines: list[str]) -> list[str]:
    """Return lines folded away: between the tags, only what a blank line precedes is markdown."""
    return [f"<details><summary>{summary}</summary>", "", *lines, "", "</details>"]


def _size(lines: list[str]) -> int:
    return sum(len(line.encode(errors="surrogatepass")) + 1 for line in lines)


def _cut(words: str, most: int = _CHARACTERS) -> str:
    return words if len(words) <= most else f"{words[:most]}... ({len(words):,})"


def escape(words: str) -> str:
    """Return text as it stands, within a line or in a cell of a table; options as code."""
    parts = _OPTION.split(" ".join(words.split()))
    parts[1::2] = map(_code, parts[1::2])
    for at in range(0, len(parts), 2):
        parts[at] = _SPECIAL.sub(r"\\\1", parts[at]).translate(_ENTITIES)
        for pattern, safe in _REFERENCES:
            parts[at] = re.sub(pattern, safe, parts[at])
    return "".join(parts)


def _paragraph(words: str) -> str:
    """Return text that begins a line."""
    return _START.sub(r"\1\\\2", escape(words))


def _code(words: str) -> str:
    """Return a code span, fenced by more backticks than the text has in a row."""
    longest = max((len(run) for run in re.findall(r"`+", words)), default=0)
    fence = "`" * (longest + 1)
    space = " " if longest else ""
    return f"{fence}{space}{' '.join(words.split())}{space}{fence}"


def _lines(lines: list[Line], page: Document, say: Language) -> list[str]:
    """Return named lines as a list, cut where a run says more than anybody reads."""
    found = []
    for line in lines[:_LISTED_LINES]:
        code = line.style == CODE
        value = (
            _code(_cut(line.value, _COMMAND_CHARACTERS)) if code else _paragraph(_cut(line.value))
        )
        named = text("**{name}**: {value}", name=escape(line.name), value=value)
        found.append(f"- {say(named) if line.name else value}")
    return found + _more(len(lines) - _LISTED_LINES, page, say)


def _more(count: int, page: Document, say: Language, name: str = "") -> list[str]:
    """Return the line that counts what is left out; none where nothing is."""
    more = text("{count} more in {whole}", page, count=count)
    told = text("{name}: {more}", name=escape(name), more=more) if name else more
    return [f"- {say(told)}"] if count > 0 else []


def _section(section: Section, say: Language) -> list[str]:
    """Return a table with its heading and notes; a long one is folded away."""
    if len(section.rows) <= _OPEN_ROWS:
        return _table(section)
    return _table(section, say(text("{count} rows", count=len(section.rows))))


def _table(section: Section, folded: str = "") -> list[str]:
    """Return a table under its heading, where it has one, and the notes below it."""
    heading = [f"## {escape(section.title)}", ""] if section.title else []
    rows = _rows(section)
    notes = ["", *(f"- {_paragraph(note)}" for note in section.notes)] if section.notes else []
    return [*heading, *(_folded(folded, rows) if folded else rows), *notes]


def _rows(section: Section) -> list[str]:
    if not section.rows:
        return []
    rows = [
        [escape(column.title) for column in section.columns],
        ["---:" if column.right else ":---" for column in section.columns],
    ]
    for row in section.rows:
        cells = [escape(cell) for cell in (row.first, *row.cells[1:])]
        if row.style in (TOTAL, BAD):
            cells = [f"**{cell}**" if cell else cell for cell in cells]
        cells[0] = "&nbsp;" * 2 * (row.indent - section.rows[0].indent) + cells[0]
        rows.append(cells)
    return [f"| {' | '.join(cells)} |" for cells in rows]


def _findings(views: list[FindingView], page: Document, say: Language) -> list[str]:
    if not views:
        return [say(text("No findings."))]
    lines = [f"## {say(text('Findings: {count}', count=len(views)))}", ""]
    listed: Counter[str] = Counter()
    for view in views:
        listed[view.id] += 1
        if listed[view.id] > _LISTED:
            continue
        where = say(text(", {labels}", labels=escape(view.labels))) if view.labels else ""
        price = say(text(": {price}", price=escape(view.price))) if view.price else ""
        named = text(
            "**{severity_word}** {id}{where}{price}<br>{title}.",
            view,
            id=escape(view.id),
            where=where,
            price=price,
            title=escape(view.title),
        )
        evidence = text("{evidence}.", evidence=_paragraph(_cut(view.evidence)))
        lines += [f"- {say(named)}", f"  {say(evidence)}"]
        if view.action:
            lines.append(f"  {say(text('Try: {action}.', action=escape(view.action)))}")
    for name, count in listed.items():
        lines += _more(count - _LISTED, page, say, name)
    return lines
