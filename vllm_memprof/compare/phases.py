"""Two ranks side by side: the phases of their start-ups, and the owners of their devices."""

from __future__ import annotations

from dataclasses import dataclass
from math import fsum

from vllm_memprof.accounting.model import RankReport
from vllm_memprof.record.schema import Snapshot
from vllm_memprof.record.spans import AFTER, Span, device_after
from vllm_memprof.tables import merged_order
from vllm_memprof.units import only_known

#: After which phases the device is compared by owner: where the budget is settled, and with the KV
#: cache in place. Of each the first that both ranks reached.
_AFTER_PHASES = (("profile_run", "weight_load", "device_init"), ("warm_up", "kv_cache_alloc"))
#: The edge of classes of weights, which are owners of what the engine has measured as weights.
LOADED = "loaded"


@dataclass(frozen=True)
class PhaseDiff:
    """A phase in two runs.

    Passages of the same name within the same phase are one; their last reading counts.
    """

    path: tuple[str, ...]  # from the outermost phase inwards
    a_count: int  # passages
    b_count: int
    a_seconds: float | None
    b_seconds: float | None
    a: Snapshot | None  # after it
    b: Snapshot | None

    def values(self, name: str) -> tuple[int | None, int | None]:
        return getattr(self.a, name, None), getattr(self.b, name, None)


@dataclass(frozen=True)
class OwnerDiff:
    """One owner of device memory after the same phase of two runs, bytes; or a class of weights."""

    phase: str
    edge: str
    component: str
    a: int | None
    b: int | None


def phase_diffs(a: RankReport, b: RankReport) -> list[PhaseDiff]:
    """Return phases in the order of A; those of B alone after the one that they follow there."""
    left, right = _passages(a.phases), _passages(b.phases)
    found = []
    for path in merged_order(left, right):
        passed = left.get(path, []), right.get(path, [])
        times = [only_known(span.seconds for span in each) for each in passed]
        count_a, count_b = map(len, passed)
        seconds = [fsum(each) if each else None for each in times]  # the same on every Python
        after = [each[-1].after if each else None for each in passed]
        found.append(PhaseDiff(path, count_a, count_b, seconds[0], seconds[1], after[0], after[1]))
    return found


def _passages(rows: list[Span]) -> dict[tuple[str, ...], list[Span]]:
    paths: dict[int, tuple[str, ...]] = {}
    found: dict[tuple[str, ...], list[Span]] = {}
    for row in rows:
        parent = () if row.parent is None else paths.get(row.parent, ())
        paths[row.order] = (*parent, row.name)
        found.setdefault(paths[row.order], []).append(row)
    return found


def owner_diffs(a: RankReport, b: RankReport) -> list[OwnerDiff]:
    """Return owners after the phases that both ranks reached.

    All remainders are the owner ``unexplained``, so that each phase adds up. Last come the classes
    of weights.
    """
    found = []
    for phases in _AFTER_PHASES:
        for phase in phases:
            left, right = device_after(a.phases, phase), device_after(b.phases, phase)
            if left is not None and right is not None:
                sizes_a, sizes_b = left.by_owner, right.by_owner
                found += [
                    OwnerDiff(phase, AFTER, name, sizes_a.get(name), sizes_b.get(name))
                    for name in dict.fromkeys([*sizes_a, *sizes_b])
                ]
                break
    if a.weights and b.weights:
        left_of, right_of = a.weights.by_class, b.weights.by_class
        found += [
            OwnerDiff("weight_load", LOADED, name, left_of.get(name, 0), right_of.get(name, 0))
            for name in merged_order(left_of, right_of)
        ]
    return found
