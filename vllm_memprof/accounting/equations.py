"""The engines' KV-cache equations as rows of a table, and the one function that walks a row.

Figures of the run enter, the KV budget in bytes leaves, rounded exactly as the engine rounds it. A new release
costs a row; a new rounding rule costs a word in ``Equation`` and a line in ``evaluate``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from vllm_memprof.accounting.model import TermRow

Figures = Mapping[str, "int | float | None"]

#: Figures besides those of ``record.schema.FIGURES`` and ``logs.formats.LOG_FIGURES``: what an engine computes on the
#: way to its equation, and neither keeps nor prints. Bytes.
PASSING_FIGURES: dict[str, str] = {
    "profile_end_free_bytes": "free on the device after the profile run, before its last empty_cache",
    "profile_after_allocated_bytes": "allocated after the profile run and its last empty_cache",
    "cleared_bytes": "non_torch_memory_cleared_by_empty_cache of E3",
}


@dataclass(frozen=True)
class Term:
    """A quantity that the equation subtracts, in names of ``record.schema.FIGURES`` and ``logs.formats.LOG_FIGURES``.

    ``figure`` is the engine's own value. Where it was not recorded, the sum of ``plus`` less the sum of ``minus``
    stands in for it; where both are known, they have to agree (``accounting.build`` checks).
    """

    name: str  # as in report.json
    figure: str | None = None
    plus: tuple[str, ...] = ()
    minus: tuple[str, ...] = ()
    floor_zero: bool = False  # max(0, ...)
    charged: bool = True  # False: the engine reports it and subtracts it from nothing
    said_by: str | None = (
        None  # a figure, 1 or 0: the engine says whether it charges the term; it outranks ``charged``
    )
    optional: bool = False  # a run without the figure has nothing of the kind

    def is_charged(self, figures: Figures) -> bool:
        said = figures.get(self.said_by) if self.said_by is not None else None
        return self.charged if said is None else bool(said)

    def derived(self, figures: Figures) -> int | None:
        """The value from its ingredients; None where one is unknown."""
        if not self.plus:
            return None
        values = [figures.get(name) for name in (*self.plus, *self.minus)]
        if any(value is None for value in values):
            return None
        signs = [1] * len(self.plus) + [-1] * len(self.minus)
        total = sum(
            int(value) * sign
            for value, sign in zip(values, signs, strict=True)
            if value is not None
        )
        return max(0, total) if self.floor_zero else total

    def value(self, figures: Figures) -> int | None:
        direct = figures.get(self.figure) if self.figure is not None else None
        if direct is None:
            return self.derived(figures)
        return max(0, int(direct)) if self.floor_zero else int(direct)

    def half_unit(self, figures: Figures, half_units: Mapping[str, int]) -> int:
        """Half of the last printed digit of the value, bytes: that of its ingredients together where it is derived."""
        if self.figure is not None and figures.get(self.figure) is not None:
            return half_units.get(self.figure, 0)
        return sum(half_units.get(name, 0) for name in (*self.plus, *self.minus))


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
    override: str | None = (
        "kv_cache_memory_bytes_arg"  # a figure that, when given, is returned as it is
    )
    not_subtracted: tuple[
        str, ...
    ] = ()  # items of ledger.honest that no term of this equation covers
    only: str | None = (
        None  # only on devices whose name begins so, or where the form of the log lines says it
    )
    from_snapshots: tuple[
        str, ...
    ] = ()  # figures to be read around the last empty_cache of the profile run

    @property
    def formula(self) -> str:
        inner = " + ".join(term.name for term in self.terms if term.charged or term.said_by)
        asked = "device total x utilization"
        asked = asked if self.request == "float" else f"{self.request}({asked})"
        text = f"{asked} - ({inner})"
        text = f"({text}) // {self.divisor}" if self.divisor != 1 else text
        return f"max(0, int({text}))" if self.floor_zero else f"int({text})"


_WEIGHTS = Term("weights", "weights_bytes")
_PEAK = Term("peak_activation", "peak_activation_bytes")
#: From both snapshots; for engines that read the peak elsewhere the two may differ.
_PEAK_INCREASE = Term(
    "peak_activation",
    "peak_activation_bytes",
    plus=("profile_after_allocated_peak_bytes",),
    minus=("profile_before_allocated_peak_bytes",),
)
_NON_TORCH = Term(
    "non_torch",
    "non_torch_increase_bytes",
    plus=("profile_after_non_torch_bytes",),
    minus=("initial_non_torch_bytes",),
)
#: What was outside torch before empty_cache, less an increase: an absolute less a difference, so that it holds what
#: other processes have on the device.
_CLEARED = Term(
    "cleared",
    "cleared_bytes",
    plus=("profile_end_non_torch_bytes",),
    minus=("non_torch_increase_bytes",),
)
_GRAPH = Term("graph", "graph_bytes", charged=False)
#: Charged where the engine says so; by its release where it says nothing.
_ESTIMATE_OFF = Term(
    "graph_estimate", "graph_estimate_bytes", charged=False, said_by="graph_estimate_charged"
)
_ESTIMATE_ON = Term("graph_estimate", "graph_estimate_bytes", said_by="graph_estimate_charged")
_MM_IPC = Term("mm_ipc", "mm_ipc_bytes", optional=True)
_ABSOLUTE = (
    "profile_after_allocated_peak_bytes",
    "profile_after_free_bytes",
    "profile_after_allocated_bytes",
)
_RELATIVE_LEAVES_OUT = (
    "persistent_torch",
    "initial_non_torch",
    "cached",
    "non_torch_cleared",
    "graph",
    "late_non_torch",
)
_ASCEND_V1 = "vllm_ascend/worker/worker_v1.py::NPUWorker.determine_available_memory"
_ASCEND = "vllm_ascend/worker/worker.py::NPUWorker.determine_available_memory"
_CUDA = "vllm/v1/worker/gpu_worker.py::Worker.determine_available_memory"
_REQUEST = "vllm/v1/worker/utils.py::request_memory"

#: The first row that fits a release counts; the last of an id where a log tells the form of its lines alone.
EQUATIONS: tuple[Equation, ...] = (
    # --- vllm-ascend
    # Free memory is read before empty_cache, so that cached blocks are charged; the log prints the figure unclamped.
    Equation(
        id="E1",
        engine="vllm-ascend",
        versions=">=0.7.3rc1,<0.9.0rc1",
        read_in="0.7.3, 0.7.3.post1, 0.8.4rc1",
        cite=_ASCEND_V1,
        terms=(
            Term(
                "consumed",
                "consumed_bytes",
                plus=("initial_free_bytes",),
                minus=("profile_end_free_bytes",),
            ),
        ),
        floor_zero=True,
        override=None,
        not_subtracted=("initial_non_torch", "graph", "late_non_torch"),
        from_snapshots=("profile_end_free_bytes",),
    ),
    # Used less allocated, read after empty_cache: other processes and cached torch memory are in it.
    Equation(
        id="E2",
        engine="vllm-ascend",
        versions=">=0.9.0rc1,<0.9.1rc2",
        read_in="0.9.0rc1, 0.9.0rc2, 0.9.1rc1",
        cite=_ASCEND_V1,
        terms=(
            Term("peak_allocated", "profile_after_allocated_peak_bytes"),
            Term(
                "used_by_device",
                "used_less_allocated_bytes",
                plus=("device_total_bytes",),
                minus=("profile_after_free_bytes", "profile_after_allocated_bytes"),
                floor_zero=True,
            ),
            _GRAPH,
        ),
        override=None,
        not_subtracted=("non_torch_cleared", "graph", "late_non_torch"),
        from_snapshots=_ABSOLUTE,
    ),
    Equation(
        id="E2",
        engine="vllm-ascend",
        versions=">=0.9.1rc2,<0.15.0rc1",
        read_in="0.9.1, 0.10.0rc1, 0.11.0, 0.12.0rc1, 0.13.0, 0.14.0rc1",
        cite=f"{_ASCEND_V1}; worker.py from 0.13",
        terms=(
            Term("peak_allocated", "profile_after_allocated_peak_bytes"),
            Term(
                "used_by_device",
                "used_less_allocated_bytes",
                plus=("device_total_bytes",),
                minus=("profile_after_free_bytes", "profile_after_allocated_bytes"),
                floor_zero=True,
            ),
            _GRAPH,
        ),
        floor_zero=True,
        override=None,
        not_subtracted=("non_torch_cleared", "graph", "late_non_torch"),
        from_snapshots=_ABSOLUTE,
    ),
    Equation(
        id="E3",
        engine="vllm-ascend",
        versions=">=0.15.0rc1,<0.18.0rc1",
        read_in="0.15.0rc1, 0.16.0rc1, 0.17.0rc1",
        cite=_ASCEND,
        terms=(_WEIGHTS, _PEAK_INCREASE, _NON_TORCH, _CLEARED, _GRAPH),
        override=None,
        not_subtracted=("persistent_torch", "cached", "graph", "late_non_torch"),
        from_snapshots=("profile_end_non_torch_bytes",),
    ),
    # 310P keeps E3's last term and halves the result for operator workspace. Its RC devices take free memory from the
    # host and have no row.
    Equation(
        id="E4p",
        engine="vllm-ascend",
        versions=">=0.18.0rc1,<0.27",
        read_in="0.18.0, 0.20.2rc1, 0.21.0rc1, 0.23.0, 0.25.1rc1, 0.26 branch",
        cite="vllm_ascend/_310p/worker_310p.py::NPUWorker310.determine_available_memory",
        terms=(_WEIGHTS, _PEAK_INCREASE, _NON_TORCH, _CLEARED, _GRAPH),
        divisor=2,
        override=None,
        not_subtracted=("persistent_torch", "cached", "graph", "late_non_torch"),
        only="Ascend310P",
        from_snapshots=("profile_end_non_torch_bytes",),
    ),
    # The graph pool is measured after this equation has run and enters only a suggestion in the log.
    # 0.18 ignores --kv-cache-memory-bytes; 0.19 and later return it after a profile run whose figures they do not use.
    Equation(
        id="E4",
        engine="vllm-ascend",
        versions=">=0.18.0rc1,<0.19.0rc1",
        read_in="0.18.0rc1, 0.18.0",
        cite=_ASCEND,
        terms=(_WEIGHTS, _PEAK_INCREASE, _NON_TORCH, _GRAPH),
        override=None,
        not_subtracted=_RELATIVE_LEAVES_OUT,
    ),
    Equation(
        id="E4",
        engine="vllm-ascend",
        versions=">=0.19.0rc1,<0.21.0rc1",
        read_in="0.19.1rc1, 0.20.2rc1",
        cite=_ASCEND,
        terms=(_WEIGHTS, _PEAK, _NON_TORCH, _GRAPH),
        not_subtracted=_RELATIVE_LEAVES_OUT,
    ),
    # Two releases charged an estimate of the graph pools; 0.23 took it back.
    Equation(
        id="E4",
        engine="vllm-ascend",
        versions=">=0.21.0rc1,<0.23.0rc1",
        read_in="0.21.0rc1, 0.22.1rc1",
        cite=_ASCEND,
        terms=(_WEIGHTS, _PEAK, _NON_TORCH, _ESTIMATE_ON, _GRAPH),
        not_subtracted=_RELATIVE_LEAVES_OUT,
    ),
    # The peak is read inside the profiling context, so it is older than after_profile and has no derivation.
    Equation(
        id="E4",
        engine="vllm-ascend",
        versions=">=0.23.0rc1,<0.27",
        read_in="0.23.0, 0.25.1rc1",
        cite=_ASCEND,
        terms=(_WEIGHTS, _PEAK, _NON_TORCH, _GRAPH),
        not_subtracted=_RELATIVE_LEAVES_OUT,
    ),
    # --- vLLM
    # V0 and V1 live in the same releases; the lines of V0 tell which one ran.
    Equation(
        id="E0",
        engine="vllm",
        versions=">=0.6.4,<0.10",
        read_in="V0 worker with memory_profiling",
        cite="vllm/worker/worker.py::Worker.determine_num_available_blocks",
        terms=(_WEIGHTS, _NON_TORCH, _PEAK, _GRAPH),
        override=None,
        not_subtracted=_RELATIVE_LEAVES_OUT,
        only="V0",
    ),
    Equation(
        id="CPU",
        engine="vllm",
        versions=">=0.20.2,<0.34",
        read_in="0.20.2, 0.21.0, 0.23.0, 0.25.1, 0.27.1, 0.33.0",
        cite="vllm/v1/worker/cpu_worker.py::CPUWorker.determine_available_memory",
        terms=(Term("consumed", "consumed_bytes"),),
        request="ceil",
        only="cpu",
    ),
    Equation(
        id="E5",
        engine="vllm",
        versions=">=0.10.2rc1,<0.14.0rc1",
        read_in="0.11.0, 0.12.0, 0.13.0",
        cite=_CUDA,
        terms=(_WEIGHTS, _PEAK_INCREASE, _NON_TORCH, _GRAPH),
        not_subtracted=_RELATIVE_LEAVES_OUT,
    ),
    # From 0.14 on the request is rounded up. (vllm/v1/worker/utils.py::request_memory)
    Equation(
        id="E5",
        engine="vllm",
        versions=">=0.14.0rc1,<0.18.0rc1",
        read_in="0.14.0, 0.16.0, 0.17.0",
        cite=f"{_CUDA}; {_REQUEST}",
        terms=(_WEIGHTS, _PEAK_INCREASE, _NON_TORCH, _GRAPH),
        request="ceil",
        not_subtracted=_RELATIVE_LEAVES_OUT,
    ),
    # The estimate of the graph pools is charged on request, from 0.21 by default. The peak activation that the log of
    # 0.18 prints at the end holds the estimate, too, where it is charged.
    Equation(
        id="E5",
        engine="vllm",
        versions=">=0.18.0rc1,<0.21.0rc1",
        read_in="0.18.0, 0.19.1, 0.20.2",
        cite=f"{_CUDA}; {_REQUEST}",
        terms=(_WEIGHTS, _PEAK, _NON_TORCH, _ESTIMATE_OFF, _GRAPH),
        request="ceil",
        not_subtracted=_RELATIVE_LEAVES_OUT,
    ),
    Equation(
        id="E5",
        engine="vllm",
        versions=">=0.21.0rc1,<0.27.0rc1",
        read_in="0.21.0, 0.23.0, 0.24.0, 0.25.1, 0.26.0",
        cite=f"{_CUDA}; {_REQUEST}",
        terms=(_WEIGHTS, _PEAK, _NON_TORCH, _ESTIMATE_ON, _MM_IPC, _GRAPH),
        request="ceil",
        not_subtracted=_RELATIVE_LEAVES_OUT,
    ),
    # Weights and non-torch memory are one figure, free at the start less free after profiling. The peak activation
    # that the log prints holds the estimate of the graph pools already.
    Equation(
        id="E6",
        engine="vllm",
        versions=">=0.27.0rc1,<0.34",
        read_in="0.27.1, 0.32.0, 0.33.0",
        cite=f"{_CUDA}; vllm/utils/mem_utils.py::memory_profiling",
        terms=(
            Term(
                "consumed",
                "consumed_bytes",
                plus=("initial_free_bytes",),
                minus=("profile_after_free_bytes",),
            ),
            Term(
                "transient_headroom",
                "peak_activation_bytes",
                plus=("printed_peak_activation_bytes",),
                minus=("graph_estimate_bytes",),
            ),
            _ESTIMATE_ON,
            _MM_IPC,
            _GRAPH,
        ),
        request="ceil",
        not_subtracted=("initial_non_torch", "non_torch_cleared", "graph", "late_non_torch"),
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


def select(
    engine: str | None,
    version: str | None,
    forms: Sequence[str] = (),
    device: str | None = None,
    known: Collection[str] = (),
) -> tuple[Equation | None, str | None]:
    """The row for an engine release, and how it was chosen.

    Args:
        engine: ``vllm-ascend`` or ``vllm``.
        version: of the engine. It decides where it is known; a release that nobody has read has no row.
        forms: ids of the equations whose lines a log holds. They decide where no version is known.
        device: name of the chip; some have an equation of their own.
        known: names of the figures that were read. Of the rows of one form, the one that they fill best counts.
    """
    if engine is None:
        return None, None
    rows = [row for row in EQUATIONS if row.engine == engine]
    if version is None:
        seen = [row for row in rows if row.id in forms]
        if len({row.id for row in seen}) != 1:
            return None, None
        best = min(reversed(seen), key=lambda row: len(_unfilled(row, known)))
        return best, f"the form of its lines, as {engine} prints them"
    try:
        release = Version(version)
    except InvalidVersion:
        return None, None
    fitting = [
        row for row in rows if SpecifierSet(row.versions).contains(release, prereleases=True)
    ]
    special = [
        row
        for row in fitting
        if row.only is not None and (row.id in forms or _named(row.only, device))
    ]
    if special:
        row = special[0]
        why = "the form of its lines" if row.id in forms else str(device)
        return row, f"{engine} {version} and {why}"
    plain = [row for row in fitting if row.only is None]
    return (plain[0], f"{engine} {version}") if plain else (None, None)


def _named(beginning: str, device: str | None) -> bool:
    return device is not None and device.lower().startswith(beginning.lower())


def _unfilled(row: Equation, known: Collection[str]) -> list[str]:
    """Charged terms that a set of figures says nothing of."""
    names = set(known)
    return [
        term.name
        for term in row.terms
        if term.charged
        and not term.optional
        and term.figure not in names
        and not (term.plus and names.issuperset((*term.plus, *term.minus)))
    ]


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


def evaluate(
    equation: Equation, figures: Figures, half_units: Mapping[str, int] | None = None
) -> Evaluation:
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
    present = [
        term for term in equation.terms if not (term.optional and term.value(figures) is None)
    ]
    terms = [
        TermRow(
            term.name,
            term.value(figures),
            term.is_charged(figures),
            term.half_unit(figures, half_units),
        )
        for term in present
    ]
    fixed = figures.get(equation.override) if equation.override else None
    if fixed is not None:
        return Evaluation(asked, terms, int(fixed), 0, override="kv_cache_memory_bytes")
    charged = [row for row in terms if row.charged]
    tolerance = (
        _requested_half_unit(figures, half_units) + sum(row.half_unit_bytes for row in charged)
    ) // (equation.divisor) + half_units.get("kv_cache_bytes", 0)
    if asked is None or any(row.bytes is None for row in charged):
        return Evaluation(asked, terms, None, tolerance)
    budget = asked - sum(row.bytes for row in charged if row.bytes is not None)
    if equation.divisor != 1:
        budget = budget // equation.divisor
    result = int(budget)
    return Evaluation(asked, terms, max(0, result) if equation.floor_zero else result, tolerance)


def _requested_half_unit(figures: Figures, half_units: Mapping[str, int]) -> int:
    if figures.get("requested_bytes") is not None:
        return half_units.get("requested_bytes", 0)
    return math.ceil(
        half_units.get("device_total_bytes", 0) * (figures.get("gpu_memory_utilization") or 1)
    )
