"""Propose a budget file from a run, and tighten one; no limit is loosened unless asked.

A proposed limit is the figure of the run's worst rank with a margin on the allowed side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from vllm_memprof.accounting.findings.table import blind_ranks
from vllm_memprof.accounting.model import Report
from vllm_memprof.accounting.summary import engine_name
from vllm_memprof.check.budget_file import Limit, parse_budget
from vllm_memprof.check.limits import (
    AT_LEAST,
    BUDGET,
    BYTES,
    FAIL_ON,
    KEYS,
    Key,
    LimitFigure,
    figure_of,
    read_figure,
)
from vllm_memprof.errors import UsageError
from vllm_memprof.units import GIB, MIB, format_bytes, format_gib, parse_size

#: Findings that a proposed file forbids, less those that its run has.
_PROPOSED_FINDINGS = (
    "equation-unbalanced",
    "hook-never-called",
    "kv-cache-beyond-device",
    "negative-kv",
    "reserved-peak-beyond-device",
)
_COLUMN = 44  # where the remarks of a proposed file begin


@dataclass(frozen=True)
class Margin:
    """Room between a figure and the limit that is made of it."""

    percent: Fraction  # 1/100 is 1%
    least: bool = True  # at least ``Figure.varies_bytes``, where a figure varies between starts

    def room(self, value: int, figure: LimitFigure) -> int:
        share = math.ceil(value * self.percent)
        return max(share, figure.varies_bytes) if self.least else share

    @property
    def text(self) -> str:
        percent = self.percent * 100
        shown = f"{percent.numerator}%" if percent.denominator == 1 else f"{float(percent):g}%"
        return (
            f"{shown}, and at least 16 MiB where a figure varies from start to start"
            if self.least
            else shown
        )


@dataclass(frozen=True)
class Ratchet:
    """A budget file after a turn of the ratchet."""

    text: str
    remarks: list[str]  # one per limit that changed, and per limit that could not


def propose_budget(report: Report, margin: Margin) -> str:
    """Return a budget file that the run keeps to, every limit with the figure it comes from.

    Raises:
        UsageError: no figure was measured.
    """
    lines = [_proposal(report, key, margin) for key in KEYS if key.table == BUDGET]
    if all(line.startswith("#") for line in lines):
        raise UsageError(
            "the run has no figure that a limit could be set on",
            hint="take a run that got its KV cache",
        )
    found = {finding.id for finding in report.findings}
    chosen = ", ".join(
        f'"{name}"'
        for name in _PROPOSED_FINDINGS
        if name not in found and not blind_ranks(report, name)
    )
    run = report.run
    engine = engine_name(run) or "engine unknown"
    device = (run.device or "device unknown") + (", simulated" if run.simulated else "")
    named = _one_line(f"{run.model}, {engine}, {device}")
    count = "1 rank" if len(report.ranks) == 1 else f"{len(report.ranks)} ranks"
    limits = "\n".join(lines)
    return f"""\
# Proposed by memprof check --init: {named}, {count}.
# Margin: {margin.text}.
# Every limit holds for every rank; sizes are bytes, MiB (2**20) or GiB (2**30).
[{BUDGET}]
{limits}
{FAIL_ON} = [{chosen}]

# With --baseline RUN, e.g.:
# [regression]
# max_kv_cache_drop = "1%"
# max_non_torch_growth = "100MiB"
"""


def _one_line(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _proposal(report: Report, key: Key, margin: Margin) -> str:
    figure = figure_of(key)
    value, reason = _worst(report, key)
    if value is None:
        return f"# {key.name}: not measured ({_one_line(str(reason))})"
    if value < 0 and key.sense == AT_LEAST:
        return f"# {key.name}: {format_bytes(value)} {figure.unit} in the run, below any limit"
    limit = _limit(value, key, margin)
    shown = limit if isinstance(limit, int) else f'"{limit}"'
    in_gib = f" ({format_gib(value)} GiB)" if figure.unit == BYTES and value >= GIB else ""
    measured = f"{format_bytes(value)} {figure.unit}{in_gib} in the run"
    return f"{f'{key.name} = {shown}':<{_COLUMN}}# {measured}"


def _worst(report: Report, key: Key) -> tuple[int | None, str | None]:
    """Return (the figure nearest to its limit, why it is not known on one of the ranks)."""
    values = []
    for reading in read_figure(report, figure_of(key)):
        if reading.value is None:
            return None, reading.reason
        values.append(reading.value)
    return (min(values) if key.sense == AT_LEAST else max(values)), None


def _limit(value: int, key: Key, margin: Margin) -> int | str:
    """Return a figure with the margin, as a file has it.

    Rounded to the allowed side where it has a margin, exact bytes where it has none.
    """
    figure = figure_of(key)
    room = margin.room(value, figure)
    amount = max(0, value - room) if key.sense == AT_LEAST else value + room
    if figure.unit != BYTES or not margin.percent or amount < MIB:
        return amount
    unit, name, digits = (GIB, "GiB", 2) if amount >= GIB else (MIB, "MiB", 1)
    steps = Fraction(amount * 10**digits, unit)
    count = math.floor(steps) if key.sense == AT_LEAST else math.ceil(steps)
    return f"{count // 10**digits}.{count % 10**digits:0{digits}d}{name}"


def tighten_budget(
    text: str, name: str, report: Report, margin: Margin, force: bool = False
) -> Ratchet:
    """Return a budget file whose limits are the run's figures with a margin, where that is tighter.

    Comments, order and everything else of the text are kept. Percentages, findings and
    [regression] are not touched.

    Args:
        text: of the budget file.
        name: of the file, for messages.
        report: the run.
        margin: room that the new limits leave.
        force: loosen as well, so that every limit is the run's figure with the margin.

    Raises:
        UsageError: the file has a mistake, or a form that cannot be rewritten.
    """
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    try:
        document: Any = tomlkit.parse(text)
    except TOMLKitError as exc:  # what tomllib reads and tomlkit does not
        raise UsageError(
            f"{name} cannot be rewritten: {exc}", hint="write one key per line"
        ) from exc
    remarks, wanted = [], dict[tuple[str, str], object]()
    for limit in parse_budget(text, name).limits:
        if limit.key.table != BUDGET or limit.amount is None:
            continue
        value, reason = _worst(report, limit.key)
        if value is None:
            remarks.append(f"{limit.key.name} stays: not measured ({reason})")
            continue
        if value < 0 and limit.key.sense == AT_LEAST:
            remarks.append(f"{limit.key.name} stays: {value:,} in the run, below any limit")
            continue
        new = _limit(value, limit.key, margin)
        amount = new if isinstance(new, int) else parse_size(new)
        if amount != limit.amount and (force or _tighter(amount, limit)):
            document[BUDGET][limit.key.name] = new
            wanted[BUDGET, limit.key.name] = (amount, None)
            word = "tightened" if _tighter(amount, limit) else "loosened"
            shown = new if isinstance(new, str) else f"{new:,}"
            remarks.append(f"{limit.key.name} {word}: {limit.written} → {shown}")
    changed = tomlkit.dumps(document)
    # a form of TOML that is not written right changes more than the wanted limits
    if _limits(changed, name) != {**_limits(text, name), **wanted}:
        raise UsageError(
            f"{name} cannot be rewritten", hint="write one key per line, below [budget]"
        )
    return Ratchet(changed, remarks)


def _limits(text: str, name: str) -> dict[tuple[str, str], object]:
    rows = parse_budget(text, name).limits
    return {(row.key.table, row.key.name): (row.amount, row.percent) for row in rows}


def _tighter(amount: int, limit: Limit) -> bool:
    old = limit.amount or 0
    return amount > old if limit.key.sense == AT_LEAST else amount < old
