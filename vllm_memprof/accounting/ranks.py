"""Which ranks of a plan were run, and which are assumed to be like them, in words."""

from __future__ import annotations

from collections.abc import Iterable

from vllm_memprof.record.schema import PlannedRanks


def rank_notes(ranks: PlannedRanks | None) -> list[str]:
    """Return notes on a plan that ran only some of its ranks; none where all ran.

    Args:
        ranks: of the run record, None for a run that has none.
    """
    if ranks is None or ranks.mode == "all":
        return []
    run, not_run, alike = ranks.run, ranks.not_run, ranks.alike
    notes = [f"ranks run: {spans(run)} of {ranks.world_size} ({ranks.why})"]
    if alike:
        same = "; ".join(
            f"{spans(others)} as rank {rank}" for rank, others in sorted(alike.items())
        )
        notes.append(f"ranks not run, assumed alike: {same}")
    if not_run:
        notes.append(
            f"ranks not run and not known: {spans(not_run)}, "
            "with other layers, experts or neighbours than any rank that was run; "
            "the KV cache is that of the rank with the least; --ranks edges runs one of each kind"
        )
    return notes


def spans(numbers: Iterable[int]) -> str:
    """Write numbers as ranges: ``0, 2-5`` for 0, 2, 3, 4, 5."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)
