"""Propose a budget file from a run, and tighten one; no limit is loosened unless asked.

A proposed limit is the figure of the run's worst rank with a margin on the allowed side.
"""

from __future__ import annotations

import json
import math
from fractions import Fraction
from typing import Any, NamedTuple

from vllm_memprof.accounting.findings.table import blind_ranks
from vllm_memprof.accounting.model import Report
from vllm_memprof.accounting.summary import device_text, engine_text
from vllm_memprof.check.budget_file import parse_budget
from vllm_memprof.check.limits import (
    AT_LEAST,
    BUDGET,
    BYTES,
    FAIL_ON,
    KEYS,
    PROPOSED,
    LimitKey,
    read_figure,
)
from vllm_memprof.errors import UsageError
from vllm_memprof.units import GIB, MIB, format_bytes, format_gib, parse_size

_COLUMN = 44  # where the remarks of a proposed file begin


class Margin(NamedTuple):
    """Room between a figure and the limit that is made of it."""

    percent: Fraction  # 1/100 is 1%
    least: bool = True  # at least ``varies_bytes`` of a figure, where it varies between starts


def propose_budget(report: Report, margin: Margin) -> str:
    """Return a budget file that the run keeps to, every limit with the figure it comes from.

    Raises:
        UsageError: no figure was measured.
    """
    lines = []
    for key in (key for key in KEYS if key.table == BUDGET):
        limit, figure = _limit(report, key, margin)
        value = f"{f'{key.name} = {json.dumps(limit)}':<{_COLUMN}}# {figure}"
        lines.append(f"# {key.name}: {_one_line(figure)}" if limit is None else value)
    if all(line.startswith("#") for line in lines):
        raise UsageError(
            "the run has no figure that a limit could be set on",
            "take a run that got its KV cache",
        )
    found = {finding.id for finding in report.findings}
    absent = [name for name in PROPOSED if name not in found and not blind_ranks(report, name)]
    run, least = report.run, ", and at least 16 MiB if a value varies from start to start"
    named = _one_line(f"{run.model}, {engine_text(run)}, {device_text(run)}")
    limits = "\n".join(lines)
    return f"""\
# Proposed by memprof check --init: {named}, ranks: {len(report.ranks)}.
# Margin: {float(100 * margin.percent):g}%{least if margin.least else ""}.
# Every limit holds for every rank; sizes are bytes, MiB (2**20) or GiB (2**30).
[{BUDGET}]
{limits}
{FAIL_ON} = {json.dumps(absent)}

# With --baseline RUN, e.g.:
# [regression]
# max_kv_cache_drop = "1%"
# max_non_torch_growth = "100MiB"
"""


def _one_line(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _limit(report: Report, key: LimitKey, margin: Margin) -> tuple[int | str | None, str]:
    """Return (a limit as a file has it, the figure of the worst rank or why there is none).

    It is rounded to the allowed side where it has a margin, exact bytes where it has none.
    """
    readings, least, unit = read_figure(report, key.figure), key.sense == AT_LEAST, key.figure.unit
    for reading in readings:
        if reading.value is None:
            return None, f"not measured ({reading.reason})"
    value = (min if least else max)(reading.value or 0 for reading in readings)
    in_gib = f" ({format_gib(value)} GiB)" if unit == BYTES and value >= GIB else ""
    figure = f"{format_bytes(value)} {unit}{in_gib} in the run"
    if value < 0 and least:
        return None, f"{figure}, below any limit"
    room = math.ceil(value * margin.percent)
    room = max(room, key.figure.varies_bytes) if margin.least else room
    amount = max(0, value - room) if least else value + room
    if unit != BYTES or not margin.percent or amount < MIB:
        return amount, figure
    size, name, digits = (GIB, "GiB", 2) if amount >= GIB else (MIB, "MiB", 1)
    steps = Fraction(amount * 10**digits, size)
    count = math.floor(steps) if least else math.ceil(steps)
    return f"{count // 10**digits}.{count % 10**digits:0{digits}d}{name}", figure


def tighten_budget(
    text: str, name: str, report: Report, margin: Margin, force: bool = False
) -> tuple[str, list[str]]:
    """Make the run's figures with a margin the limits of a budget file, where that is tighter.

    Comments, order and everything else of the text are kept. Percentages, findings and
    [regression] are not touched.

    Args:
        text: of the budget file.
        name: of the file, for messages.
        report: the run.
        margin: room that the new limits leave.
        force: loosen as well, so that every limit is the run's figure with the margin.

    Returns:
        The new text, and a remark per limit that changed or could not.

    Raises:
        UsageError: the file has a mistake, or a form that cannot be rewritten.
    """
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    try:
        document: Any = tomlkit.parse(text)
    except TOMLKitError as exc:  # what tomllib reads and tomlkit does not
        raise UsageError(f"{name} cannot be rewritten: {exc}", "write one key per line") from exc
    remarks, wanted = [], _amounts(text, name)
    for limit in parse_budget(text, name).limits:
        key = limit.key
        if key.table != BUDGET or limit.amount is None:
            continue
        new, figure = _limit(report, key, margin)
        if new is None:
            remarks.append(f"{key.name} stays: {figure}")
            continue
        amount = parse_size(str(new))
        tighter = amount > limit.amount if key.sense == AT_LEAST else amount < limit.amount
        if tighter or (force and amount != limit.amount):
            document[BUDGET][key.name] = new
            wanted[key.name] = amount
            shown = new if isinstance(new, str) else f"{new:,}"
            word = "tightened" if tighter else "loosened"
            remarks.append(f"{key.name} {word}: {limit.written} → {shown}")
    changed = tomlkit.dumps(document)
    # a form of TOML that is not written right changes more than the wanted limits
    if _amounts(changed, name) != wanted:
        raise UsageError(f"{name} cannot be rewritten", "write one key per line, below [budget]")
    return changed, remarks


def _amounts(text: str, name: str) -> dict[str, object]:
    rows = parse_budget(text, name).limits
    return {row.key.name: row.percent if row.amount is None else row.amount for row in rows}
