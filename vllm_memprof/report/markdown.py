"""Writes a report as GitHub markdown: every name and argument escaped, so that nothing in it can act as markup."""

from __future__ import annotations

import re

from vllm_memprof.ledger.model import Report
from vllm_memprof.report.language import ENGLISH, Language, language
from vllm_memprof.report.sections import sections
from vllm_memprof.report.sections.base import BAD, TOTAL, Section
from vllm_memprof.report.sections.findings import FindingView, finding_views
from vllm_memprof.report.sections.head import head

#: Characters a line of the widest layout has: GitHub scrolls tables sideways.
_WIDE = 200
_SPECIAL = re.compile(r"([\\`*_\[\]|~!^$])")
#: A backslash does not keep GitHub from seeing a mention or a number of an issue in these.
_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;", "#": "&#35;"})


def render_markdown(report: Report, lang: str = ENGLISH) -> str:
    """The whole report, for a file, an issue or a pull request, in one of ``language.LANGUAGES``."""
    say = language(lang)
    lines = [f"# memprof: {escape(report.run.model)}", ""]
    for name, value in head(report):
        text = _code(value) if name == "command" else escape(say.head(name, value))
        lines.append(f"- **{escape(say('name', name))}**{say('frame', ': ')}{text}")
    lines += ["", *_findings([say.finding(view) for view in finding_views(report)], say)]
    for section in sections(report, _WIDE):
        lines += ["", *section_lines(say.section(section))]
    return "\n".join(lines) + "\n"


def escape(text: str) -> str:
    """Text as it stands, in a paragraph or in a cell of a table."""
    return _SPECIAL.sub(r"\\\1", _one_line(text)).translate(_ENTITIES)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _code(text: str) -> str:
    """A code span, fenced by more backticks than the text has in a row."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * (longest + 1)
    space = " " if longest else ""
    return f"{fence}{space}{_one_line(text)}{space}{fence}"


def section_lines(section: Section) -> list[str]:
    """A table under its heading, and the remarks below it."""
    lines = [f"## {escape(section.title)}", ""]
    if section.rows:
        lines.append(_line([escape(column.title) for column in section.columns]))
        lines.append(_line(["---:" if column.right else ":---" for column in section.columns]))
        for row in section.rows:
            cells = [escape(cell.strip()) for cell in row.cells]
            if row.style in (TOTAL, BAD):
                cells = [f"**{cell}**" if cell else cell for cell in cells]
            cells[0] = "&nbsp;" * 2 * row.indent + cells[0]
            lines.append(_line(cells))
    if section.notes:
        lines += ["", *(f"- {escape(note)}" for note in section.notes)]
    return lines


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _findings(views: list[FindingView], say: Language) -> list[str]:
    if not views:
        return [say("frame", "No findings.")]
    stop, comma, colon = (say("frame", mark) for mark in (".", ", ", ": "))
    lines = [f"## {say('frame', f'Findings: {len(views)}')}", ""]
    for view in views:
        where = f"{comma}{escape(view.labels)}" if view.labels else ""
        price = f"{colon}{escape(view.price)}" if view.price else ""
        lines.append(
            f"- **{say('frame', view.severity)}** {escape(view.id)}{where}{price}<br>{escape(view.title)}{stop}"
        )
        lines.append(f"  {escape(view.evidence)}{stop}")
        lines += [f"  {say('frame', 'Try: ')}{escape(action)}{stop}" for action in view.actions]
    return lines
