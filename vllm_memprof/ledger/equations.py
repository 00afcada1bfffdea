"""The engines' KV-cache equations as rows of a table, and the one function that walks a row.

Figures of the run enter, the KV budget in bytes leaves, rounded exactly as the engine rounds it. A new release
costs a row; a new rounding rule costs a word in ``Equation`` and a line in ``evaluate``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from vllm_memprof.ledger.model import TermRow

Figures = Mapping[str, "int | float | None"]


@dataclass(frozen=True)
class Term:
    """A quantity that the equation subtracts, in names of ``record.schema.FIGURES``.

    ``figure`` is the engine's own value. Where it was not recorded, the sum of ``plus`` less the sum of ``minus``
    stands in for it; where both are known, they have to agree (``ledger.build`` checks).
    """

    name: str  # as in report.json
    figure: str | None = None
    plus: tuple[str, ...] = ()
    minus: tuple[str, ...] = ()
    floor_zero: bool = False  # max(0, ...)
    charged: bool = True  # False: the engine reports it and subtracts it from nothing

    def derived(self, figures: Figures) -> int | None:
        """The value from its ingredients; None where one is unknown."""
        if not self.plus:
            return None
        values = [figures.get(name) for name in (*self.plus, *self.minus)]
        if any(value is None for value in values):
            return None
        signs = [1] * len(self.plus) + [-1] * len(self.minus)
        total = sum(int(value) * sign for value, sign in zip(values, signs, strict=True) if value is not None)
        return max(0, total) if self.floor_zero else total

    def value(self, figures: Figures) -> int | None:
        direct = figures.get(self.figure) if self.figure is not None else None
        return int(direct) if direct is not None else self.derived(figures)


@dataclass(frozen=True)
class Equation:
    """``result = round((requested - sum of charged terms) // divisor)``, with the words for each step."""

    id: str
    engine: str  # vllm-ascend | vllm
    versions: str  # PEP 440 specifier; release candidates included
    read_in: str  # releases whose source was read
    cite: str  # file::symbol
    terms: tuple[Term, ...]
    request: str = "float"  # float: total * util unrounded; int: truncated; ceil: rounded up
    divisor: int = 1
    floor_zero: bool = False  # the engine clamps a negative budget to 0
    override: str | None = "kv_cache_memory_bytes_arg"  # a figure that, when given, is returned as it is
    uncharged: tuple[str, ...] = ()  # items of ledger.honest that no term of this equation covers

    @property
    def formula(self) -> str:
        inner = " + ".join(term.name for term in self.terms if term.charged)
        text = f"device total x utilization - ({inner})"
        text = f"({text}) // {self.divisor}" if self.divisor != 1 else text
        return f"max(0, int({text}))" if self.floor_zero else f"int({text})"


EQUATIONS: tuple[Equation, ...] = (
    # The graph pool is measured after this equation has run and enters only a suggestion in the log.
    # 0.18 ignores --kv-cache-memory-bytes; 0.23 returns it after a profile run whose figures it does not use.
    Equation(
        id="E4",
        engine="vllm-ascend",
        versions=">=0.18.0rc1,<0.23.0rc1",
        read_in="0.18.0",
        cite="vllm_ascend/worker/worker.py::NPUWorker.determine_available_memory",
        terms=(
            Term("weights", "weights_bytes"),
            Term(
                "peak_activation",
                "peak_activation_bytes",
                plus=("profile_after_allocated_peak_bytes",),
                minus=("profile_before_allocated_peak_bytes",),
            ),
            Term(
                "non_torch",
                "non_torch_increase_bytes",
                plus=("profile_after_non_torch_bytes",),
                minus=("initial_non_torch_bytes",),
            ),
            Term("graph", "graph_bytes", charged=False),
        ),
        override=None,
        uncharged=("persistent_torch", "initial_non_torch", "cached", "non_torch_cleared", "graph", "late_non_torch"),
    ),
    # The peak is read inside the profiling context, so it is older than after_profile and has no derivation.
    Equation(
        id="E4",
        engine="vllm-ascend",
        versions=">=0.23.0rc1,<0.26",
        read_in="0.23.0, 0.25.1rc1",
        cite="vllm_ascend/worker/worker.py::NPUWorker.determine_available_memory",
        terms=(
            Term("weights", "weights_bytes"),
            Term("peak_activation", "peak_activation_bytes"),
            Term(
                "non_torch",
                "non_torch_increase_bytes",
                plus=("profile_after_non_torch_bytes",),
                minus=("initial_non_torch_bytes",),
            ),
            Term("graph", "graph_bytes", charged=False),
        ),
        uncharged=("persistent_torch", "initial_non_torch", "cached", "non_torch_cleared", "graph", "late_non_torch"),
    ),
)


@dataclass(frozen=True)
class Evaluation:
    """An equation with the figures of one rank in it."""

    requested: int | float | None  # as the engine holds it
    terms: list[TermRow]
    kv_cache_bytes: int | None  # None: a figure is missing
    tolerance_bytes: int  # half-units of every figure used; 0 from hooks
    override: str | None = None  # "kv_cache_memory_bytes": a fixed size replaced the equation


def select(engine: str | None, version: str | None, forms: Sequence[str] = ()) -> tuple[Equation | None, str | None]:
    """The row for an engine release, and how it was chosen.

    Args:
        engine: ``vllm-ascend`` or ``vllm``.
        version: of the engine. It decides where it is known; a release that nobody has read has no row.
        forms: ids of the equations whose lines a log holds. They decide where no version is known.
    """
    if engine is None:
        return None, None
    rows = [row for row in EQUATIONS if row.engine == engine]
    if version is not None:
        try:
            release = Version(version)
        except InvalidVersion:
            return None, None
        fitting = [row for row in rows if SpecifierSet(row.versions).contains(release, prereleases=True)]
        return (fitting[0], f"{engine} {version}") if fitting else (None, None)
    seen = [row for row in rows if row.id in forms]
    if len({row.id for row in seen}) != 1:
        return None, None
    return seen[-1], f"the form of its lines, as {engine} prints them"


def requested(equation: Equation, figures: Figures) -> int | float | None:
    """What the engine asks of the device: total x utilization in its own rounding; the recorded value wins."""
    recorded = figures.get("requested_bytes")
    return recorded if recorded is not None else computed_request(equation, figures)


def computed_request(equation: Equation, figures: Figures) -> int | float | None:
    total, utilization = figures.get("device_total_bytes"), figures.get("gpu_memory_utilization")
    if total is None or utilization is None:
        return None
    product = total * utilization
    return {"float": product, "int": int(product), "ceil": math.ceil(product)}[equation.request]


def evaluate(equation: Equation, figures: Figures, half_units: Mapping[str, int] | None = None) -> Evaluation:
    """Recomputes one rank's KV budget.

    Args:
        equation: the row that belongs to the run.
        figures: FIGURES of the rank, bytes; None is unknown.
        half_units: half of the last printed digit per figure, bytes, for figures that were read from text.

    Returns:
        The terms and the result; a missing figure makes the result None, never a smaller sum.
    """
    half_units = half_units or {}
    asked = requested(equation, figures)
    terms = [
        TermRow(term.name, term.value(figures), term.charged, half_units.get(term.figure or "", 0))
        for term in equation.terms
    ]
    fixed = figures.get(equation.override) if equation.override else None
    if fixed is not None:
        return Evaluation(asked, terms, int(fixed), 0, override="kv_cache_memory_bytes")
    charged = [row for row in terms if row.charged]
    tolerance = half_units.get("requested_bytes", 0) + half_units.get("kv_cache_bytes", 0)
    tolerance += sum(row.half_unit_bytes for row in charged)
    if asked is None or any(row.bytes is None for row in charged):
        return Evaluation(asked, terms, None, tolerance)
    budget = asked - sum(row.bytes for row in charged if row.bytes is not None)
    if equation.divisor != 1:
        budget = budget // equation.divisor
    result = int(budget)
    return Evaluation(asked, terms, max(0, result) if equation.floor_zero else result, tolerance)
