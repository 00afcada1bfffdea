"""What ``scripts.accuracy`` writes in ``docs``: the page, its table and its picture.

In: the table of published runs, and what their plans gave. Nothing is planned here.
"""

from __future__ import annotations

import csv
import io
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from scripts import accuracy_calibration
from scripts.accuracy_errors import (
    TARGETS,
    Error,
    PlannedRow,
    errors_of,
    statistics_of,
)
from scripts.accuracy_runs import FIGURES, PublishedRun
from vllm_memprof.sim.profiles import load_profile
from vllm_memprof.units import GIB

DOCS = Path(__file__).parent.parent / "docs"
TITLES = {
    "weights": "weights",
    "peak_activation": "peak activation",
    "non_torch": "non-torch increase",
    "kv_cache": "KV cache",
    "tokens": "KV cache tokens",
    "concurrency": "max concurrency",
    "graphs": "graph memory",
    "limit": "start limit",
}
_HEAD = """\
# Plans against hardware

{count} starts on NPUs were published with commands and values. The simulated device plans
{planned} of them; the others have [a reason](#not-planned). `make accuracy` plans each row of
[`tests/data/hardware_runs.toml`](../tests/data/hardware_runs.toml) on the nearest stack; where the
release had another equation, with the plan's readings in it. Single runs:
[accuracy.csv](accuracy.csv).

An error is (simulated − published) / published. A target is met if a value that rounds to the
published one is within it. Only **predicted** values count: no constant of the simulated device was
taken from that run, and the source is exact. "Without taken constants" removes each constant that
any run on hardware gave. Start limit: the largest `max-num-batched-tokens` that starts.

![Signed errors of each value, by device](accuracy.svg)
"""


def page(runs: Sequence[PublishedRun], kept: Mapping[str, PlannedRow]) -> str:
    """Return the text of the page."""
    done = [(run, kept[run.id]) for run in runs if run.id in kept]
    errors = [error for run, planned in done for error in errors_of(run, planned)]
    failed = [(run, planned) for run, planned in done if not (errors_of(run, planned) or run.fails)]
    missing = [run for run in runs if run.id not in kept]
    head = _HEAD.format(
        count=len(runs), planned=len(done) - len(failed), failed=len(failed) + len(missing)
    )
    parts = [
        head,
        _earlier(done),
        "## Errors by figure\n",
        _statistics(errors),
        "## Starts that failed\n",
        _failing(done),
        "## By device and equation: median error (values that meet the target)\n",
        _by_device(errors),
        "## Outside the targets\n",
        _outside(errors),
        accuracy_calibration.section([run for run, _ in done], kept),
        "## Not planned\n",
        _failed(failed, missing),
        _ADD,
    ]
    return "\n".join(parts)


#: Of no consequence for a rank alone: it has no collective.
_OF_SEVERAL = "hccl_base_bytes"


def _earlier(done: Sequence[tuple[PublishedRun, PlannedRow]]) -> str:
    """Name the rows that were planned before a constant of their device's profile changed."""
    changed: dict[str, list[str]] = {}  # row -> the constants
    for run, planned in done:
        memory = load_profile(run.device).memory
        if names := [
            name
            for name, value in planned.constants.items()
            if value != getattr(memory, name) and (planned.world_size != 1 or name != _OF_SEVERAL)
        ]:
            changed[run.id] = names
    if not changed:
        return ""
    constants = ", ".join(f"`{name}`" for name in sorted(set().union(*changed.values())))
    rows = ", ".join(f"`{row}`" for row in changed)
    said = (
        f"**Planned before a constant of the simulated device changed** ({constants}), and not "
        "planned again since, so that their graphs, non-torch memory and KV cache may differ from "
        f"what the same plan gives now: {rows}."
    )
    return textwrap.fill(said, 100, break_long_words=False, break_on_hyphens=False) + "\n"


_ADD = """\
## Add a run

`memprof sim calibrate RUN --row FILE.toml` writes a recorded run on an NPU as a row of such a
table. `python -m scripts.accuracy --run --rows FILE.toml` plans the rows of your own file.
"""


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:+.2f} %"


def _value(figure: str, value: float | None) -> str:
    if value is None:
        return "-"
    if FIGURES.get(figure):
        return f"{value / GIB:.4f} GiB"
    return f"{value:,.2f}" if figure == "concurrency" else f"{value:,.0f}"


def _statistics(errors: Sequence[Error]) -> str:
    rows = []
    for figure, title in TITLES.items():
        found = [error for error in errors if error.figure == figure]
        stats = statistics_of(found)
        if stats is None:
            continue
        bare = [e.relative_without_fitted for e in found if e.counts]
        known = sorted((each for each in bare if each is not None), key=abs)
        target = TARGETS.get(figure)
        within = "-" if stats.met is None else f"{stats.met} of {stats.count} within {target:.1%}"
        rows.append([
            title, str(stats.count), _percent(stats.median), f"{100 * stats.percentile_90:.2f} %",
            f"{_percent(stats.worst.relative)} ({stats.worst.run.id})", within,
            f"{_percent(_median(known))}, {_percent(known[-1])}" if known else "-",
        ])  # fmt: skip
    header = ("figure", "predicted", "median", "90th percentile of sizes", "worst", "target")
    return _table((*header, "without taken constants: median, worst"), rows)


def _median(values: Sequence[float]) -> float | None:
    ordered = sorted(values)
    if not ordered:
        return None
    middle = len(ordered) // 2
    return (ordered[middle] + ordered[-middle - 1]) / 2


def _by_device(errors: Sequence[Error]) -> str:
    """Return median and numbers of the predicted values of each device, equation and stack."""
    shown = ("weights", "peak_activation", "kv_cache", "tokens", "graphs")
    groups: dict[tuple[str, str, str], list[Error]] = {}
    for each in errors:
        key = each.run.device, each.planned.equation or "-", each.planned.stack or "-"
        groups.setdefault(key, []).append(each)
    rows = []
    for key, members in sorted(groups.items()):
        found = [statistics_of([e for e in members if e.figure == name]) for name in shown]
        if any(found):
            cells = [
                f"{_percent(each.median)} ({each.met} of {each.count})" if each else "-"
                for each in found
            ]
            rows.append([*key, *cells])
    return _table(("device", "equation", "stack", *(TITLES[name] for name in shown)), rows)


def outside(errors: Iterable[Error]) -> list[Error]:
    """Return the predictions that miss their target; each needs a word in its row."""
    return [error for error in errors if error.met is False and error.counts]


def _outside(errors: Sequence[Error]) -> str:
    """Return a line per reason; tokens that follow from a KV cache have no line of their own."""
    rows: dict[str, list[str]] = {}
    for error in outside(errors):
        said = error.run.explained.get(error.figure)
        why = said or f"unexplained: {error.run.unexplained.get(error.figure, 'no reason known')}"
        if re.search("as the (KV cache|tokens)$", why):
            continue
        value = f"{error.run.id}, {TITLES[error.figure]} {_percent(error.relative)}"
        rows.setdefault(re.sub(r"^[\d.]+ of [\d.]+ MiB: |^[\d.]+ MiB: ", "", why), []).append(value)
    listed = [["; ".join(values), why] for why, values in rows.items()]
    return _table(("value", "why"), listed) if listed else "None.\n"


def _kind(error: Error) -> str:
    if error.fitted:
        return "fitted"
    return "inexact" if error.run.inexact else "predicted"


def _csv(errors: Sequence[Error]) -> str:
    """Return a line per published figure: sizes in bytes, errors as shares."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([
        "row", "release", "stack", "figure", "published", "half_unit", "simulated", "error",
        "error_without_taken_constants", "kind", "source", "not_known", "plan_differs",
    ])  # fmt: skip
    for error in errors:
        run, bare = error.run, error.relative_without_fitted
        writer.writerow([
            run.id, run.release, error.planned.stack, error.figure,
            f"{error.published.value:.10g}", f"{error.published.half_unit:.10g}",
            f"{error.simulated:.10g}", f"{error.relative:.6f}",
            "" if bare is None else f"{bare:.6f}", _kind(error), run.source,
            "; ".join(run.unknown), "; ".join(run.differs),
        ])  # fmt: skip
    return out.getvalue()


def _failing(done: Sequence[tuple[PublishedRun, PlannedRow]]) -> str:
    """Return a line per start that failed on hardware: how, and how its plan ended."""
    rows = [
        [run.id, run.fails, planned.failure or "starts", run.explained.get("fails", "")]
        for run, planned in done
        if run.fails
    ]
    return _table(("row", "on hardware", "plan", "why it differs"), rows) if rows else "None.\n"


def _failed(
    failed: Sequence[tuple[PublishedRun, PlannedRow]], missing: Sequence[PublishedRun]
) -> str:
    rows: dict[str, list[str]] = {}
    for run, planned in failed:
        if run.limit is None or run.published:
            rows.setdefault(planned.reason or planned.status, []).append(run.id)
    for run in missing:
        rows.setdefault(run.not_planned or "not planned yet", []).append(run.id)
    listed = [[", ".join(names), why] for why, names in rows.items()]
    return _table(("rows", "why"), listed) if listed else "None.\n"


# --- the picture ----------------------------------------------------------------------------------

_COLOURS = {"910b": "#0072b2", "a3": "#d55e00", "310p": "#009e73"}
_WIDTH, _LEFT, _ROW, _TOP = 960, 150, 62, 46
_TICKS = (-0.5, -0.1, -0.01, -0.001, 0.0, 0.001, 0.01, 0.1, 0.5)


def _x(relative: float) -> float:
    """Return the place of an error: linear up to 0.1 %, then a decade per equal step."""
    size = math.log10(1 + abs(relative) / 0.001)
    most = math.log10(1 + 1.0 / 0.001)
    middle, half = (_LEFT + _WIDTH - 20) / 2, (_WIDTH - 20 - _LEFT) / 2
    return middle + math.copysign(min(size / most, 1.0), relative) * half


def picture(runs: Sequence[PublishedRun], kept: Mapping[str, PlannedRow]) -> str:
    """Return an SVG: a dot per published figure, by its signed error."""
    errors = [e for run in runs if run.id in kept for e in errors_of(run, kept[run.id])]
    shown = [name for name in TITLES if name != "concurrency"]  # follows tokens
    figures = [name for name in shown if any(e.figure == name for e in errors)]
    height = _TOP + _ROW * len(figures) + 64
    bottom = _TOP + _ROW * len(figures)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="13">',
        "<title>Signed errors of plans against published runs</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        '<text x="12" y="26" font-size="15">Plans against published runs: signed error, '
        "a dot per published figure</text>",
    ]
    for tick in _TICKS:
        x = _x(tick)
        colour, width = ("#555555", 1.5) if tick == 0 else ("#dddddd", 1)
        label = "0" if tick == 0 else f"{100 * tick:+g} %"
        out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}" '
                   f'stroke="{colour}" stroke-width="{width}"/>')  # fmt: skip
        out.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle" fill="#333333">'
                   f"{label}</text>")  # fmt: skip
    for row, figure in enumerate(figures):
        out += _band(figure, [e for e in errors if e.figure == figure], _TOP + _ROW * row)
    out += _legend(bottom + 44)
    return "\n".join([*out, "</svg>"]) + "\n"


def _band(figure: str, errors: Sequence[Error], top: float) -> list[str]:
    """Draw one figure: its target as a band, its errors as dots that do not hide one another."""
    middle = top + _ROW / 2
    out = [f'<text x="12" y="{middle + 4}" fill="#111111">'
           f"{escape(TITLES[figure])}</text>"]  # fmt: skip
    target = TARGETS.get(figure)
    if target is not None:
        left, right = _x(-target), _x(target)
        out.insert(0, f'<rect x="{left:.1f}" y="{top + 6}" width="{right - left:.1f}" '
                      f'height="{_ROW - 12}" fill="#e3f1e3"/>')  # fmt: skip
    placed: list[tuple[float, int]] = []
    for error in sorted(errors, key=lambda each: each.relative):
        x = _x(error.relative)
        lane = next(n for n in range(99) if all(abs(x - o) > 10 or n != m for o, m in placed))
        placed.append((x, lane))
        step = (lane + 1) // 2 * 9 * (1 if lane % 2 else -1)
        y = max(top + 7, min(top + _ROW - 7, middle + step))
        colour = _COLOURS.get(error.run.device, "#444444")
        fill = colour if error.counts else "#ffffff"
        dashes = ' stroke-dasharray="2 2"' if error.run.inexact else ""
        told = f"{error.run.id}: {_percent(error.relative)}, {_kind(error)}"
        out.append(_dot(x, y + 4, fill, colour, dashes, escape(told)))
    return out


def _legend(y: float) -> list[str]:
    entries: list[tuple[str, Callable[[float], str]]] = []
    for device, title in (("910b", "Ascend 910B"), ("a3", "Ascend 910C (A3)")):
        entries.append((title, lambda x, c=_COLOURS[device]: _dot(x, y, c, c, "")))  # type: ignore[misc]
    entries.append(("fitted", lambda x: _dot(x, y, "#ffffff", "#444444", "")))
    dashed = ' stroke-dasharray="2 2"'
    entries.append(("inexact", lambda x: _dot(x, y, "#ffffff", "#444444", dashed)))
    entries.append(("target", lambda x: f'<rect x="{x - 8}" y="{y - 11}" width="16" height="14" '
                                        'fill="#e3f1e3" stroke="#b5d6b5"/>'))  # fmt: skip
    out, x = [], float(_LEFT)
    for title, draw in entries:
        out.append(draw(x))
        out.append(f'<text x="{x + 12}" y="{y}" fill="#333333">{title}</text>')
        x += 40 + 8 * len(title)
    return out


def _dot(x: float, y: float, fill: str, stroke: str, more: str, told: str = "") -> str:
    """Return a dot on the line of a text at ``y``."""
    circle = f'<circle cx="{x:.1f}" cy="{y - 4:.1f}" r="4.5" fill="{fill}" stroke="{stroke}" '
    circle += f'stroke-width="1.5"{more}'
    return f"{circle}><title>{told}</title></circle>" if told else f"{circle}/>"


# --- writing --------------------------------------------------------------------------------------


def line(run: PublishedRun, planned: PlannedRow) -> str:
    """Return a row's outcome in one line, for a terminal."""
    told = [f"{run.id}: {planned.status}, {planned.seconds:.0f} s"]
    if planned.reason:
        told.append(textwrap.shorten(planned.reason, 200))
    for error in errors_of(run, planned):
        simulated, published = (
            _value(error.figure, v) for v in (error.simulated, error.published.value)
        )
        told.append(f"{error.figure} {simulated} / {published} {_percent(error.relative)}")
    return "; ".join(told)


def files(runs: Sequence[PublishedRun], kept: Mapping[str, PlannedRow]) -> dict[Path, str]:
    """Return the files of the page and their texts."""
    errors = [e for run in runs if run.id in kept for e in errors_of(run, kept[run.id])]
    return {
        DOCS / "accuracy.md": page(runs, kept),
        DOCS / "accuracy.csv": _csv(errors),
        DOCS / "accuracy.svg": picture(runs, kept),
    }
