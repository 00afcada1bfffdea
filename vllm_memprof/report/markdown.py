"""Draws a document as GitHub markdown: names are escaped, so that nothing in them acts as markup.

Tables that few readers need are folded away, and the whole stays below what a comment on GitHub may
have: what does not fit is named. Several engine starts share that room.
"""

from __future__ import annotations

import re

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
from vllm_memprof.report.documents import Found, document
from vllm_memprof.report.documents.first_screen import FirstScreen
from vllm_memprof.report.language import ENGLISH, Language, language
from vllm_memprof.report.sections.starts import starts_section
from vllm_memprof.tables import fold
from vllm_memprof.text import text

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
_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;", "#": "&#35;"})
#: GitHub looks for mentions and issues in the text that is left when entities are read: a space
#: without width parts them. Links it sees in the source, so there an entity is enough.
_REFERENCES = (
    (re.compile(r"&#64;(?=\w)"), "&#64;&#8203;"),
    (re.compile(r"&#35;(?=\d)"), "&#35;&#8203;"),
    (re.compile(r"\b(gh)-(?=\d)", re.IGNORECASE), r"\1-&#8203;"),
    (re.compile("://"), ":&#47;/"),
    (re.compile(r"\bwww\.", re.IGNORECASE), "www&#46;"),
)
#: What would begin a list or a line below a heading at the start of a line.
_START = re.compile(r"^(\d{0,9})([-+=.)])(?=\s|[-=]*$)")


def render_markdown(found: Found, lang: str = ENGLISH) -> str:
    """Return the whole document, for a file, an issue or a pull request.

    Args:
        found: what there is a document of.
        lang: one of ``language.LANGUAGES``.
    """
    say = language(lang)
    page = say(document(found, _WIDE))
    if isinstance(found, FirstScreen):
        return _screen(page, say(document(found.report, _WIDE)), say)
    name = "memprof" if page.kind == "report" else f"memprof {page.kind}"
    lines = [f"# {name}: {escape(_cut(page.title))}", ""]
    opening = next((i for i, line in enumerate(page.head) if line.summary), 0)
    if opening:
        lines += [*_lines(page.head[:opening], page, say), ""]
    if summary := [escape(_cut(line.value)) for line in page.head if line.summary]:
        first, *rest, last = summary
        named = say(text(", ")).join([f"**{first}**", *rest])
        lines += [say(text("{named}: **{verdict}**", named=named, verdict=last)), ""]
    lines += _lines([line for line in page.head[opening:] if not line.summary], page, say)
    if page.findings is not None:
        lines += ["", *_findings(page.findings, page, say)]
    left = MOST_BYTES - _RESERVE - _size(lines)
    out = []
    for section in page.sections:
        block = ["", *_section(section, say)]
        if _size(block) <= left:
            lines += block
            left -= _size(block)
        else:
            out.append(escape(section.title))
    if page.tail:
        lines += ["", *_lines(page.tail, page, say)]
    if out:
        names = _cut(", ".join(out), _RESERVE // 4)
        told = text("Too long for a comment, in {whole}: {names}", whole=page.whole, names=names)
        lines += ["", say(told)]
    return "\n".join(lines) + "\n"


def _screen(page: Document, whole: Document, say: Language) -> str:
    """Return a first screen, and the sections that it has room for, folded away."""
    lines = [f"# memprof: {escape(_cut(page.title))}", "", *_lines(page.head, page, say)]
    for section in page.sections:
        lines += ["", *_table(section)]
    lines += ["", *_lines(page.tail, page, say)]
    findings = _findings(whole.findings or [], page, say)
    blocks = [(findings[0].lstrip("# "), findings[2:])] if whole.findings else []
    blocks += [
        (escape(section.title), [*_rows(section), *_notes(section)]) for section in whole.sections
    ]
    left, out = SCREEN_BYTES - _RESERVE - _size(lines), []
    for title, rows in blocks:
        block = ["", f"<details><summary>{title}</summary>", "", *rows, "", "</details>"]
        if _size(block) <= left:
            lines += block
            left -= _size(block)
        else:
            out.append(title)
    if out:
        names = _cut(", ".join(out), _RESERVE // 2)
        told = text("Too long for a comment, with --full: {names}", names=names)
        lines += ["", say(told)]
    return "\n".join(lines) + "\n"


def render_markdown_starts(reports: list[Report], lang: str = ENGLISH) -> str:
    """Return several engine starts: a table, then the reports that a comment has room for."""
    say = language(lang)
    opening = [*_section(say(starts_section(reports, _WIDE)), say), ""]
    left = MOST_BYTES - _RESERVE - _size(opening)
    texts, out = [], []
    for report in reports:
        drawn = render_markdown(report, lang)
        if len(drawn.encode()) < left:
            texts.append(drawn)
            left -= len(drawn.encode()) + 1
        else:
            out.append(report.run.id or report.run.model)
    if out:
        left_out = text(
            "Too long for a comment, left out below: {count} of {all_of} starts, {names}.",
            count=len(out),
            all_of=len(reports),
            names=escape(_cut(fold(out), _RESERVE // 4)),
        )
        one = text("The report of one start: `memprof explain FILE#NUMBER --format markdown`.")
        opening += [say(left_out), say(one), ""]
    return "\n".join(["\n".join(opening), *texts])


def _size(lines: list[str]) -> int:
    return sum(len(line.encode(errors="surrogatepass")) + 1 for line in lines)


def _cut(words: str, most: int = _CHARACTERS) -> str:
    return words if len(words) <= most else f"{words[:most]}... ({len(words):,})"


def escape(words: str) -> str:
    """Return text as it stands, within a line or in a cell of a table."""
    shown = _SPECIAL.sub(r"\\\1", " ".join(words.split())).translate(_ENTITIES)
    for pattern, safe in _REFERENCES:
        shown = pattern.sub(safe, shown)
    return shown


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
        if not line.name:
            found.append(f"- {_paragraph(_cut(line.value))}")
            continue
        if line.style == CODE:
            value = _code(_cut(line.value, _COMMAND_CHARACTERS))
        else:
            value = escape(_cut(line.value))
        named = text("**{name}**: {value}", name=escape(line.name), value=value)
        found.append(f"- {say(named)}")
    if (more := len(lines) - _LISTED_LINES) > 0:
        found.append(f"- {_more(more, page, say)}")
    return found


def _more(count: int, page: Document, say: Language) -> str:
    return say(text("{count} more in {whole}", count=count, whole=page.whole))


def _section(section: Section, say: Language) -> list[str]:
    """Return a table under its heading, and the notes below it; a long table is folded away."""
    if len(section.rows) <= _OPEN_ROWS:
        return _table(section)
    count = say(text("{count} rows", count=len(section.rows)))
    heading, rows = [f"## {escape(section.title)}", ""], _rows(section)
    # between the tags, only what stands after a blank line is markdown
    folded = [f"<details><summary>{count}</summary>", "", *rows, "", "</details>"]
    return [*heading, *folded, *_notes(section)]


def _table(section: Section) -> list[str]:
    """Return a table under its heading, where it has one, and the notes below it."""
    heading = [f"## {escape(section.title)}", ""] if section.title else []
    return [*heading, *_rows(section), *_notes(section)]


def _rows(section: Section) -> list[str]:
    if not section.rows:
        return []
    lines = [
        _row([escape(column.title) for column in section.columns]),
        _row(["---:" if column.right else ":---" for column in section.columns]),
    ]
    for row in section.rows:
        cells = [escape(cell) for cell in (row.first, *row.cells[1:])]
        if row.style in (TOTAL, BAD):
            cells = [f"**{cell}**" if cell else cell for cell in cells]
        cells[0] = "&nbsp;" * 2 * row.indent + cells[0]
        lines.append(_row(cells))
    return lines


def _notes(section: Section) -> list[str]:
    return ["", *(f"- {_paragraph(note)}" for note in section.notes)] if section.notes else []


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _findings(views: list[FindingView], page: Document, say: Language) -> list[str]:
    if not views:
        return [say(text("No findings."))]
    lines = [f"## {say(text('Findings: {count}', count=len(views)))}", ""]
    listed: dict[str, int] = {}
    for view in views:
        listed[view.id] = listed.get(view.id, 0) + 1
        if listed[view.id] > _LISTED:
            continue
        where = say(text(", {labels}", labels=escape(view.labels))) if view.labels else ""
        price = say(text(": {price}", price=escape(view.price))) if view.price else ""
        named = text(
            "**{severity}** {id}{where}{price}<br>{title}.",
            severity=view.severity_word,
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
        if count > _LISTED:
            more = _more(count - _LISTED, page, say)
            lines.append(f"- {say(text('{name}: {more}', name=escape(name), more=more))}")
    return lines
