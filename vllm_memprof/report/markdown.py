"""Writes a report as GitHub markdown: every name and argument escaped, so that nothing in it can act as markup.

It begins with one line that says it all; tables that few readers need are folded away, and the whole stays below what
a comment on GitHub may have. What does not fit is named, and in report.json. Several engine starts share that room.
"""

from __future__ import annotations

import re

from vllm_memprof.accounting.model import Report
from vllm_memprof.report.language import ENGLISH, Language, language
from vllm_memprof.report.sections import sections
from vllm_memprof.report.sections.base import BAD, TOTAL, Section, fold
from vllm_memprof.report.sections.findings import FindingView, finding_views
from vllm_memprof.report.sections.head import head, verdict

#: Characters a line of the widest layout has: GitHub scrolls tables sideways.
_WIDE = 200
#: Bytes of the longest report. GitHub takes comments of 65,536 characters.
MOST_BYTES = 60_000
#: Bytes that the tables leave to the line that names those left out.
_RESERVE = 2_000
#: Rows of a table that is shown without a click.
_OPEN_ROWS = 16
#: Findings of one kind that are listed, the first of them; they differ in nothing but figures and ranks.
_LISTED = 3
#: Remarks on the whole run that are listed.
_LISTED_NOTES = 10
#: Engine starts that are listed with a line each where there are several.
_LISTED_STARTS = 60
#: Characters of a text that the engine or the user gave, and of a command, which may have prompts.
_CHARACTERS, _COMMAND_CHARACTERS = 500, 2_000
#: Lines at the top that make the summary, in this order.
_SUMMARY = ("model", "engine", "device", "verdict")
_SPECIAL = re.compile(r"([\\`*_\[\]|~!^$])")
_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;", "#": "&#35;"})
#: GitHub looks for mentions and issues in the text that is left when entities are read: a space without width parts
#: them. Links it sees in the source, so there an entity is enough.
_REFERENCES = (
    (re.compile(r"&#64;(?=\w)"), "&#64;&#8203;"),
    (re.compile(r"&#35;(?=\d)"), "&#35;&#8203;"),
    (re.compile(r"\b(gh)-(?=\d)", re.IGNORECASE), r"\1-&#8203;"),
    (re.compile("://"), ":&#47;/"),
    (re.compile(r"\bwww\.", re.IGNORECASE), "www&#46;"),
)
#: What would begin a list or a line below a heading at the start of a line.
_START = re.compile(r"^(\d{0,9})([-+=.)])(?=\s|[-=]*$)")


def render_markdown(report: Report, lang: str = ENGLISH) -> str:
    """The whole report, for a file, an issue or a pull request, in one of ``language.LANGUAGES``."""
    say = language(lang)
    lines = [f"# memprof: {escape(_cut(report.run.model))}", ""]
    rows = head(report)
    said = {name: escape(_cut(say.head(name, value))) for name, value in rows if name in _SUMMARY}
    comma, colon = say("frame", ", "), say("frame", ": ")
    lines += [
        f"**{said['model']}**{comma}{said['engine']}{comma}{said['device']}{colon}**{said['verdict']}**",
        "",
    ]
    rest = [row for row in rows if row[0] not in _SUMMARY]
    for name, value in rest[:_LISTED_NOTES]:
        text = (
            _code(_cut(value, _COMMAND_CHARACTERS))
            if name == "command"
            else escape(_cut(say.head(name, value)))
        )
        lines.append(f"- **{escape(say('name', name))}**{colon}{text}")
    if len(rest) > _LISTED_NOTES:
        lines.append(f"- {say('note', f'{len(rest) - _LISTED_NOTES} more in report.json')}")
    lines += ["", *_findings([say.finding(view) for view in finding_views(report)], say)]
    tables = [say.section(section) for section in sections(report, _WIDE)]
    return _fitting(
        lines, [(table.title, ["", *section_lines(table, say)]) for table in tables], say
    )


def render_markdown_starts(reports: list[Report], lang: str = ENGLISH) -> str:
    """Several engine starts in one text: a line each, then the reports of as many as a comment has room for."""
    say = language(lang)
    lines = [
        f"{number}. {escape(_cut(line))}"
        for number, line in enumerate(start_lines(reports, lang), start=1)
    ]
    if len(lines) > _LISTED_STARTS:
        rest = say("frame", f"{len(lines) - _LISTED_STARTS} more engine starts")
        lines = [*lines[:_LISTED_STARTS], "", rest]
    opening = [say("frame", f"{len(reports)} engine starts"), "", *lines, ""]
    left = MOST_BYTES - _RESERVE - _size(opening)
    texts, out = [], []
    for report in reports:
        text = render_markdown(report, lang)
        if len(text.encode()) < left:
            texts.append(text)
            left -= len(text.encode()) + 1
        else:
            out.append(report.run.id or report.run.model)
    if out:
        names = escape(_cut(fold(out), _RESERVE // 4))
        opening += [
            say(
                "frame",
                f"Too long for a comment, left out below: {len(out)} of {len(reports)} starts, {names}.",
            )
        ]
        opening += [
            say(
                "frame", "The report of one start: `memprof explain FILE#NUMBER --format markdown`."
            ),
            "",
        ]
    return "\n".join(["\n".join(opening), *texts])


def start_lines(reports: list[Report], lang: str = ENGLISH) -> list[str]:
    """What each of several engine starts came to, in a line."""
    say = language(lang)
    lines = []
    for report in reports:
        budgets = [rank.budget.gpu_memory_utilization for rank in report.ranks]
        asked = next((value for value in budgets if value is not None), None)
        told = f"utilization {asked}; " if asked is not None else ""
        lines.append(f"{report.run.id}: {told}{say('head', verdict(report))}")
    return lines


def _fitting(lines: list[str], blocks: list[tuple[str, list[str]]], say: Language) -> str:
    """As many tables as there is room for, and the names of those that were left out."""
    left = MOST_BYTES - _RESERVE - _size(lines)
    out = []
    for title, block in blocks:
        if _size(block) <= left:
            lines = lines + block
            left -= _size(block)
        else:
            out.append(escape(title))
    if out:
        names = _cut(", ".join(out), _RESERVE // 4)
        lines = [*lines, "", f"{say('frame', 'Too long for a comment, in report.json: ')}{names}"]
    return "\n".join(lines) + "\n"


def _size(lines: list[str]) -> int:
    return sum(len(line.encode()) + 1 for line in lines)


def _cut(text: str, most: int = _CHARACTERS) -> str:
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,})"


def escape(text: str) -> str:
    """Text as it stands, within a line or in a cell of a table."""
    text = _SPECIAL.sub(r"\\\1", _one_line(text)).translate(_ENTITIES)
    for pattern, safe in _REFERENCES:
        text = pattern.sub(safe, text)
    return text


def _paragraph(text: str) -> str:
    """Text that begins a line."""
    return _START.sub(r"\1\\\2", escape(text))


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _code(text: str) -> str:
    """A code span, fenced by more backticks than the text has in a row."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * (longest + 1)
    space = " " if longest else ""
    return f"{fence}{space}{_one_line(text)}{space}{fence}"


def section_lines(section: Section, say: Language | None = None) -> list[str]:
    """A table under its heading, and the remarks below it; a long table is folded away."""
    lines = [f"## {escape(section.title)}", ""]
    folded = len(section.rows) > _OPEN_ROWS
    if folded:  # between the tags, only what stands after a blank line is markdown
        words = f"{len(section.rows)} rows"
        lines += [f"<details><summary>{say('frame', words) if say else words}</summary>", ""]
    if section.rows:
        lines.append(_line([escape(column.title) for column in section.columns]))
        lines.append(_line(["---:" if column.right else ":---" for column in section.columns]))
        for row in section.rows:
            cells = [escape(cell.strip()) for cell in row.cells]
            if row.style in (TOTAL, BAD):
                cells = [f"**{cell}**" if cell else cell for cell in cells]
            cells[0] = "&nbsp;" * 2 * row.indent + cells[0]
            lines.append(_line(cells))
    if folded:
        lines += ["", "</details>"]
    if section.notes:
        lines += ["", *(f"- {_paragraph(note)}" for note in section.notes)]
    return lines


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _findings(views: list[FindingView], say: Language) -> list[str]:
    if not views:
        return [say("frame", "No findings.")]
    stop, comma, colon = (say("frame", mark) for mark in (".", ", ", ": "))
    lines = [f"## {say('frame', f'Findings: {len(views)}')}", ""]
    listed: dict[str, int] = {}
    for view in views:
        listed[view.id] = listed.get(view.id, 0) + 1
        if listed[view.id] > _LISTED:
            continue
        where = f"{comma}{escape(view.labels)}" if view.labels else ""
        price = f"{colon}{escape(view.price)}" if view.price else ""
        lines.append(
            f"- **{say('frame', view.severity)}** {escape(view.id)}{where}{price}<br>{escape(view.title)}{stop}"
        )
        lines.append(f"  {_paragraph(_cut(view.evidence))}{stop}")
        lines += [f"  {say('frame', 'Try: ')}{escape(action)}{stop}" for action in view.actions]
    more = {name: count - _LISTED for name, count in listed.items() if count > _LISTED}
    lines += [
        f"- {escape(name)}{colon}{say('note', f'{count} more in report.json')}"
        for name, count in more.items()
    ]
    return lines
