"""The documents of a sweep and of a search: a row per plan, then what was found."""

from __future__ import annotations

import re
from collections.abc import Sequence

from vllm_memprof.document import (
    BAD,
    CODE,
    GOOD,
    MUTED,
    PLAIN,
    TOTAL,
    Document,
    Head,
    Line,
    Row,
    Section,
)
from vllm_memprof.plans.rows import READY, Fit, PlanRow, Sweep, Try
from vllm_memprof.record.spans import MODELLED
from vllm_memprof.tables import modelled, number
from vllm_memprof.text import join, text
from vllm_memprof.units import GIB, format_bytes, format_gib, one_line

#: From these widths on the tables have all their columns, and all names in one line.
_WIDE, _PAGE = 100, 200
#: Characters of an option's name in a narrower table, and of a reason below any table.
_NARROW_COLUMN, _REASON = 11, 200
#: Owners that grew which are shown below a search.
_GROWN = 3
_STATUS = {"ok": text("ok"), "oom": text("oom"), "failed": text("failed")}
_GOALS = {"smallest": text("smallest"), "largest": text("largest")}


def sweep_document(sweep: Sweep, width: int) -> Document:
    """Return a row per plan; the reasons of those that failed below it."""
    wide = width >= _WIDE
    columns = [
        *(Head(knob.name if width >= _PAGE else _broken(knob.name)) for knob in sweep.knobs),
        *_columns(wide),
        Head(text("Status"), right=False),
    ]
    rows = [
        Row(
            [
                *(row.values.get(knob.name, "-") for knob in sweep.knobs),
                *_figures(row, wide),
                _STATUS.get(row.status, row.status),
            ],
            style=PLAIN if row.ok else BAD,
        )
        for row in sweep.rows
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
    plans = Section(text("Plans of {model}", model=sweep.model), columns, rows, notes)
    return Document(
        kind="sweep",
        title=sweep.model,
        head=head,
        sections=[plans],
        verdict=verdict,
        badge=came_up,
        whole="sweep.json",
    )


def fit_document(fit: Fit, width: int) -> Document:
    """Return a row per plan, in the order in which they were tried; the answer below them."""
    wide = width >= _WIDE
    columns = [
        Head(text("Try")),
        Head(fit.knob if width >= _PAGE else _broken(fit.knob)),
        *_columns(wide),
        Head(text("Passes"), right=False),
    ]
    rows = []
    for i, each in enumerate(fit.tries, start=1):
        passes = text("yes") if each.holds else text("no")
        if wide and not each.holds:
            passes = text("no: {reasons}", reasons=_missing(each))
        style = GOOD if each.value == fit.answer else PLAIN if each.holds else MUTED
        rows.append(
            Row([str(i), _shown(each.value), *_figures(each.row, wide), passes], style=style)
        )
    notes: list[str] = [text("wanted: {wanted}", wanted=join("; ", fit.wanted))]
    if not wide:
        notes += [
            text("try {number}: {reasons}", number=i, reasons=_missing(each))
            for i, each in enumerate(fit.tries, 1)
            if each.missing
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
    notes += _notes([each.row for each in fit.tries])
    cached = sum(each.row.cached for each in fit.tries)
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
        sections=[Section(title, columns, rows, notes)],
        verdict="",
        tail=tail,
        whole="fit.json",
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
                growth=f"{row.difference_bytes / GIB:+,.4f}",
                size=row.beyond_bytes,
            )
            for row in grown
        ]
        grew = text("{owners}; compared with {answer}", owners=join("; ", parts),
                    answer=_shown(fit.answer))  # fmt: skip
        lines.append(Line(text("grew most"), grew))
    return lines


def _columns(wide: bool) -> list[Head]:
    return [
        Head(text("KV, GiB")),
        Head(text("Tokens")),
        Head(text("Requests")),
        *([Head(text("Fits request,\nGiB"))] if wide else []),
        *([Head(text("Fits device,\nGiB"))] if wide else []),
        Head(text("Spare,\nGiB")),
    ]


def _figures(row: PlanRow, wide: bool) -> list[str]:
    concurrency = next(iter(row.concurrency_at.values()), row.max_concurrency)
    mark = row.spare_how == MODELLED
    spare = modelled(format_gib(row.spare_bytes), mark)
    fits = modelled(format_gib(row.fits_device_bytes), mark)
    return [
        format_gib(row.kv_cache_bytes),
        format_bytes(row.tokens),
        number(concurrency, ",.2f"),
        *([format_gib(row.fits_request_bytes), fits] if wide else []),
        spare,
    ]


def _notes(rows: Sequence[PlanRow]) -> list[str]:
    lengths = dict.fromkeys(length for row in rows for length in row.concurrency_at)
    length = text("{tokens:,} tokens", tokens=next(iter(lengths))) if lengths else "max_model_len"
    notes: list[str] = [
        text(
            "requests: number of requests of {length} that the KV cache holds at once",
            length=length,
        ),
        text(
            "spare: device total less all that is held at the serving peak, with the granted KV "
            "cache in use"
        )
        if any(row.until == READY for row in rows)
        else text(
            "spare: device total less all that is held at the serving peak, with the granted KV "
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


def _broken(name: str) -> str:
    """Return the name of an option in lines of a narrow column, broken behind its dashes."""
    lines = [""]
    for part in re.split(r"(?<=-)", name):
        if len(lines[-1]) + len(part) > _NARROW_COLUMN and lines[-1]:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _shown(value: str) -> str:
    return f"{int(value):,}" if value.isdecimal() else value
