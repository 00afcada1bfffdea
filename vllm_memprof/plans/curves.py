"""The curves of a sweep: plain figures, which its page draws."""

from __future__ import annotations

import contextlib
import math

from vllm_memprof.document import Curve, CurveFigure, CurveLine, Curves, Marks
from vllm_memprof.plans.model import DOCUMENTS, TABLES, Knob, PlanRow, Sweep
from vllm_memprof.text import titled

#: More lines than these have no legend: a browser would draw it for seconds, and nobody reads it.
MOST_NAMED = 24


FIGURES = [
    CurveFigure(name, titled(row["title"]), row["unit"]) for name, row in TABLES["curves"].items()
]


def curves(sweep: Sweep) -> Curves:
    """Return one for each option of several values, and the figures that a plan has."""
    known = [
        figure
        for figure in FIGURES
        if any(getattr(row, figure.name) is not None for row in sweep.rows)
    ]
    drawn = [_curve(sweep, knob) for knob in sweep.knobs if len(knob.values) > 1]
    return Curves(known or [FIGURES[0]], drawn)


def _curve(sweep: Sweep, knob: Knob) -> Curve:
    # where values stand: numbers as they are, names one after the other in their order
    numbers: list[float] = []
    with contextlib.suppress(ValueError):
        numbers = [float(value) for value in knob.values]
    if len({*filter(math.isfinite, numbers)}) < len(knob.values):
        numbers = [float(place) for place in range(len(knob.values))]
    places = dict(zip(knob.values, numbers, strict=True))
    others = [each.name for each in sweep.knobs if each is not knob and len(each.values) > 1]
    groups: dict[str, list[PlanRow]] = {}
    failed = Marks([], [])
    for row in sorted(sweep.rows, key=lambda row: places[row.values[knob.name]]):
        name = ", ".join(f"{other} {row.values.get(other, '-')}" for other in others)
        groups.setdefault(name or sweep.model, []).append(row)
        if not row.ok:
            failed.places.append(places[row.values[knob.name]])
            failed.texts.append(f"{row.title}: {row.reason}")
    lines = []
    for name, rows in groups.items():
        values = [row.values[knob.name] for row in rows]
        figures = {
            figure.name: [getattr(row, figure.name) if row.ok else None for row in rows]
            for figure in FIGURES
        }
        lines.append(CurveLine(name, [places[value] for value in values], values, figures))
    named = len(lines) <= MOST_NAMED
    told = DOCUMENTS.say(
        "curve",
        {
            "lines": others and len(lines),
            "options": ", ".join(others),
            "unnamed": not named,
            "failed": len(failed.places) or None,
        },
    )
    ticks = sorted((place, value) for value, place in places.items())
    return Curve(knob.name, ticks, len(others), lines, failed, told, named)
