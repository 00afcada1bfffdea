"""A check as a terminal table, as markdown and as JSON; and the sentences that every reporter of it says."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from vllm_memprof.accounting.model import MODELLED, RunSummary
from vllm_memprof.check.check import CheckResult, Judged, Outcome
from vllm_memprof.check.limits import AT_LEAST, BYTES, FINDING, REGRESSION, STATUS
from vllm_memprof.record.codec import to_json
from vllm_memprof.report.markdown import escape, section_lines
from vllm_memprof.report.sections.base import (
    BAD,
    MODELLED_MARK,
    NOT_MEASURED,
    PLAIN,
    SHOWN_GROUPS,
    Column,
    Row,
    Section,
    fold,
)
from vllm_memprof.report.table import Painter
from vllm_memprof.units import format_bytes, format_gib

_WIDE = 200


def render_check_json(result: CheckResult) -> str:
    """``memprof.check/1`` as text."""
    return json.dumps(to_json(result), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def render_check_markdown(result: CheckResult) -> str:
    """The whole check, for a pull request or the summary of a job."""
    lines = [f"# memprof check: {escape(verdict(result))}", ""]
    lines += [f"- **{escape(name)}**: {escape(value)}" for name, value in head(result)]
    for section in check_sections(result, _WIDE):
        lines += ["", *section_lines(section)]
    return "\n".join(lines) + "\n"


def render_check_table(result: CheckResult, console_width: int | None = None) -> RenderableType:
    """The whole check as one rich renderable.

    Args:
        result: the outcomes.
        console_width: characters per line; None takes the console's at the time of printing.
    """
    return _Tables(result, console_width)


class _Tables:
    """Lays the sections out once the console's width and encoding are known."""

    def __init__(self, result: CheckResult, width: int | None) -> None:
        self._result = result
        self._width = width

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        draw = Painter(ascii_only=options.ascii_only)
        yield draw.head(head(self._result))
        for section in check_sections(self._result, self._width or options.max_width):
            yield Text()
            yield draw.section(section)
        yield Text()
        yield draw.text(verdict(self._result), "bold green" if self._result.ok else "bold red")


def head(result: CheckResult) -> list[tuple[str, str]]:
    """The lines that name the run and what it is held to: (what, text)."""
    lines = [("run", _run_text(result.run)), ("budget", result.budget)]
    lines += [("baseline", _run_text(result.baseline))] if result.baseline is not None else []
    return [*lines, *(("note", note) for note in result.notes)]


def verdict(result: CheckResult) -> str:
    """The result in one sentence."""
    count, failed = len(result.outcomes), result.failures
    if not failed:
        return f"within budget: {count} of {count} checks hold"
    return f"over budget: {len(failed)} of {count} checks fail: {', '.join(outcome.key for outcome in failed)}"


def _run_text(run: RunSummary) -> str:
    engine = " ".join(part for part in (run.engine, run.engine_version) if part) or "engine unknown"
    device = run.device or "device unknown"
    device += f" [simulated: profile {run.device_profile or 'unknown'}]" if run.simulated else ""
    return f"{run.model}, {engine}, {device}, read from {'log text' if run.source == 'log' else 'hooks'}"


def sentences(outcome: Outcome) -> list[str]:
    """What failed, one sentence per group of ranks that agree: measured, limit, margin, ranks."""
    groups = _groups([row for row in outcome.judged if not row.ok])
    return [f"{outcome.key}: {_sentence(outcome, group)}" for group in groups]


def _sentence(outcome: Outcome, group: Sequence[Judged]) -> str:
    row, where = group[0], _labels(group)
    if outcome.unit in (FINDING, STATUS):
        return f"{where}: {row.reason}" if where else str(row.reason)
    if row.value is None or row.limit is None:
        return f"{NOT_MEASURED}{f' on {where}' if where else ''}: {row.reason}"
    word = "too little" if outcome.sense == AT_LEAST else "too much"
    mark = f" {MODELLED_MARK}" if outcome.how == MODELLED else ""
    text = f"{_exact(outcome, row.value)}{mark}{f' on {where}' if where else ''}"
    text += f", allowed is {outcome.sense} {_exact(outcome, row.limit)}"
    text += (
        f" (baseline {_exact(outcome, row.baseline)}, {outcome.written})"
        if row.baseline is not None
        else ""
    )
    text += f": {format_bytes(-(row.margin or 0))} {outcome.unit} {word}"
    return text + (f", {_digits(row)}" if row.within_digits else "")


def _digits(row: Judged) -> str:
    return f"within the printed digits (±{row.half_unit:,} bytes)"


def _exact(outcome: Outcome, value: int) -> str:
    if outcome.unit != BYTES:
        return f"{value:,} {outcome.unit}"
    return f"{format_gib(value, 4)} GiB ({value:,} bytes)"


def check_sections(result: CheckResult, width: int) -> list[Section]:
    """Every limit in a table, then what failed in words.

    Args:
        result: the outcomes.
        width: characters that a line has; from 110 on, the table gains columns.
    """
    wide = width >= 110
    columns = [Column("", right=False), Column("Measured"), Column("Limit"), Column("Margin")]
    columns += [Column("Asked"), Column("Baseline")] if wide else []
    columns += [Column("Ranks", right=False)]
    rows = [row for outcome in result.outcomes for row in _rows(outcome, wide)]
    limits = Section("Limits; margins in bytes or tokens", columns, rows, _notes(result))
    failed = [text for outcome in result.failures for text in sentences(outcome)]
    return [
        limits,
        *([Section(f"Failed: {len(result.failures)}", [], [], failed)] if failed else []),
    ]


def _rows(outcome: Outcome, wide: bool) -> list[Row]:
    """The groups of ranks that fail; where all hold, the one with the least room."""
    failing = [row for row in outcome.judged if not row.ok]
    groups = _groups(failing or outcome.judged)
    return [
        _row(outcome, group, wide) for group in (groups[:SHOWN_GROUPS] if failing else groups[:1])
    ]


def _row(outcome: Outcome, group: Sequence[Judged], wide: bool) -> Row:
    row = group[0]
    if outcome.unit == STATUS:
        cells = ["ok" if row.ok else "not ok", "ok", ""]
    elif outcome.unit == FINDING:
        cells = [
            "not found" if row.ok else NOT_MEASURED if outcome.unmeasured else "found",
            "none",
            "",
        ]
    else:
        value = NOT_MEASURED if row.value is None else _figure(outcome, row.value)
        cells = [value, "-" if row.limit is None else _figure(outcome, row.limit), _margin(row)]
    if wide:
        asked = outcome.written if outcome.unit not in (FINDING, STATUS) else ""
        cells += [asked, "" if row.baseline is None else _figure(outcome, row.baseline)]
    mark = f" {MODELLED_MARK}" if outcome.how == MODELLED else ""
    sign = "✓" if row.ok else "✗"
    return Row(
        [f"{sign} {outcome.key}{mark}", *cells, _labels(group)], style=PLAIN if row.ok else BAD
    )


def _margin(row: Judged) -> str:
    if row.margin is None:
        return "-"
    return f"{row.margin:+,}{'±' if row.within_digits else ''}" if row.margin else "0"


def _figure(outcome: Outcome, value: int) -> str:
    return f"{format_gib(value, 4)} GiB" if outcome.unit == BYTES else format_bytes(value)


def _notes(result: CheckResult) -> list[str]:
    rows = [row for outcome in result.outcomes for row in outcome.judged]
    notes = []
    if any(row.within_digits for row in rows):
        notes.append(
            "±: the margin is smaller than what the printed digits leave open; the log cannot decide it"
        )
    if any(outcome.how == MODELLED for outcome in result.outcomes):
        notes.append(f"{MODELLED_MARK}: set by the profile of the simulated device")
    if any(outcome.table == REGRESSION for outcome in result.outcomes):
        notes.append("limits of [regression] are the baseline's figure with what is allowed")
    return notes


def _groups(rows: Sequence[Judged]) -> list[list[Judged]]:
    """Rows that differ in nothing but their rank; those that are not measured first, then by margin."""
    found: dict[tuple[object, ...], list[Judged]] = {}
    for row in rows:
        found.setdefault((row.value, row.limit, row.ok, row.reason), []).append(row)
    return sorted(
        found.values(), key=lambda group: (group[0].margin is not None, group[0].margin or 0)
    )


def _labels(group: Sequence[Judged]) -> str:
    return fold([row.label for row in group if row.label])
