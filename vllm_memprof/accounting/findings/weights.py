"""Findings about the weights: what a rank holds beyond its share of the checkpoint, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from vllm_memprof.accounting.findings.rules import Context, Found
from vllm_memprof.accounting.model import RankReport, Weights
from vllm_memprof.accounting.tensors import size_of
from vllm_memprof.accounting.titles import TITLES
from vllm_memprof.text import join, text
from vllm_memprof.units import MIB, minus

#: Less is not worth a finding, nor is a smaller part of the weights.
_LEAST_BYTES, _LEAST_SHARE = 64 * MIB, 0.02
_LISTED = 3  # classes


def beyond(causes: Sequence[str], rank: RankReport, _: Context) -> Iterator[Found]:
    """Find weights beyond a rank's share of the checkpoint, by some causes or by all."""
    held = rank.weights or Weights()
    named: Counter[str] = Counter()
    for row in held.rows:
        of = row["causes"]
        size = sum(of.get(name, 0) for name in causes) if causes else row["difference_bytes"]
        if size:
            named[row["class"]] += size
    total = sum(named.values()) if causes else minus(held.engine_bytes, held.expected_bytes)
    if total is None or total < max(_LEAST_BYTES, _LEAST_SHARE * (held.engine_bytes or 0)):
        return
    titles, largest = TITLES["weights"], named.most_common(_LISTED)
    said = (text("{title} {size:size}", title=titles[of], size=size) for of, size in largest)
    figures = {"expected": held.expected_bytes, "held": held.engine_bytes}
    # sentences name tables, vision and shared_experts
    where = dict.fromkeys((of for of, _ in largest), True)
    yield Found(total, {**where, **figures, "classes": join(", ", said)})


def dequantised(rank: RankReport, _: Context) -> Iterator[Found]:
    """Find classes that the checkpoint has in 8 bits or fewer and the rank in 16 or more."""
    held = rank.weights or Weights()
    rows = [row for row in held.rows if row["causes"].get("dtype")]
    for cls in dict.fromkeys(row["class"] for row in rows):
        own = [row for row in rows if row["class"] == cls]
        lost = [row for row in own if row["causes"]["dtype"] < 0 and size_of(row["dtype"]) <= 1]
        more = [row for row in own if row["causes"]["dtype"] > 0 and size_of(row["dtype"]) > 1]
        size = sum(row["causes"]["dtype"] for row in (*lost, *more))
        if lost and more and size > _LEAST_SHARE * (held.engine_bytes or 0):
            types = {"narrow": lost[0]["dtype"], "wide": more[0]["dtype"]}
            yield Found(size, types | {"class": TITLES["weights"][cls]})


def fragmented(rank: RankReport, _: Context) -> Iterator[Found]:
    """Find memory that stayed reserved after loading without a tensor."""
    held = rank.weights or Weights()
    size, least = held.not_allocated_bytes or 0, _LEAST_SHARE * (held.engine_bytes or 0)
    if size >= max(8 * _LEAST_BYTES, least) and held.expandable is False:
        yield Found(size, {})
