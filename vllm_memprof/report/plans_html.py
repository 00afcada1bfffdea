"""Writes a sweep as one self-contained page: its curves, and every plan in a table; see ``report.html``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from vllm_memprof.plans.rows import Knob, PlanRow, Sweep
from vllm_memprof.report.html import render_page, script_json
from vllm_memprof.report.plans import sweep_section
from vllm_memprof.units import GIB, format_bytes, format_gib

_WIDE = 200


@dataclass(frozen=True)
class Figure:
    """What the curves can show."""

    name: str  # of a ``PlanRow``
    title: str
    unit: str  # tokens | GiB | requests


FIGURES = (
    Figure("tokens", "KV tokens", "tokens"),
    Figure("fits_request_tokens", "Honest KV tokens", "tokens"),
    Figure("kv_cache_bytes", "KV cache, GiB", "GiB"),
    Figure("fits_request_kv_cache_bytes", "Honest KV cache, GiB", "GiB"),
    Figure("spare_bytes", "Headroom, GiB", "GiB"),
    Figure("max_concurrency", "Requests of max_model_len", "requests"),
)


@dataclass(frozen=True)
class Line:
    """Plans that differ in one option alone, in the order of its values."""

    name: str  # the values of the other options
    places: list[float]  # on the axis
    values: list[str]
    figures: dict[
        str, list[int | float | None]
    ]  # by name; None: not known, or the plan did not come up


@dataclass(frozen=True)
class Marks:
    """Plans that did not come up: they have no figure to be drawn at."""

    places: list[float]
    texts: list[str]


@dataclass(frozen=True)
class Curve:
    """Everything against one option."""

    knob: str
    ticks: list[tuple[float, str]]
    others: int  # options that the lines differ in
    lines: list[Line]
    failed: Marks
    text: str


def curves(sweep: Sweep) -> list[Curve]:
    """One for each option of several values."""
    return [_curve(sweep, knob) for knob in sweep.knobs if len(knob.values) > 1]


def _curve(sweep: Sweep, knob: Knob) -> Curve:
    places = _places(knob.values)
    others = [
        other.name for other in sweep.knobs if other.name != knob.name and len(other.values) > 1
    ]
    groups: dict[str, list[PlanRow]] = {}
    for row in sweep.rows:
        name = ", ".join(f"{other} {row.values.get(other, '-')}" for other in others)
        groups.setdefault(name, []).append(row)
    lines, failed = [], Marks([], [])
    for name, rows in groups.items():
        rows = sorted(rows, key=lambda row: places[row.values[knob.name]])
        lines.append(
            Line(
                name=name or sweep.model,
                places=[places[row.values[knob.name]] for row in rows],
                values=[row.values[knob.name] for row in rows],
                figures={
                    f.name: [getattr(row, f.name) if row.ok else None for row in rows]
                    for f in FIGURES
                },
            )
        )
        for row in (row for row in rows if not row.ok):
            failed.places.append(places[row.values[knob.name]])
            failed.texts.append(
                f"{knob.name} {row.values[knob.name]}{', ' + name if name else ''}: {row.reason}"
            )
    told = (
        f"{len(lines)} lines, one for each combination of {', '.join(others)}; those that agree cover each other"
        if others
        else "one line"
    )
    text = f"{told}; points are plans, what is between them was not planned"
    text += (
        f"; red crosses below: {len(failed.places)} plans that did not come up"
        if failed.places
        else ""
    )
    ticks = sorted((place, value) for value, place in places.items())
    return Curve(knob.name, ticks, len(others), lines, failed, text)


def _places(values: list[str]) -> dict[str, float]:
    """Where values stand: numbers as they are, names one after the other in their order."""
    try:
        numbers = {value: float(value) for value in values}
    except ValueError:
        numbers = {}
    if (
        not numbers
        or len(set(numbers.values())) < len(values)
        or any(abs(n) == float("inf") for n in numbers.values())
    ):
        return {value: float(place) for place, value in enumerate(values)}
    return numbers


def render_sweep_html(sweep: Sweep) -> str:
    """The page.

    Raises:
        MemprofError: jinja2 or plotly is not installed.
    """
    drawn = curves(sweep)
    known = [
        figure
        for figure in FIGURES
        if any(getattr(row, figure.name) is not None for row in sweep.rows)
    ]
    figures = known or [FIGURES[0]]
    data: dict[str, Any] = {
        "gib": GIB,
        "figures": [asdict(figure) for figure in figures],
        "curves": [asdict(each) for each in drawn],
    }
    return render_page(
        "sweep",
        sweep=sweep,
        failed=sum(not row.ok for row in sweep.rows),
        verdict=_verdict(sweep),
        head=_head(sweep),
        figures=figures,
        curves=drawn,
        section=sweep_section(sweep, _WIDE),
        data=script_json(data),
        modelled=any(row.simulated for row in sweep.rows),
    )


def _head(sweep: Sweep) -> list[tuple[str, str]]:
    lines = [("command", " ".join(sweep.command))]
    lines += [(knob.name, ", ".join(knob.values)) for knob in sweep.knobs]
    total = next((row.device_total_bytes for row in sweep.rows if row.device_total_bytes), None)
    return [*lines, *([("device", f"{format_gib(total)} GiB")] if total else [])]


def _verdict(sweep: Sweep) -> str:
    """The plan with the most KV tokens."""
    known = [row for row in sweep.rows if row.ok and row.tokens is not None]
    if not known:
        return ""
    best = max(known, key=lambda row: row.tokens or 0)
    values = ", ".join(f"{name} {value}" for name, value in best.values.items())
    return f"most KV tokens: {format_bytes(best.tokens)} ({format_gib(best.kv_cache_bytes)} GiB) with {values}"
