"""The documents of a sweep and of a search: a row per plan, then what was found; a sweep as csv."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from vllm_memprof.document import (
    BAD,
    CODE,
    GOOD,
    MUTED,
    PLAIN,
    TOTAL,
    Document,
    Line,
)
from vllm_memprof.plans.calibrated_document import calibrated_document
from vllm_memprof.plans.calibrated_rows import Calibrated
from vllm_memprof.plans.curves import curves
from vllm_memprof.plans.rows import READY, TERMS, Fit, PlanRow, Sweep, Try
from vllm_memprof.plans.share_document import share_document
from vllm_memprof.plans.share_rows import DeviceShare
from vllm_memprof.record.spans import MODELLED
from vllm_memprof.tables import COUNT, GIB, Column, modelled, number, table, wide_only
from vllm_memprof.text import join, text
from vllm_memprof.units import GIB as GIB_BYTES
from vllm_memprof.units import one_line

#: From these widths on the tables have all their columns, and all names in one line.
_WIDE, _PAGE = 100, 200
#: Characters of an option's name in a narrower table, and of a reason below any table.
_NARROW_COLUMN, _REASON = 11, 200
#: Owners that grew which are shown below a search.
_GROWN = 3
_STATUS = {"ok": text("ok"), "oom": text("oom"), "failed": text("failed")}
_GOALS = {"smallest": text("smallest"), "largest": text("largest")}

#: Columns of the csv behind one for each option that was varied, which bear the options' own
#: names. Bytes are integers, an empty cell is unknown. ``docs/concepts/plans.md`` explains each.
CSV_COLUMNS = (
    "status",
    "reason",
    "devices",
    "kv_cache_bytes",
    "tokens",
    "max_concurrency",
    "max_model_len",
    "fits_request_bytes",
    "fits_request_tokens",
    "fits_device_bytes",
    "fits_device_tokens",
    "headroom_bytes",
    "headroom_how",
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


def answer_document(found: Fit | DeviceShare | Calibrated, width: int) -> Document:
    """Return the document of what a command that makes its plans one after the other found."""
    if isinstance(found, DeviceShare):
        return share_document(found, width)
    if isinstance(found, Calibrated):
        return calibrated_document(found, width)
    return fit_document(found, width)


def sweep_document(sweep: Sweep, width: int) -> Document:
    """Return a row per plan; the reasons of those that failed below it."""

    def of_knob(name: str) -> Column:
        return Column(_head(name, width), lambda row: row.values.get(name, "-"), right=True)

    columns = [
        *(of_knob(knob.name) for knob in sweep.knobs),
        *_FIGURES,
        Column("Status", lambda row: _STATUS.get(row.status, row.status)),
    ]
    notes = [*_reasons(sweep), *_notes(sweep.rows), *sweep.notes]
    total = next((row.device_total_bytes for row in sweep.rows if row.device_total_bytes), None)
    count = sum(row.ok for row in sweep.rows)
    came_up = Line(
        text("status"),
        text("{count} of {all_of} came up", count=count, all_of=len(sweep.rows)),
        GOOD if count == len(sweep.rows) else BAD,
    )
    head = [
        Line(text("model"), sweep.model, TOTAL),
        Line(text("command"), " ".join(sweep.command), CODE),
        *(Line(knob.name, ", ".join(knob.values)) for knob in sweep.knobs),
        *([Line(text("device"), text("{total:gib} GiB", total=total))] if total else []),
        came_up,
    ]
    verdict = ""
    if known := [row for row in sweep.rows if row.ok and row.tokens is not None]:
        best = max(known, key=lambda row: row.tokens or 0)
        verdict = text(
            "most KV tokens: {tokens:,} ({size:gib} GiB) with {values}",
            tokens=best.tokens,
            size=best.kv_cache_bytes,
            values=", ".join(f"{name} {value}" for name, value in best.values.items()),
        )
    plans = table(
        text("Plans of {model}", model=sweep.model),
        columns,
        sweep.rows,
        notes,
        width >= _WIDE,
        look=lambda row: PLAIN if row.ok else BAD,
    )
    return Document(
        kind="sweep",
        title=sweep.model,
        head=head,
        sections=[plans],
        verdict=verdict,
        badge=came_up,
        whole="sweep.json",
        simulated=any(row.simulated for row in sweep.rows),
        curves=curves(sweep),
    )


def fit_document(fit: Fit, width: int) -> Document:
    """Return a row per plan, in the order in which they were tried; the answer below them."""
    wide = width >= _WIDE
    numbers: dict[str, list[str]] = {}  # what is missing -> the tries that lack it
    for place, each in enumerate(fit.tries, start=1):
        if not each.holds:
            numbers.setdefault(_missing(each), []).append(str(place))

    def passes(place: int, each: Try) -> str:
        if each.holds or not wide:
            return text("yes") if each.holds else text("no")
        lacks = _missing(each)
        first = numbers[lacks][0]
        if first != str(place):
            return text("no: as try {number}", number=first)
        return text("no: {reasons}", reasons=lacks)

    def look(row: tuple[int, Try]) -> str:
        if row[1].value == fit.answer:
            return GOOD
        return PLAIN if row[1].holds else MUTED

    columns = [
        Column("Try", lambda row: row[0], number),
        Column(_head(fit.knob, width), lambda row: _shown(row[1].value), right=True),
        *(replace(each, value=partial(_of_plan, each)) for each in _FIGURES),
        Column("Passes", lambda row: passes(*row)),
    ]
    notes: list[str] = [text("wanted: {wanted}", wanted=join("; ", fit.wanted))]
    if not wide:
        notes += [
            text("try {number}: {reasons}", number=", ".join(tries), reasons=lacks)
            for lacks, tries in numbers.items()
            if lacks
        ]
    goal = _GOALS.get(fit.goal, fit.goal)
    title = text(
        "{goal} {knob} of {model}, tried from {low} to {high}",
        goal=goal,
        knob=fit.knob,
        model=fit.model,
        low=fit.low,
        high=fit.high,
    )
    notes += _notes([each.plan for each in fit.tries])
    cached = sum(each.plan.cached for each in fit.tries)
    tried = text(
        "plans: {count}, {made} made and {cached} from the cache",
        count=len(fit.tries),
        made=len(fit.tries) - cached,
        cached=cached,
    )
    if fit.seconds is not None:
        tried = join(", ", [tried, text("{seconds:.0f} s", seconds=fit.seconds)])
    answer = text("none")
    if fit.answer is not None:
        answer = text(
            "{goal} {knob} {value} ({step})",
            goal=goal,
            knob=fit.knob,
            value=_shown(fit.answer),
            step=text("step {step}", step=fit.step) if fit.step[:1].isdigit() else fit.step,
        )
    tail = [Line(text("tried"), tried), Line(text("answer"), answer, TOTAL)]
    if fit.flag is not None:
        tail.append(Line(text("use"), fit.flag, CODE))
    tail += _beyond(fit)
    tail += [Line(text("note"), note) for note in fit.notes]
    return Document(
        kind="fit",
        title=title,
        head=[],
        sections=[table(title, columns, enumerate(fit.tries, 1), notes, wide, look=look)],
        verdict="",
        tail=tail,
        whole="fit.json",
        simulated=any(each.plan.simulated for each in fit.tries),
    )


def _beyond(fit: Fit) -> list[Line]:
    """Return the first value that does not pass, why, and the owners that grew most up to it."""
    if fit.beyond is None:
        return []
    value = _shown(fit.beyond.value)
    why = text("{value}: {why}", value=value, why=modelled(fit.beyond.text, fit.beyond.modelled))
    lines = [Line(text("fails at"), why)]
    grown = [row for row in fit.beyond.owners if row.difference_bytes > 0][:_GROWN]
    if grown and fit.answer is not None:
        parts = [
            text(
                "{title} {growth} GiB to {size:gib4}",
                title=modelled(row.title, row.how == MODELLED),
                growth=f"{row.difference_bytes / GIB_BYTES:+,.4f}",
                size=row.beyond_bytes,
            )
            for row in grown
        ]
        grew = text("{owners}; compared with {answer}", owners=join("; ", parts),
                    answer=_shown(fit.answer))  # fmt: skip
        lines.append(Line(text("grew most"), grew))
    return lines


def _of_plan(column: Column, row: tuple[int, Try]) -> object:
    return column.of(row[1].plan)


def _marked(name: str) -> Callable[[PlanRow], str]:
    """Return what shows a size, marked where the profile of a simulated device has a part in it."""
    return lambda row: modelled(GIB(getattr(row, name)), row.headroom_how == MODELLED)


_FIGURES = (
    Column("KV, GiB", "kv_cache_bytes", GIB),
    Column("Tokens", "tokens", COUNT),
    Column(
        "Requests",
        lambda row: next(iter(row.concurrency_at.values()), row.max_concurrency),
        partial(number, spec=",.2f"),
    ),
    Column("Fits request,\nGiB", "fits_request_bytes", GIB, wide_only),
    Column("Fits device,\nGiB", _marked("fits_device_bytes"), when=wide_only, right=True),
    Column("Headroom,\nGiB", _marked("headroom_bytes"), right=True),
)


def _notes(rows: Sequence[PlanRow]) -> list[str]:
    lengths = dict.fromkeys(length for row in rows for length in row.concurrency_at)
    length = text("{tokens:,} tokens", tokens=next(iter(lengths))) if lengths else "max_model_len"
    notes: list[str] = [
        text(
            "requests: number of requests of {length} that the KV cache holds at once",
            length=length,
        ),
        text(
            "headroom: device total less all that is held at the serving peak, with the granted KV "
            "cache in use"
        )
        if any(row.until == READY for row in rows)
        else text(
            "headroom: device total less all that is held at the serving peak, with the granted KV "
            "cache in use; captured graphs and all else after the KV plan is not in it"
        ),
    ]
    if any(row.simulated for row in rows):
        notes.append(text("(m): with non-torch memory set by the profile of a simulated device"))
    return notes


def _missing(each: Try) -> str:
    reasons = join("; ", each.missing)
    return reasons if len(reasons) <= _REASON else one_line(reasons, _REASON)


def _reasons(sweep: Sweep) -> list[str]:
    """Return what the plans that failed say, each reason once with the plans it holds for."""
    groups: dict[str, list[PlanRow]] = {}
    for row in sweep.rows:
        if not row.ok:
            groups.setdefault(row.reason or row.status, []).append(row)
    notes: list[str] = []
    for reason, rows in groups.items():
        plan = ", ".join(f"{name}={value}" for name, value in rows[0].values.items())
        if len(rows) > 1:
            plan = text("{plan} and {count} more", plan=plan, count=len(rows) - 1)
        notes.append(text("{plan}: {reason}", plan=plan, reason=one_line(reason, _REASON)))
    return notes


def _head(name: str, width: int) -> str:
    """Return the name of an option, broken behind its dashes into lines of a narrow column."""
    if width >= _PAGE:
        return name
    lines = [""]
    for part in re.split(r"(?<=-)", name):
        if len(lines[-1]) + len(part) > _NARROW_COLUMN and lines[-1]:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _shown(value: str) -> str:
    return f"{int(value):,}" if value.isdecimal() else value


def render_sweep_csv(sweep: Sweep) -> str:
    """Return one row per plan, in the order of the combinations."""
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow([*(knob.name for knob in sweep.knobs), *CSV_COLUMNS])
    for row in sweep.rows:
        values = [row.values.get(knob.name) for knob in sweep.knobs]
        writer.writerow([*values, *(_cell(row, name) for name in CSV_COLUMNS)])
    return written.getvalue()


def _cell(row: PlanRow, name: str) -> object:
    if name.removesuffix("_bytes") in TERMS:
        return row.terms.get(name.removesuffix("_bytes"))
    value = getattr(row, name)
    return str(value).lower() if isinstance(value, bool) else value
