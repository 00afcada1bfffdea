"""Sweeps and searches over plans as tables, csv and JSON: ``Sweep`` or ``Fit`` enters, text leaves."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from vllm_memprof.plans.rows import TERMS, Fit, PlanRow, Sweep, Try
from vllm_memprof.record.codec import to_json
from vllm_memprof.report.sections.base import (
    BAD,
    GOOD,
    MODELLED_MARK,
    MUTED,
    PLAIN,
    Column,
    Row,
    Section,
    number,
)
from vllm_memprof.report.table import Painter
from vllm_memprof.units import format_bytes, format_gib, one_line

#: Columns of the csv behind one for each option that was varied, which bear the options' own names. Bytes are integers,
#: an empty cell is unknown. ``docs/concepts/plans.md`` says what each one is.
COLUMNS = (
    "status",
    "reason",
    "devices",
    "kv_cache_bytes",
    "tokens",
    "max_concurrency",
    "max_model_len",
    "fits_request_kv_cache_bytes",
    "fits_request_tokens",
    "spare_bytes",
    "spare_beside_held_bytes",
    "spare_at_profile_peak_bytes",
    "device_total_bytes",
    "gpu_memory_utilization",
    "requested_bytes",
    *(f"{name}_bytes" for name in TERMS),
    "equation",
    "balanced",
    "simulated",
    "seconds",
    "cached",
    "run",
    "run_id",
)
#: From these widths on the tables have all their columns, and all names in one line.
_WIDE, _PAGE = 100, 200
#: Characters of an option's name in a narrower table, and of a reason below any; csv and JSON have all of it.
_NARROW_COLUMN, _REASON = 11, 200


def render_plans_json(found: Sweep | Fit) -> str:
    """``memprof.sweep/1`` or ``memprof.fit/1``."""
    return json.dumps(to_json(found), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def render_sweep_csv(sweep: Sweep) -> str:
    """One row per plan, in the order of the combinations."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*(knob.name for knob in sweep.knobs), *COLUMNS])
    for row in sweep.rows:
        values = [row.values.get(knob.name) for knob in sweep.knobs]
        writer.writerow([*values, *(_cell(row, name) for name in COLUMNS)])
    return text.getvalue()


def _cell(row: PlanRow, name: str) -> Any:
    if name.removesuffix("_bytes") in TERMS:
        return row.terms.get(name.removesuffix("_bytes"))
    value = getattr(row, name)
    return str(value).lower() if isinstance(value, bool) else value


class PlansTable:
    """A sweep or a search for a terminal, once its width is known.

    Args:
        found: what to draw.
        width: characters per line; None takes the console's.
    """

    def __init__(self, found: Sweep | Fit, width: int | None = None) -> None:
        self._found = found
        self._width = width

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        draw = Painter(ascii_only=options.ascii_only)
        width = self._width or options.max_width
        if isinstance(self._found, Sweep):
            yield draw.section(sweep_section(self._found, width))
            return
        yield draw.section(fit_section(self._found, width))
        yield Text()
        for name, text in fit_answer(self._found):
            yield draw.text(f"{name + ':':<8} {text}", "bold" if name in ("answer", "use") else "")


def sweep_section(sweep: Sweep, width: int) -> Section:
    """A row per plan; the reasons of those that failed below it."""
    wide = width >= _WIDE
    columns = [Column(knob.name if width >= _PAGE else _broken(knob.name)) for knob in sweep.knobs]
    columns += [*_columns(wide), Column("Status", right=False)]
    rows = [
        Row(
            [
                *(row.values.get(knob.name, "-") for knob in sweep.knobs),
                *_figures(row, wide),
                row.status,
            ],
            style=PLAIN if row.ok else BAD,
        )
        for row in sweep.rows
    ]
    return Section(
        f"Plans of {sweep.model}",
        columns,
        rows,
        [*_reasons(sweep), *_marks(sweep.rows), *sweep.notes],
    )


def fit_section(fit: Fit, width: int) -> Section:
    """A row per plan, in the order in which they were tried."""
    wide = width >= _WIDE
    columns = [
        Column("Try"),
        Column(fit.knob if wide else _broken(fit.knob)),
        *_columns(wide),
        Column("Holds", right=False),
    ]
    rows = []
    for i, each in enumerate(fit.tries, start=1):
        holds = "yes" if each.holds else f"no: {_missing(each)}" if wide else "no"
        style = GOOD if each.value == fit.answer else PLAIN if each.holds else MUTED
        rows.append(
            Row([str(i), _shown(each.value), *_figures(each.row, wide), holds], style=style)
        )
    what = f"{fit.goal.capitalize()} {fit.knob} of {fit.model}, tried from {fit.low} to {fit.high}"
    notes = [f"wanted: {'; '.join(fit.wanted)}"]
    if not wide:
        notes += [
            f"try {i}: {_missing(each)}" for i, each in enumerate(fit.tries, 1) if each.missing
        ]
    return Section(what, columns, rows, [*notes, *_marks([each.row for each in fit.tries])])


def _missing(each: Try) -> str:
    return one_line("; ".join(each.missing), _REASON)


def fit_answer(fit: Fit) -> list[tuple[str, str]]:
    """The lines below the table: (what, text)."""
    count = len(fit.tries)
    cached = sum(each.row.cached for each in fit.tries)
    text = f"{count} plan{'s' if count != 1 else ''}" + (
        "" if fit.seconds is None else f" in {fit.seconds:.0f} s"
    )
    lines = [("tried", f"{text}, {count - cached} made and {cached} from the cache")]
    step = f"step {fit.step}" if fit.step[:1].isdigit() else fit.step
    lines.append(
        (
            "answer",
            "none"
            if fit.answer is None
            else f"{fit.goal} {fit.knob} {_shown(fit.answer)} ({step})",
        )
    )
    if fit.flag is not None:
        lines.append(("use", fit.flag))
    return [*lines, *(("note", note) for note in fit.notes)]


def _columns(wide: bool) -> list[Column]:
    more = [Column("Honest, GiB")] if wide else []
    return [Column("KV, GiB"), Column("Tokens"), Column("Requests"), *more, Column("Headroom")]


def _figures(row: PlanRow, wide: bool) -> list[str]:
    concurrency = next(iter(row.concurrency_at.values()), row.max_concurrency)
    mark = f" {MODELLED_MARK}" if row.simulated and row.spare_bytes is not None else ""
    honest = [format_gib(row.fits_request_kv_cache_bytes)] if wide else []
    return [
        format_gib(row.kv_cache_bytes),
        format_bytes(row.tokens),
        number(concurrency, ",.2f"),
        *honest,
        format_gib(row.spare_bytes) + mark,
    ]


def _marks(rows: Sequence[PlanRow]) -> list[str]:
    lengths = dict.fromkeys(length for row in rows for length in row.concurrency_at)
    at = f"{next(iter(lengths)):,} tokens" if lengths else "max_model_len"
    notes = [f"requests: how many of {at} the KV cache holds at once; headroom in GiB"]
    if any(row.simulated for row in rows):
        notes.append(
            f"{MODELLED_MARK}: with non-torch memory set by the profile of a simulated device"
        )
    return notes


def _reasons(sweep: Sweep) -> list[str]:
    """What the plans that failed say, each reason once with the plans it holds for."""
    groups: dict[str, list[PlanRow]] = {}
    for row in sweep.rows:
        if not row.ok:
            groups.setdefault(row.reason or row.status, []).append(row)
    notes = []
    for reason, rows in groups.items():
        first = ", ".join(f"{name}={value}" for name, value in rows[0].values.items())
        more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
        notes.append(f"{first}{more}: {one_line(reason, _REASON)}")
    return notes


def _broken(name: str) -> str:
    """The name of an option in lines of a narrow column, broken behind its dashes."""
    lines = [""]
    for part in re.split(r"(?<=-)", name):
        if len(lines[-1]) + len(part) > _NARROW_COLUMN and lines[-1]:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _shown(value: str) -> str:
    return f"{int(value):,}" if value.isdecimal() else value
