"""Two ranks moment by moment: the phases of their start-ups and the owners of their devices, side by side."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import fsum

from vllm_memprof.accounting.model import RankReport
from vllm_memprof.record.schema import Snapshot
from vllm_memprof.record.spans import AFTER, DeviceMemory, Span, device_after

#: Snapshot fields that are compared after each phase.
FIELDS = (
    "reserved_bytes",
    "allocated_peak_bytes",
    "allocated_bytes",
    "non_torch_bytes",
    "device_free_bytes",
)
#: Moments at which the device is compared by owner: where the budget is settled, and with the KV cache in place. Of
#: each the first that both ranks reached.
_MOMENTS = (("profile_run", "weight_load", "device_init"), ("warm_up", "kv_cache_alloc"))


@dataclass(frozen=True)
class PhaseDiff:
    """A phase in two runs; passages of the same name within the same phase are one, their last reading counts."""

    path: tuple[str, ...]  # from the outermost phase inwards
    a_count: int  # passages
    b_count: int
    a_seconds: float | None
    b_seconds: float | None
    a: Snapshot | None  # after it
    b: Snapshot | None

    def values(self, name: str) -> tuple[int | None, int | None]:
        return (
            None if self.a is None else getattr(self.a, name),
            None if self.b is None else getattr(self.b, name),
        )


@dataclass(frozen=True)
class OwnerDiff:
    """One owner of device memory at the same moment of two runs, bytes."""

    phase: str
    edge: str
    component: str
    a: int | None
    b: int | None


def phase_diffs(a: RankReport, b: RankReport) -> list[PhaseDiff]:
    """Phases in the order of A; those that B alone has, after the one they follow there."""
    left, right = _passages(a.phases), _passages(b.phases)
    return [
        _phase_diff(path, left.get(path, []), right.get(path, [])) for path in _merged(left, right)
    ]


def _passages(rows: list[Span]) -> dict[tuple[str, ...], list[Span]]:
    paths: dict[int, tuple[str, ...]] = {}
    found: dict[tuple[str, ...], list[Span]] = {}
    for row in rows:
        parent = () if row.parent is None else paths.get(row.parent, ())
        group = row.detail.get("group") if row.phase == "communicator" else None
        paths[row.order] = (
            *parent,
            row.phase if group in (None, "undefined") else f"{row.phase} {group}",
        )
        found.setdefault(paths[row.order], []).append(row)
    return found


def _merged(
    left: Iterable[tuple[str, ...]], right: Iterable[tuple[str, ...]]
) -> list[tuple[str, ...]]:
    order = list(left)
    place = 0
    for path in right:
        if path in order:
            place = order.index(path) + 1
        else:
            order.insert(place, path)
            place += 1
    return order


def _phase_diff(path: tuple[str, ...], left: list[Span], right: list[Span]) -> PhaseDiff:
    return PhaseDiff(
        path, len(left), len(right), _seconds(left), _seconds(right), _last(left), _last(right)
    )


def _seconds(rows: list[Span]) -> float | None:
    known = [row.seconds for row in rows if row.seconds is not None]
    return fsum(known) if known else None  # the same digits on every Python


def _last(rows: list[Span]) -> Snapshot | None:
    return rows[-1].after if rows else None


def owner_diffs(a: RankReport, b: RankReport) -> list[OwnerDiff]:
    """Owners at the moments that both ranks reached; the remainder as ``unaccounted``, so that each adds up."""
    found = []
    for phases in _MOMENTS:
        for phase in phases:
            left, right = device_after(a.phases, phase), device_after(b.phases, phase)
            if left is not None and right is not None:
                found += _owners(phase, left, right)
                break
    return found


def _owners(phase: str, a: DeviceMemory, b: DeviceMemory) -> list[OwnerDiff]:
    left, right = _by_owner(a), _by_owner(b)
    return [
        OwnerDiff(phase, AFTER, name, left.get(name), right.get(name))
        for name in dict.fromkeys([*left, *right])
    ]


def _by_owner(memory: DeviceMemory) -> dict[str, int | None]:
    found: dict[str, int | None] = {row.component: row.bytes for row in memory.rows}
    return {**found, "unaccounted": memory.unaccounted_bytes}
