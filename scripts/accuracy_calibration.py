"""Leave one out: the error of a published run when another one has calibrated its device.

In: the table of published runs and what their plans gave; nothing is planned here. A correction
adds to memory that the engine reads as it is, so that what it makes of another plan's KV cache
follows from that plan's own count of processes and communicators; a test of ``tests/integration``
holds that against a plan with the corrected profile.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from scripts.accuracy_errors import PlannedRow
from scripts.accuracy_runs import PublishedRun
from vllm_memprof.plans.corrections import (
    ComparedRank,
    Corrections,
    ReportedFigure,
    holds_context,
)
from vllm_memprof.sim.presets import find_preset
from vllm_memprof.sim.profiles import load_profile

_FIGURE = "kv_cache"


@dataclass(frozen=True)
class Pair:
    """A run whose device another one has calibrated."""

    target: PublishedRun
    by: PublishedRun
    same_family: bool
    measure: str  # figure of the other run: non_torch | rest
    moved: int  # bytes that the corrections add to what the target holds
    before: float  # relative error of the KV cache
    after: float

    @property
    def better(self) -> bool | None:
        """None: the same."""
        if math.isclose(self.before, self.after, abs_tol=1e-9):
            return None
        return abs(self.after) < abs(self.before)


def family_of(run: PublishedRun) -> str:
    """Return the kind of a row's model, as its configuration has it."""
    preset = find_preset(run.model)
    return run.model if preset is None else str(preset.config.get("model_type"))


def equation_of(run: PublishedRun, planned: PlannedRow) -> str | None:
    """Return the equation of a row's release, which may be another than that of its stack."""
    named = re.search(r"\bE\d\b", run.release)
    return planned.equation if named is None else named[0]


def side_of(run: PublishedRun, planned: PlannedRow, published: bool) -> ComparedRank:
    """Return one side of a row: what was published, or what its plan gave."""
    requested = _requested(run)
    told: dict[str, ReportedFigure] = {}
    sizes: dict[str, tuple[float, float]] = {
        name: (each.value, each.half_unit) for name, each in run.published.items()
    }
    if not published:
        sizes = {name: (size, 0.0) for name, size in planned.figures.items() if size is not None}
    if "non_torch" in sizes:
        size, half = sizes["non_torch"]
        told["non_torch"] = ReportedFigure(round(size), round(half))
    if "weights" in sizes and _FIGURE in sizes:
        (weights, a), (kv, b) = sizes["weights"], sizes[_FIGURE]
        # all outside torch, as far as torch's own peak is as simulated
        told["used_by_device"] = ReportedFigure(round(requested - weights - kv), round(a + b))
    equation = equation_of(run, planned) if published else planned.equation
    return ComparedRank(told, equation, communicators=planned.communicators)


def _requested(run: PublishedRun) -> float:
    """Return the request; of a row alone, as both of its sides have the same."""
    profile = load_profile(run.device)
    total = run.total_bytes or profile.device.total_bytes
    args = [part for word in run.engine_args for part in word.split("=", 1)]
    option = "--gpu-memory-utilization"
    return total * (float(args[args.index(option) + 1]) if option in args else 0.9)


def pairs(runs: Sequence[PublishedRun], kept: Mapping[str, PlannedRow]) -> Iterator[Pair]:
    """Yield every pair of rows of one device and equation whose KV cache is published."""
    usable = [
        run
        for run in runs
        if run.id in kept and not run.inexact and kept[run.id].figures.get(_FIGURE)
    ]
    for target in usable:
        if _FIGURE not in target.published:
            continue
        planned = kept[target.id]
        for by in usable:
            other = kept[by.id]
            if by.id == target.id or by.device != target.device:
                continue
            if equation_of(by, other) != equation_of(target, planned):
                continue
            hardware = side_of(by, other, published=True)
            simulated_side = side_of(by, other, published=False)
            corrected = Corrections(hardware, simulated_side, load_profile(by.device))
            row = next(each for each in corrected.rows if each.owner == "non_torch")
            if row.difference_bytes is None:
                continue
            moved = effect(corrected, target, planned)
            value = target.published[_FIGURE].value
            simulated = planned.figures[_FIGURE] or 0.0
            yield Pair(
                target,
                by,
                family_of(by) == family_of(target),
                "non_torch" if "non_torch" in hardware.told else "rest",
                moved,
                (simulated - value) / value,
                (simulated - moved - value) / value,
            )


def effect(corrected: Corrections, target: PublishedRun, planned: PlannedRow) -> int:
    """Return what corrections add to the memory that a row's equation subtracts, bytes."""
    profile = load_profile(target.device)
    page = profile.device.huge_page_bytes
    moved = 0
    for row in corrected.rows:
        for each in row.constants:
            change = each.after - each.before
            if each.key == "kernels_bytes":
                moved += math.ceil(each.after / page) * page - math.ceil(each.before / page) * page
            elif each.key == "hccl_base_bytes":
                moved += change * planned.communicators
            elif each.key == "context_bytes" and holds_context(planned.equation):
                moved += change
    return moved


_SECTION = """\
## Calibrated with another run

The KV cache of a row if a different row of the same device and equation corrects the profile, by
its non-torch increase or by what its KV cache leaves. The second does not help: `memprof calibrate`
refuses a log that has no more.
"""


def section(runs: Sequence[PublishedRun], kept: Mapping[str, PlannedRow]) -> str:
    """Return the section of the page."""
    found = list(pairs(runs, kept))
    lines = [
        _SECTION,
        "| pairs | count | median size of the error before | after | better | worse | the same |",
        "|---|---|---|---|---|---|---|",
    ]
    groups = {
        "same family, non-torch printed": lambda p: p.same_family and p.measure == "non_torch",
        "same family, from the KV cache": lambda p: p.same_family and p.measure == "rest",
        "another family, non-torch printed": lambda p: (
            not p.same_family and p.measure == "non_torch"
        ),
        "another family, from the KV cache": lambda p: not p.same_family and p.measure == "rest",
    }
    for name, belongs in groups.items():
        group = [pair for pair in found if belongs(pair)]
        if group:
            lines.append(_summary(name, group))
    return "\n".join(lines) + "\n"


def _summary(name: str, group: Sequence[Pair]) -> str:
    before, after = (
        statistics.median(abs(each) for each in errors)
        for errors in ([pair.before for pair in group], [pair.after for pair in group])
    )
    verdicts = [pair.better for pair in group]
    return (
        f"| {name} | {len(group)} | {before:.2%} | {after:.2%} | {verdicts.count(True)} | "
        f"{verdicts.count(False)} | {verdicts.count(None)} |"
    )
