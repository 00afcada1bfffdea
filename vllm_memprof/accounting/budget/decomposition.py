"""One rank's KV budget in the quantities that all equations have in common.

``peak_allocated`` of E2 is weights, other torch memory and the activation peak in one; E4 subtracts
the first and the last and leaves out the second. Here each term becomes the quantities that it is
made of (``Term.parts``), so that the budgets of two releases can be compared quantity by quantity.
The lines always add up to the KV cache that the engine granted: a term that cannot be taken apart
stays in one piece, and a term that is unknown is what the rest leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vllm_memprof.accounting.budget.equations import form_of
from vllm_memprof.accounting.model import Budget, RankReport, TermRow
from vllm_memprof.engines.equation import Equation
from vllm_memprof.units import Amount, either, known_items


@dataclass(frozen=True)
class KvChange:
    """What one quantity adds to the KV cache, bytes; several: the run does not tell them apart."""

    names: tuple[str, ...]
    bytes: int  # negative: subtracted
    implied: bool = False  # not read: what the available KV cache leaves


@dataclass(frozen=True)
class Decomposition:
    """``granted`` = the sum of ``lines``, to the byte, where it is known."""

    granted: Amount  # bytes: the engine's figure; recomputed where it is unknown
    lines: list[KvChange]
    #: Quantities without a line: neither they nor the granted KV cache are known.
    unknown: tuple[str, ...]
    held: dict[str, Amount]  # also what no term subtracts, bytes
    #: Quantity, what its term leaves for it, its own reading: where the two differ.
    differing: list[tuple[str, int, int]]

    @property
    def subtracted(self) -> set[str]:
        """Quantities that the equation subtracts."""
        names = [name for line in self.lines for name in line.names]
        return {*names, *self.unknown} - {"requested"}


def granted_bytes(rank: RankReport) -> Amount:
    """Return the KV cache that a rank was granted; where unknown, what its equation gives."""
    return either(rank.budget.engine_kv_cache_bytes, rank.budget.kv_cache_bytes)


def decompose(rank: RankReport) -> Decomposition:
    """Take a rank's budget apart into common quantities."""
    budget, granted = rank.budget, granted_bytes(rank)
    held = {name: reading.bytes for name, reading in rank.readings.items()}
    lines: list[KvChange] = []
    unknown: list[str] = []
    if budget.requested_bytes is None:
        unknown.append("requested")
    else:
        lines.append(KvChange(("requested",), budget.requested_bytes))
    row = form_of(budget.equation)
    for term in budget.terms:
        if term.subtracted:
            found, missing = _split(row, term, held)
            lines, unknown = lines + found, unknown + missing
    if budget.equation is None:
        unknown.append("equation")
    lines, unknown = _to_the_grant(budget, row, granted, lines, unknown)
    subtracted = {
        line.names[0]: -line.bytes
        for line in lines
        if len(line.names) == 1 and line.names[0] != "requested"
    }
    slack = sum(rank.half_units.values()) + budget.tolerance_bytes
    differing = [
        (name, size, read)
        for name, size in subtracted.items()
        if (read := held.get(name)) is not None and abs(size - read) > slack
    ]
    return Decomposition(granted, lines, tuple(unknown), {**held, **subtracted}, differing)


def _split(
    row: Equation | None, term: TermRow, held: Mapping[str, Amount]
) -> tuple[list[KvChange], list[str]]:
    """Take a term apart into (lines, quantities of unknown size).

    Quantities that are unknown stay together, with what the known ones leave of the term.
    """
    terms = () if row is None else row.terms
    parts = next((known.parts for known in terms if known.name == term.name), ()) or (term.name,)
    if term.bytes is None:
        return [], list(parts)
    known = known_items({name: held.get(name) for name in parts[:-1]})
    rest = [name for name in parts if name not in known]
    last = held.get(parts[-1])
    if len(rest) > 1 and last is not None:
        known[parts[-1]] = last
        rest.remove(parts[-1])
    lines = [KvChange((name,), -size) for name, size in known.items()]
    return [*lines, KvChange(tuple(rest), -term.bytes + sum(known.values()))], []


def _to_the_grant(
    budget: Budget,
    row: Equation | None,
    granted: Amount,
    lines: list[KvChange],
    unknown: list[str],
) -> tuple[list[KvChange], list[str]]:
    """Add the steps from the sum of the terms to the granted KV cache.

    Where a term is unknown, add what the available KV cache leaves for all that is.
    """
    total = sum(line.bytes for line in lines)
    halves = row is not None and row.divisor != 1
    if unknown or budget.kv_cache_bytes is None:
        names = [*unknown, *(["halved"] if halves else [])]
        names += ["fixed_size"] if budget.override else []
        if granted is None or not names:  # nothing says what the unknown ones are together
            return lines, names
        return [*lines, KvChange(tuple(names), granted - total, implied=True)], []
    step = budget.kv_cache_bytes - total
    if budget.override:
        name = "fixed_size"
    elif halves:
        name = "halved"
    elif total < 0 and budget.kv_cache_bytes == 0:
        name = "clamped"
    else:  # a float of bytes is cut once, at the end
        name = "rounding" if abs(step) <= 1 else "residual"
    steps = [KvChange((name,), step)]
    if granted is not None:
        residual = granted - budget.kv_cache_bytes
        within = abs(residual) <= budget.tolerance_bytes
        steps.append(KvChange(("printed_digits" if within else "residual",), residual))
    return lines + [line for line in steps if line.bytes], []
