"""Findings about the engine's equation: its result, its terms, and what it does not subtract."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.specifiers import SpecifierSet

from vllm_memprof.accounting.budget.engine_options import share_of
from vllm_memprof.accounting.budget.serving_peak import MARGIN_BYTES
from vllm_memprof.accounting.findings.advice import device_total, higher_share, leave_room
from vllm_memprof.accounting.findings.rules import (
    BY_BYTES,
    INFO,
    WARNING,
    WARNING_BYTES,
    Context,
    Found,
)
from vllm_memprof.accounting.model import RankReport, Tried
from vllm_memprof.accounting.readings.quantities import title_of
from vllm_memprof.accounting.titles import how_title
from vllm_memprof.text import join, text
from vllm_memprof.units import GIB, only_known

_SUGGESTION_FIGURES = (
    "requested_bytes",
    "consumed_bytes",
    "printed_peak_activation_bytes",
    "graph_bytes",
)


def equation_unbalanced(rank: RankReport, _: Context) -> Iterator[Found]:
    """Find budgets that the recorded figures do not give."""
    budget = rank.budget
    if not budget.tried:
        if budget.balanced is False:
            yield Found(budget.residual_bytes, {})
        return
    given = next((one for one in budget.tried if one.given), None)
    if given is None or not (given.closes is False or given.leaves_less_than_nothing):
        return
    closing = [_name(one) for one in budget.tried if one.closes]
    several = budget.equation == given.equation and budget.balanced is not True
    said = [  # what each gives, or leaves for the figure that it lacks
        text(
            "{name}: leaves {missing_bytes:gib} GiB for {term}, which the log does not give",
            one,
            name=_name(one),
            term=title_of(one.missing or ""),
        )
        if one.residual_bytes is None
        else text(
            "{name}: engine {granted:gib} GiB, recomputed {kv_cache_bytes:gib} "
            "+-{tolerance_bytes:gib} GiB, off by {residual_bytes:gib4}",
            one,
            name=_name(one),
            granted=budget.engine_kv_cache_bytes,
        )
        for one in budget.tried
    ]
    yield Found(
        given.missing_bytes if given.residual_bytes is None else given.residual_bytes,
        {
            "given": given.equation,
            "found": closing and not several and closing[0],
            "others": len(closing),
            "names": join(", ", closing),
            "tries": join("; ", said),
        },
        severity=WARNING,
    )


def _name(tried: Tried) -> str:
    """Return an equation with the releases that have it."""
    limits = {one.operator: one.version for one in SpecifierSet(tried.releases)}
    return text(
        "{equation} ({low} to before {high})",
        equation=tried.equation,
        low=limits.get(">=", ""),
        high=limits.get("<", ""),
    )


def engine_term_off(rank: RankReport, _: Context) -> Iterator[Found]:
    """Find figures of the engine that memprof's own readings contradict."""
    off = [row for row in rank.budget.audit if row.agrees is False]
    if off:
        said = [
            text(
                "{title}: engine {engine_bytes:gib4} GiB, read {bytes:gib4} GiB "
                "({difference_bytes:bytes} bytes; {source})",
                row,
            )
            for row in off
        ]
        of_kv_cache = [row for row in off if row.name == "kv_cache"]
        worst = max(of_kv_cache or off, key=lambda row: abs(row.difference_bytes or 0))
        yield Found(worst.difference_bytes, {"rows": join("; ", said)})


def item_not_subtracted(name: str, rank: RankReport, run: Context) -> Iterator[Found]:
    """Find an item that the equation does not subtract, where it takes a KV block at least."""
    item = next((item for item in rank.budget.not_subtracted if item.name == name), None)
    if item is None or item.bytes is None or item.bytes <= 0 or item.kv_tokens == 0:
        return
    total, asked = share_of(rank).base_bytes or device_total(rank), rank.budget.requested_bytes
    # whether the device holds it beside the KV cache, so that only the request is exceeded; where
    # that is unknown, whether the share of the device that was never requested holds it
    held = rank.budget.device_verdict in ("fits", "narrow")
    if rank.budget.device_verdict is None:
        held = total is not None and asked is not None and item.bytes <= total - asked
    room = leave_room(rank, item.bytes, run.least_granted_bytes, by_utilization=True)
    figures = {**vars(item), "how": how_title(item), **room}
    yield Found(item.bytes, figures, INFO if held else BY_BYTES, item.kv_tokens)


def graph_estimate_high(rank: RankReport, run: Context) -> Iterator[Found]:
    """Find estimates of graph memory that the capture did not use."""
    estimate = rank.budget.subtracted.get("graph_estimate")
    actual = rank.figures.get("graph_bytes")
    if estimate is not None and actual is not None:
        over = estimate - max(0, int(actual))
        if over >= WARNING_BYTES:
            yield Found(over, {"estimate": estimate, **higher_share(rank, over, run.ranks)})


def engine_suggestion_wrong(rank: RankReport, _: Context) -> Iterator[Found]:
    """Find suggested KV caches from which graph memory was taken twice."""
    figures, rounded = rank.figures, "suggested_requested_printed_bytes"
    parts = only_known(figures.get(name) for name in _SUGGESTION_FIGURES)
    estimate = int(figures.get("graph_estimate_bytes") or 0)
    printed = figures.get("suggested_requested_bytes", figures.get(rounded))
    if rank.budget.equation != "E6" or not estimate or printed is None or len(parts) < 4:
        return
    asked, consumed, peak, graph = parts
    slack = rank.rounding(*_SUGGESTION_FIGURES, rounded)
    if abs(asked - consumed - peak - graph - MARGIN_BYTES - printed) <= slack + 1:
        right = int(printed) + estimate
        yield Found(estimate, {"printed": printed, "right": right > 0 and right})


def requested_base_mistaken(rank: RankReport, _: Context) -> Iterator[Found]:
    """Find notes in a log that take the request for a share of the free memory."""
    claimed = "claimed_request_base_bytes"
    base, asked = rank.figures.get(claimed), rank.figures.get("requested_bytes")
    share, total = rank.budget.gpu_memory_utilization, device_total(rank)
    if base is None or asked is None or share is None or total is None:
        return
    off = round(asked - base * share)
    if abs(off) > rank.rounding("requested_bytes", claimed):
        yield Found(off, {"wrong": base * share, "total": total})


def gb_is_gib(rank: RankReport, run: Context) -> Iterator[Found]:
    """Find weights that vllm-ascend prints as GB; other lines print two digits, and GiB."""
    size, half_unit = rank.figures.get("weights_bytes"), rank.half_units.get("weights_bytes", GIB)
    if run.run.info.engine == "vllm-ascend" and size is not None and half_unit <= GIB // 10_000:
        yield Found(round(size - size / GIB * 10**9), {"value": size / GIB, "size": round(size)})
