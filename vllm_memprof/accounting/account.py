"""One rank's KV budget in quantities that every equation has in common: what was held, and what was charged.

``peak_allocated`` of E2 is weights, other torch memory and the activation peak in one; E4 charges the first and the
last and leaves out the second. Here each term becomes the quantities that it is made of, so that the budgets of two
releases can be compared quantity by quantity. The lines of an account always add up to the KV cache that the engine
granted: a term that cannot be taken apart stays in one piece, and a term that is unknown is what the rest leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from vllm_memprof.accounting.equations import EQUATIONS
from vllm_memprof.accounting.honest import Evidence
from vllm_memprof.accounting.model import Budget, RankReport, TermRow
from vllm_memprof.record.spans import last_of
from vllm_memprof.units import minus

#: Quantity -> what it is, in words.
TITLES = {
    "requested": "requested",
    "weights": "weights",
    "persistent_torch": "torch memory outside the weights",
    "peak_activation": "peak activation",
    "kept_torch": "torch memory that profiling left",
    "cached": "reserved but not allocated",
    "reserved_at_end": "reserved beyond the allocated peak",
    "initial_non_torch": "non-torch, held at the start",
    "non_torch": "non-torch increase",
    "non_torch_cleared": "non-torch, freed just before read",
    "graph_estimate": "graphs, estimated",
    "mm_ipc": "multi-modal decoding",
    "consumed": "consumed",
    "equation": "the equation of a run, and so all of its terms",
    "fixed_size": "fixed size instead of the equation",
    "halved": "half kept for operator workspace",
    "clamped": "raised from below 0 to 0",
    "rounding": "rounding to whole bytes",
    "printed_digits": "rounding of the printed digits",
    "residual": "the engine's figure is not its equation's",
}

#: What a charged term is made of, as (equation, term); "*" is every equation. The last quantity is what the others
#: leave of the term, so that the parts are the term to the byte. A term without a row is a quantity of its own.
#: (vllm_ascend/worker/worker.py::NPUWorker.determine_available_memory, vllm/utils/mem_utils.py::memory_profiling; the
#: equations' rows name the releases.)
PARTS: dict[tuple[str, str], tuple[str, ...]] = {
    ("*", "peak_allocated"): ("weights", "persistent_torch", "peak_activation"),
    # used - allocated after empty_cache = non-torch + reserved - allocated
    ("*", "used_by_device"): ("initial_non_torch", "cached", "non_torch"),
    # non-torch before empty_cache, less the increase after it
    ("*", "cleared"): ("initial_non_torch", "non_torch_cleared"),
    # E1 reads free memory before empty_cache, E6 after it
    ("E1", "consumed"): (
        "weights",
        "persistent_torch",
        "peak_activation",
        "cached",
        "non_torch",
        "non_torch_cleared",
        "reserved_at_end",
    ),
    ("E6", "consumed"): ("weights", "persistent_torch", "kept_torch", "cached", "non_torch"),
    ("*", "transient_headroom"): ("peak_activation",),
}


@dataclass(frozen=True)
class Line:
    """What one quantity adds to the KV cache, bytes; several names are quantities that the run does not tell apart."""

    names: tuple[str, ...]
    bytes: int  # negative: charged
    implied: bool = False  # not read: what the granted KV cache leaves


@dataclass(frozen=True)
class Account:
    """``granted`` = the sum of ``lines``, to the byte, where it is known."""

    granted: int | None  # bytes: the engine's figure; recomputed where it is unknown
    recomputed: bool  # granted is what the equation gives, the engine's figure is unknown
    lines: list[Line]
    unknown: tuple[
        str, ...
    ]  # quantities without a line: neither they nor the granted KV cache are known
    held: dict[str, int | None] = field(default_factory=dict)  # also what no term charges, bytes
    strained: list[tuple[str, int, int]] = field(
        default_factory=list
    )  # quantity, what its term leaves, what was read

    @property
    def charged(self) -> set[str]:
        """Quantities that the equation subtracts."""
        names = [name for line in self.lines for name in line.names]
        return {*names, *self.unknown} - {"requested"}


def open_account(rank: RankReport, simulated: bool) -> Account:
    """One rank's budget in common quantities."""
    budget = rank.budget
    held = held_quantities(rank, simulated)
    granted = budget.engine_kv_cache_bytes
    recomputed = granted is None and budget.kv_cache_bytes is not None
    granted = budget.kv_cache_bytes if recomputed else granted
    lines, unknown = _request(budget)
    for term in budget.terms:
        if term.charged:
            found, missing = _split(budget.equation, term, held)
            lines, unknown = lines + found, unknown + missing
    if budget.equation is None:
        unknown.append("equation")
    lines, unknown = _closed(budget, granted, lines, unknown)
    charged = {
        line.names[0]: -line.bytes
        for line in lines
        if len(line.names) == 1 and line.names[0] != "requested"
    }
    slack = sum(rank.half_units.values()) + budget.tolerance_bytes
    strained = [
        (name, size, read)
        for name, size in charged.items()
        if (read := held.get(name)) is not None and abs(size - read) > slack
    ]
    return Account(granted, recomputed, lines, tuple(unknown), {**held, **charged}, strained)


def _request(budget: Budget) -> tuple[list[Line], list[str]]:
    asked = budget.requested_bytes
    return ([], ["requested"]) if asked is None else ([Line(("requested",), asked)], [])


def _split(
    equation: str | None, term: TermRow, held: Mapping[str, int | None]
) -> tuple[list[Line], list[str]]:
    """A term as its quantities; those that are unknown stay together, with what the known ones leave of the term."""
    parts = PARTS.get((equation or "", term.name)) or PARTS.get(("*", term.name), (term.name,))
    if term.bytes is None:
        return [], list(parts)
    known = {name: size for name in parts[:-1] if (size := held.get(name)) is not None}
    rest = [name for name in parts if name not in known]
    last = held.get(parts[-1])
    if len(rest) > 1 and last is not None:
        known[parts[-1]] = last
        rest.remove(parts[-1])
    lines = [Line((name,), -size) for name, size in known.items()]
    return [*lines, Line(tuple(rest), -term.bytes + sum(known.values()))], []


def _closed(
    budget: Budget, granted: int | None, lines: list[Line], unknown: list[str]
) -> tuple[list[Line], list[str]]:
    """The steps from the sum of the terms to the granted KV cache; or the unknown, as far as that figure leaves it."""
    total = sum(line.bytes for line in lines)
    if unknown or budget.kv_cache_bytes is None:
        names = [*unknown, *(["halved"] if _halves(budget) else [])]
        names += ["fixed_size"] if budget.override else []
        if granted is None or not names:  # nothing says what the unknown ones are together
            return lines, names
        return [*lines, Line(tuple(names), granted - total, implied=True)], []
    step = budget.kv_cache_bytes - total
    steps = [Line((_step_name(budget, total, step),), step)]
    if granted is not None:
        residual = granted - budget.kv_cache_bytes
        within = abs(residual) <= budget.tolerance_bytes
        steps.append(Line(("printed_digits" if within else "residual",), residual))
    return lines + [line for line in steps if line.bytes], []


def _step_name(budget: Budget, total: int, step: int) -> str:
    if budget.override:
        return "fixed_size"
    if _halves(budget):
        return "halved"
    if total < 0 and budget.kv_cache_bytes == 0:
        return "clamped"
    return "rounding" if abs(step) <= 1 else "residual"  # a float of bytes is cut once, at the end


def _halves(budget: Budget) -> bool:
    return any(row.id == budget.equation and row.divisor != 1 for row in EQUATIONS)


def held_quantities(rank: RankReport, simulated: bool) -> dict[str, int | None]:
    """What the rank held of each quantity, whether its equation charges it or not, bytes; None is unknown."""
    evidence = Evidence(rank.figures, rank.phases, simulated)
    found = {name: read(evidence) for name, read in _HELD.items()}
    for term in rank.budget.terms:  # also where the figures are not at hand
        if term.name in found and found[term.name] is None:
            found[term.name] = term.bytes
    for item in rank.budget.not_subtracted:
        if item.name in found and found[item.name] is None:
            found[item.name] = item.bytes
    return found


#: Phases in which a worker reads its device for the first time.
_BEFORE_LOADING = ("device_init", "hccl_init")


def _figure(name: str) -> Callable[[Evidence], int | None]:
    def read(evidence: Evidence) -> int | None:
        value = evidence.figures.get(name)
        return None if value is None else int(value)

    return read


def _weights(evidence: Evidence) -> int | None:
    """The engine's figure; where it keeps none, the growth of allocated memory while it loaded, which it prints."""
    value = _figure("weights_bytes")(evidence)
    span = last_of(evidence.spans, "weight_load")
    if value is None and span is not None and span.before is not None and span.after is not None:
        return minus(span.after.allocated_bytes, span.before.allocated_bytes)
    return value


def _allocated_before(evidence: Evidence) -> int | None:
    """Allocated right before the profile run; the engine's own figure is a peak that it has just reset."""
    value = _figure("profile_before_allocated_peak_bytes")(evidence)
    span = last_of(evidence.spans, "profile_run")
    if value is None and span is not None and span.before is not None:
        return span.before.allocated_bytes
    return value


def _initial_non_torch(evidence: Evidence) -> int | None:
    """The engine's first reading of its device, or the first one of ours, before anything is loaded."""
    value = _figure("initial_non_torch_bytes")(evidence)
    if value is None:
        free = _figure("initial_free_bytes")(evidence)
        value = minus(_figure("device_total_bytes")(evidence), free)  # nothing is reserved yet
    if value is not None:
        return value
    first = next((span.order for span in evidence.spans if span.phase in _BEFORE_LOADING), None)
    edges = [
        edge
        for span in evidence.spans
        if first is not None and (span.order == first or span.parent == first)
        for edge in (span.before, span.after)
        if edge is not None and edge.non_torch_bytes is not None
    ]
    return min(edges, key=lambda edge: edge.t_ns or 0).non_torch_bytes if edges else None


def _peak_activation(evidence: Evidence) -> int | None:
    value = _figure("peak_activation_bytes")(evidence)
    if value is None:
        return minus(
            _figure("profile_after_allocated_peak_bytes")(evidence), _allocated_before(evidence)
        )
    return value


def _non_torch_after(evidence: Evidence) -> int | None:
    value = _figure("profile_after_non_torch_bytes")(evidence)
    _, after, _ = evidence.profile_end()
    return after.non_torch_bytes if value is None and after is not None else value


def _non_torch(evidence: Evidence) -> int | None:
    value = _figure("non_torch_increase_bytes")(evidence)
    return (
        minus(_non_torch_after(evidence), _initial_non_torch(evidence)) if value is None else value
    )


def _cached(evidence: Evidence) -> int | None:
    _, after, _ = evidence.profile_end()
    if after is None:
        return None
    allocated = (
        after.allocated_bytes if after.allocated_bytes is not None else _allocated_before(evidence)
    )
    return minus(after.reserved_bytes, allocated)


def _kept_torch(evidence: Evidence) -> int | None:
    _, after, _ = evidence.profile_end()
    return None if after is None else minus(after.allocated_bytes, _allocated_before(evidence))


def _non_torch_cleared(evidence: Evidence) -> int | None:
    before, after, _ = evidence.profile_end()
    return (
        None
        if before is None or after is None
        else minus(before.non_torch_bytes, after.non_torch_bytes)
    )


_HELD: dict[str, Callable[[Evidence], int | None]] = {
    "weights": _weights,
    "persistent_torch": lambda evidence: minus(_allocated_before(evidence), _weights(evidence)),
    "peak_activation": _peak_activation,
    "kept_torch": _kept_torch,
    "cached": _cached,
    "initial_non_torch": _initial_non_torch,
    "non_torch": _non_torch,
    "non_torch_cleared": _non_torch_cleared,
}
