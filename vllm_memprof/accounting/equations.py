"""The engines' KV-cache equations as rows of a table, and the one function that evaluates a row.

Figures of the run enter, the KV budget in bytes leaves, rounded exactly as the engine rounds it. A
new release costs a row; a new rounding rule costs a word in ``Equation`` and a line in
``evaluate``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from vllm_memprof.accounting.model import TermRow
from vllm_memprof.text import text

Figures = Mapping[str, "int | float | None"]

#: ``Budget.override`` of a start whose KV cache an earlier one had measured and kept.
#: (vllm/v1/worker/startup_plan.py, vLLM from 0.27, VLLM_ENABLE_STARTUP_PLAN=1)
STARTUP_PLAN = "startup_plan"

#: Figures besides those of ``record.schema.FIGURES`` and ``logs.formats.LOG_FIGURES``: what an
#: engine computes on the way to its equation, and neither keeps nor prints. Bytes.
PASSING_FIGURES: dict[str, str] = {
    "profile_end_free_bytes": "free after the profile run, before its last empty_cache",
    "profile_after_allocated_bytes": "allocated after the profile run and its last empty_cache",
    "cleared_bytes": "non_torch_memory_cleared_by_empty_cache of E3",
    "least_free_before_load_bytes": "free before the weights are loaded, the least of all ranks",
    "least_free_after_load_bytes": "free after the weights are loaded, the least of all ranks",
    "half_page_bytes": "half a page of the KV pool, what rounding down to a page takes on average",
    "mm_reserved_bytes": "what SGLang reserves for multi-modal input",
    "mm_cache_limit_bytes": "what SGLang's cache of multi-modal embeddings may come to hold",
    "page_bytes": "a page of the KV cache, all layers",
    "limited_tokens": "tokens of --max-total-tokens, where they are what SGLang serves with",
}


@dataclass(frozen=True)
class Term:
    """A term of an equation, in names of ``schema.FIGURES`` and ``logs.formats.LOG_FIGURES``.

    ``figure`` is the engine's own value. Where it was not recorded, the sum of ``plus`` less the
    sum of ``minus`` stands in for it; where both are known, they have to agree
    (``accounting.build`` checks).
    """

    name: str  # of ``accounting.quantities``, as in report.json
    figure: str | None = None
    plus: tuple[str, ...] = ()
    minus: tuple[str, ...] = ()
    floor_zero: bool = False  # max(0, ...)
    subtracted: bool = True  # False: the engine reports it and subtracts it from nothing
    #: A figure, 1 or 0: the engine says whether it subtracts the term; it outranks ``subtracted``.
    subtracted_if: str | None = None
    optional: bool = False  # a run without the figure has nothing of the kind
    #: Quantities that the term adds up; the last is what the others leave of it, so that the parts
    #: are the term to the byte. Empty: the term is a quantity of its own.
    parts: tuple[str, ...] = ()
    #: Terms whose sum the figure is: it takes their place where one of them is unknown or is not
    #: subtracted.
    stands_for: tuple[str, ...] = ()

    def is_subtracted(self, figures: Figures) -> bool:
        said = figures.get(self.subtracted_if) if self.subtracted_if is not None else None
        return self.subtracted if said is None else bool(said)

    def derived(self, figures: Figures) -> int | None:
        """Return the value from its ingredients; None where one is unknown."""
        if not self.plus:
            return None
        added, taken = ([figures.get(name) for name in side] for side in (self.plus, self.minus))
        if None in added or None in taken:
            return None
        total = sum(int(value or 0) for value in added) - sum(int(value or 0) for value in taken)
        return max(0, total) if self.floor_zero else total

    def value(self, figures: Figures) -> int | None:
        direct = figures.get(self.figure) if self.figure is not None else None
        if direct is None:
            return self.derived(figures)
        return max(0, int(direct)) if self.floor_zero else int(direct)

    def half_unit(self, figures: Figures, half_units: Mapping[str, int]) -> int:
        """Return half of the last printed digit of the value, bytes.

        Where the value is derived: that of its ingredients together.
        """
        if self.figure is not None and figures.get(self.figure) is not None:
            return half_units.get(self.figure, 0)
        return sum(half_units.get(name, 0) for name in (*self.plus, *self.minus))


@dataclass(frozen=True)
class BudgetStage:
    """What a release makes of the device's budget before it returns it; the figures say whether.

    From here on the engine counts bytes by which it divides the KV cache into blocks, and no longer
    bytes of the device. A stage whose figures are unknown was not run.
    """

    name: str  # of ``accounting.quantities``: what the device holds less than the engine counts
    figure: str  # a factor; the numerator of one; or, with ``replaces``, what is returned
    over: str | None = None  # figure: the denominator
    replaces: bool = False  # the figure is the result: the engine plans blocks and no factor
    printed_half_unit: float = 0.0  # half of the last digit that a log prints of the factor

    @property
    def figures(self) -> tuple[str, ...]:
        return (self.figure,) if self.over is None else (self.figure, self.over)

    def factor(self, figures: Figures) -> float | None:
        """Return the bytes that the engine counts per byte of the device; None: not run."""
        value = figures.get(self.figure)
        if value is None or self.over is None:
            return value
        over = figures.get(self.over)
        return value / over if over else None

    def apply(self, budget: float | int, figures: Figures) -> int | None:
        """Return what the engine goes on with, in whole bytes as it rounds; None: not run."""
        factor = self.factor(figures)
        if factor is None:
            return None
        return int(figures[self.figure] or 0) if self.replaces else int(budget * factor)


@dataclass(frozen=True)
class Equation:
    """``result = round((requested - sum of the subtracted terms) // divisor)``, step by step.

    ``stages`` follow, in their order.
    """

    id: str
    engine: str  # vllm-ascend | vllm | sglang
    versions: str  # PEP 440 specifier; release candidates included
    read_in: str  # releases whose source was read
    cite: str  # file::symbol
    terms: tuple[Term, ...]
    #: Figures whose product is the request: a size and a share of it; and that product in words.
    base: str = "device_total_bytes"
    share: str = "gpu_memory_utilization"
    asked: str = "device total x utilization"
    request: str = "float"  # float: total * util unrounded; int: truncated; ceil: rounded up
    divisor: int = 1
    floor_zero: bool = False  # the engine clamps a negative budget to 0
    #: A figure that, when given, is returned as it is.
    override: str | None = "kv_cache_memory_bytes_arg"
    #: A figure, bytes of a page: where it is known, the result goes down to whole pages, and the
    #: term that stands for that rounding in logs is left out.
    pages: str | None = None
    #: A figure in tokens that, where it is known, was taken instead of the result; and its option.
    limited_by: str | None = None
    limit_option: str = ""
    #: Items of ``accounting.quantities`` that no term of this equation covers.
    not_subtracted: tuple[str, ...] = ()
    #: Only on devices whose name begins so, or where the form of the log lines says it.
    only: str | None = None
    #: Figures to be read around the last empty_cache of the profile run.
    from_snapshots: tuple[str, ...] = ()
    #: A term holds what other processes have on the device, although the request is a share of
    #: the whole device. (vllm-ascend#7308)
    subtracts_neighbours: bool = False
    #: The engine raises at its start where less is free than it requests.
    #: (vllm/v1/worker/utils.py::request_memory; NPUWorker.init_device, from vllm-ascend 0.15)
    checks_free: bool = True
    stages: tuple[BudgetStage, ...] = ()
    #: At the end of a start the engine prints sizes for --kv-cache-memory-bytes, made of weights,
    #: peak activation, non-torch increase and captured graphs. (``accounting.suggestions``)
    suggests: bool = False

    @property
    def formula(self) -> str:
        return self.formula_of(self.terms)

    def formula_of(self, terms: Sequence[Term]) -> str:
        """Return the equation in names, with these of its terms."""
        names = [
            term.name
            for term in terms
            if (term.subtracted or term.subtracted_if) and not term.stands_for
        ]
        asked = self.asked
        asked = asked if self.request == "float" else f"{self.request}({asked})"
        rest = f"{asked} - ({' + '.join(names)})"
        rest = f"({rest}) // {self.divisor}" if self.divisor != 1 else rest
        return f"max(0, int({rest}))" if self.floor_zero else f"int({rest})"


_WEIGHTS = Term("weights", "weights_bytes")
_PEAK = Term("peak_activation", "peak_activation_bytes")
#: From both snapshots; for engines that read the peak elsewhere the two may differ.
_PEAK_INCREASE = replace(
    _PEAK,
    plus=("profile_after_allocated_peak_bytes",),
    minus=("profile_before_allocated_peak_bytes",),
)
_NON_TORCH = Term(
    "non_torch",
    "non_torch_increase_bytes",
    plus=("profile_after_non_torch_bytes",),
    minus=("initial_non_torch_bytes",),
)
#: Non-torch memory before empty_cache, less the increase after it: an absolute less a difference,
#: so that it holds what other processes have on the device.
_CLEARED = Term(
    "cleared",
    "cleared_bytes",
    plus=("profile_end_non_torch_bytes",),
    minus=("non_torch_increase_bytes",),
    parts=("initial_non_torch", "other_processes_at_start", "non_torch_cleared"),
)
_GRAPH = Term("graph", "graph_bytes", subtracted=False)
#: Subtracted where the engine says so; by its release where it says nothing.
_ESTIMATE_ON = Term(
    "graph_estimate", "graph_estimate_bytes", subtracted_if="graph_estimate_charged"
)
_ESTIMATE_OFF = replace(_ESTIMATE_ON, subtracted=False)
_MM_IPC = Term("mm_ipc", "mm_ipc_bytes", optional=True)
_PEAK_ALLOCATED = Term(
    "peak_allocated",
    "profile_after_allocated_peak_bytes",
    parts=("weights", "persistent_torch", "peak_activation"),
)
#: Used less allocated, read after empty_cache: other processes and idle torch segments are in it.
_USED_BY_DEVICE = Term(
    "used_by_device",
    "used_less_allocated_bytes",
    plus=("device_total_bytes",),
    minus=("profile_after_free_bytes", "profile_after_allocated_bytes"),
    floor_zero=True,
    parts=(
        "initial_non_torch",
        "other_processes_at_start",
        "reserved_not_allocated",
        "non_torch",
    ),
)
#: Layers that share buffers under layerwise KV pooling: the device holds fewer than the engine
#: counts. (from 0.26.0rc1)
_LAYER_REUSE = BudgetStage("layer_reuse", "kv_layer_reuse", printed_half_unit=0.0005)
#: Buffers per layer of every group, where the engine counts those of the largest.
#: (``_scale_kv_cache_memory_for_multi_group``, in use from 0.29.0rc1; in 0.28.0rc1 it returns what
#: it is given)
_MULTI_GROUP = BudgetStage("multi_group", "kv_largest_group_page_bytes", over="kv_all_page_bytes")
#: Sparse KV offload (from 0.26.0rc1) and KV cache spread over ranks (KVPP, from 0.28.0rc1): blocks
#: that lie in host memory or on other ranks are in what is returned.
_PLANNER = BudgetStage(
    "kv_elsewhere", "kv_planner_bytes", over="kv_planner_input_bytes", replaces=True
)
_RELATIVE_LEAVES_OUT = (
    "persistent_torch",
    "initial_non_torch",
    "reserved_not_allocated",
    "non_torch_cleared",
    "graph",
    "late_non_torch",
)
_ASCEND_V1 = "vllm_ascend/worker/worker_v1.py::NPUWorker.determine_available_memory"
_ASCEND = "vllm_ascend/worker/worker.py::NPUWorker.determine_available_memory"
_ASCEND_310P = "vllm_ascend/_310p/worker_310p.py::NPUWorker310.determine_available_memory"
_CUDA = "vllm/v1/worker/gpu_worker.py::Worker.determine_available_memory"
_REQUEST = "vllm/v1/worker/utils.py::request_memory"

#: The terms of a rounding down to whole pages: as a log tells it, and as the page is known.
_HALF_A_PAGE, _WHOLE_PAGES = "page_rounding", "whole_pages"
#: No profile run: the share is of what was free before the model, and what is not in it is for
#: everything else. Free memory is the least of all ranks; the KV cache goes down to whole pages.
_S1 = Equation(
    id="S1",
    engine="sglang",
    versions=">=0.5.16,<0.5.24",
    read_in="0.5.16, 0.5.18, 0.5.23",
    cite="sglang/srt/mem_cache/kv_cache_configurator.py"
    "::KVCacheConfigurator._profile_available_bytes; pool_configurator.py"
    "::DefaultPoolConfigurator.calculate_pool_sizes",
    base="least_free_before_load_bytes",
    share="mem_fraction_static",
    asked="free_before_load x mem_fraction_static",
    terms=(
        Term(
            "loaded",
            plus=("least_free_before_load_bytes",),
            minus=("least_free_after_load_bytes",),
        ),
        Term("mm_reserved", "mm_reserved_bytes", optional=True),
        Term(_HALF_A_PAGE, "half_page_bytes"),
    ),
    override=None,
    pages="page_bytes",
    limited_by="limited_tokens",
    limit_option="max_total_tokens",
    not_subtracted=("request_pools", "runner_buffers", "graph", "graph_prefill", "first_steps"),
    checks_free=False,
)

_E2 = Equation(
    id="E2",
    engine="vllm-ascend",
    versions=">=0.9.0rc1,<0.9.1rc2",
    read_in="0.9.0rc1, 0.9.0rc2, 0.9.1rc1",
    cite=_ASCEND_V1,
    terms=(_PEAK_ALLOCATED, _USED_BY_DEVICE, _GRAPH),
    override=None,
    not_subtracted=("non_torch_cleared", "graph", "late_non_torch"),
    from_snapshots=(
        "profile_after_allocated_peak_bytes",
        "profile_after_free_bytes",
        "profile_after_allocated_bytes",
    ),
    subtracts_neighbours=True,
    checks_free=False,
)
_E3 = Equation(
    id="E3",
    engine="vllm-ascend",
    versions=">=0.15.0rc1,<0.18.0rc1",
    read_in="0.15.0rc1, 0.16.0rc1, 0.17.0rc1",
    cite=_ASCEND,
    terms=(_WEIGHTS, _PEAK_INCREASE, _NON_TORCH, _CLEARED, _GRAPH),
    override=None,
    not_subtracted=("persistent_torch", "reserved_not_allocated", "graph", "late_non_torch"),
    from_snapshots=("profile_end_non_torch_bytes",),
    subtracts_neighbours=True,
)
#: The graph pool is measured after this equation has run and enters only a suggestion in the log.
#: 0.18 ignores --kv-cache-memory-bytes; 0.19 and later return it after a profile run whose figures
#: they do not use. From 0.23 on the peak is read inside the profiling context, so it is older than
#: after_profile and has no derivation.
_E4 = Equation(
    id="E4",
    engine="vllm-ascend",
    versions=">=0.23.0rc1,<0.26.0rc1",
    read_in="0.23.0, 0.25.1rc1",
    cite=_ASCEND,
    terms=(_WEIGHTS, _PEAK, _NON_TORCH, _GRAPH),
    not_subtracted=_RELATIVE_LEAVES_OUT,
    suggests=True,
)
#: From 0.14 on the request is rounded up. (vllm/v1/worker/utils.py::request_memory)
_E5 = Equation(
    id="E5",
    engine="vllm",
    versions=">=0.14.0rc1,<0.18.0rc1",
    read_in="0.14.0, 0.16.0, 0.17.0",
    cite=f"{_CUDA}; {_REQUEST}",
    terms=(_WEIGHTS, _PEAK_INCREASE, _NON_TORCH, _GRAPH),
    request="ceil",
    not_subtracted=_RELATIVE_LEAVES_OUT,
)

#: The first row that fits a release counts; the last of an id where a log tells the form of its
#: lines alone.
EQUATIONS: tuple[Equation, ...] = (
    # --- vllm-ascend
    # Free memory is read before empty_cache, so that idle segments are subtracted; the log prints
    # the figure unclamped.
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
                parts=(
                    "weights",
                    "persistent_torch",
                    "peak_activation",
                    "reserved_not_allocated",
                    "non_torch",
                    "non_torch_cleared",
                    "reserved_at_end",
                ),
            ),
        ),
        floor_zero=True,
        override=None,
        not_subtracted=("initial_non_torch", "graph", "late_non_torch"),
        from_snapshots=("profile_end_free_bytes",),
        checks_free=False,
    ),
    _E2,
    replace(
        _E2,
        versions=">=0.9.1rc2,<0.15.0rc1",
        read_in="0.9.1, 0.10.0rc1, 0.11.0, 0.12.0rc1, 0.13.0, 0.14.0rc1",
        cite=f"{_ASCEND_V1}; worker.py from 0.13",
        floor_zero=True,
    ),
    _E3,
    # 310P keeps E3's last term and halves the result for operator workspace. Its RC devices take
    # free memory from the host and have no row.
    replace(
        _E3,
        id="E4p",
        versions=">=0.18.0rc1,<0.28.0rc1",
        read_in="0.18.0, 0.20.2rc1, 0.21.0rc1, 0.23.0, 0.25.1rc1, 0.26.0rc1, 0.27.1rc1",
        cite=_ASCEND_310P,
        divisor=2,
        only="Ascend310P",
    ),
    # Its override of the scaling, from 0.30.0rc2, leaves uniform groups alone. It never applies a
    # start-up plan, and a fixed size neither.
    replace(
        _E3,
        id="E4p",
        versions=">=0.28.0rc1,<0.31",
        read_in="0.28.0rc1, 0.29.0rc1, 0.30.0rc2",
        cite=_ASCEND_310P,
        divisor=2,
        only="Ascend310P",
        stages=(_MULTI_GROUP,),
    ),
    replace(
        _E4,
        versions=">=0.18.0rc1,<0.19.0rc1",
        read_in="0.18.0rc1, 0.18.0",
        terms=(_WEIGHTS, _PEAK_INCREASE, _NON_TORCH, _GRAPH),
        override=None,
        suggests=False,
    ),
    replace(_E4, versions=">=0.19.0rc1,<0.21.0rc1", read_in="0.19.1rc1, 0.20.2rc1"),
    # Two releases subtracted an estimate of the graph pools; 0.23 took it back.
    replace(
        _E4,
        versions=">=0.21.0rc1,<0.23.0rc1",
        read_in="0.21.0rc1, 0.22.1rc1",
        terms=(_WEIGHTS, _PEAK, _NON_TORCH, _ESTIMATE_ON, _GRAPH),
    ),
    _E4,
    replace(
        _E4,
        versions=">=0.26.0rc1,<0.28.0rc1",
        read_in="0.26.0rc1, 0.27.1rc1",
        stages=(_LAYER_REUSE, _PLANNER),
    ),
    replace(
        _E4,
        versions=">=0.28.0rc1,<0.31",
        read_in="0.28.0rc1, 0.29.0rc1, 0.30.0rc2",
        stages=(_MULTI_GROUP, _LAYER_REUSE, _PLANNER),
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
        checks_free=False,
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
    replace(
        _E5,
        versions=">=0.10.2rc1,<0.14.0rc1",
        read_in="0.11.0, 0.12.0, 0.13.0",
        cite=_CUDA,
        request="float",
    ),
    _E5,
    # The estimate of the graph pools is subtracted on request, from 0.21 by default. The peak
    # activation that the log of 0.18 prints at the end holds the estimate, too, where it is.
    replace(
        _E5,
        versions=">=0.18.0rc1,<0.21.0rc1",
        read_in="0.18.0, 0.19.1, 0.20.2",
        terms=(_WEIGHTS, _PEAK, _NON_TORCH, _ESTIMATE_OFF, _GRAPH),
    ),
    replace(
        _E5,
        versions=">=0.21.0rc1,<0.27.0rc1",
        read_in="0.21.0, 0.23.0, 0.24.0, 0.25.1, 0.26.0",
        terms=(_WEIGHTS, _PEAK, _NON_TORCH, _ESTIMATE_ON, _MM_IPC, _GRAPH),
    ),
    # Weights and non-torch memory are one figure, free at the start less free after profiling and
    # its empty_cache. The peak activation that the log prints holds the estimate of the graph pools
    # already.
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
                parts=(
                    "weights",
                    "persistent_torch",
                    "kept_torch",
                    "reserved_not_allocated",
                    "non_torch",
                ),
            ),
            Term(
                "transient_headroom",
                "peak_activation_bytes",
                plus=("printed_peak_activation_bytes",),
                minus=("graph_estimate_bytes",),
                parts=("peak_activation",),
            ),
            _ESTIMATE_ON,
            Term(
                "printed_peak",
                "printed_peak_activation_bytes",
                parts=("peak_activation", "graph_estimate"),
                stands_for=("transient_headroom", "graph_estimate"),
            ),
            _MM_IPC,
            _GRAPH,
        ),
        request="ceil",
        not_subtracted=("initial_non_torch", "non_torch_cleared", "graph", "late_non_torch"),
    ),
    # --- SGLang: one arithmetic, four places
    replace(
        _S1,
        versions=">=0.5.6,<0.5.10",
        read_in="0.5.6",
        cite="sglang/srt/model_executor/model_runner.py::ModelRunner.profile_max_num_token",
    ),
    replace(
        _S1,
        versions=">=0.5.10,<0.5.12",
        read_in="0.5.10.post1",
        cite="sglang/srt/model_executor/model_runner_kv_cache_mixin.py::profile_max_num_token",
    ),
    replace(
        _S1,
        versions=">=0.5.12,<0.5.16",
        read_in="0.5.12.post1, 0.5.14",
        cite="sglang/srt/model_executor/model_runner_kv_cache_mixin.py::_profile_available_bytes;"
        " pool_configurator.py",
    ),
    _S1,
)


def form_of(equation_id: str | None) -> Equation | None:
    """Return the newest row of an equation's id, for what all of its rows have in common.

    Its divisor, the parts of its terms, whether it subtracts other processes' memory, and whether
    the engine checks what is free are the same in all rows of an id.
    """
    return next((row for row in reversed(EQUATIONS) if row.id == equation_id), None)


def divisor_of(equation_id: str | None) -> int:
    """Return what an equation divides its result by; 1 where the equation is unknown."""
    row = form_of(equation_id)
    return 1 if row is None else row.divisor


def ignoring_fixed_size(equation_id: str | None) -> str:
    """Return the releases that have an equation and ignore --kv-cache-memory-bytes, "" for none."""
    return "; ".join(
        f"{row.engine} {row.read_in}"
        for row in EQUATIONS
        if row.id == equation_id and row.override is None
    )


@dataclass(frozen=True)
class Evaluation:
    """An equation with the figures of one rank in it."""

    requested: int | float | None  # as the engine holds it
    terms: list[TermRow]
    kv_cache_bytes: int | None  # None: a figure is missing
    tolerance_bytes: int  # half-units of every figure used; 0 from hooks
    #: "kv_cache_memory_bytes", "startup_plan": a fixed size replaced the equation.
    override: str | None = None
    stages: tuple[str, ...] = ()  # names of those that were run


def select(
    engine: str | None,
    version: str | None,
    forms: Sequence[str] = (),
    device: str | None = None,
    known: Collection[str] = (),
) -> tuple[Equation | None, str | None]:
    """Return the row for an engine release, and how it was chosen.

    Args:
        engine: ``vllm-ascend`` or ``vllm``.
        version: of the engine. It decides where it is known; a release that nobody has read has
            no row.
        forms: ids of the equations whose lines a log holds. They decide where no version is known.
        device: name of the chip; some have an equation of their own.
        known: names of the figures that were read. Of the rows of one form, the one that they fill
            best counts.
    """
    if engine is None:
        return None, None
    rows = [row for row in EQUATIONS if row.engine == engine]
    if version is None:
        seen = [row for row in rows if row.id in forms]
        if len({row.id for row in seen}) != 1:
            return None, None
        best = min(reversed(seen), key=lambda row: len(_unfilled(row, known)))
        return best, text("the form of its lines, as {engine} prints them", engine=engine)
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
        why = text("the form of its lines") if row.id in forms else str(device)
        return row, text("{engine} {version} and {why}", engine=engine, version=version, why=why)
    plain = [row for row in fitting if row.only is None]
    return (plain[0], f"{engine} {version}") if plain else (None, None)


def of_device(device: str, version: str | None) -> Equation | None:
    """Return the row of a chip that has an equation of its own, None where a release has none.

    Args:
        device: name of the chip.
        version: of the engine, None where it is not known.
    """
    rows = [row for row in EQUATIONS if row.only is not None and _named(row.only, device)]
    if version is None:
        return rows[-1] if rows else None
    try:
        release = Version(version)
    except InvalidVersion:
        return None
    fitting = (r for r in rows if SpecifierSet(r.versions).contains(release, prereleases=True))
    return next(fitting, None)


def _named(beginning: str, device: str | None) -> bool:
    return device is not None and device.lower().startswith(beginning.lower())


def _unfilled(row: Equation, known: Collection[str]) -> list[str]:
    """Return the subtracted terms that a set of figures says nothing of."""
    names = set(known)
    return [
        term.name
        for term in row.terms
        if term.subtracted
        and not term.optional
        and not term.stands_for
        and term.figure not in names
        and not (term.plus and names.issuperset((*term.plus, *term.minus)))
    ]


def requested(equation: Equation, figures: Figures) -> int | float | None:
    """Return what the engine asks of the device: the recorded value, else total x utilization."""
    recorded = figures.get("requested_bytes")
    return recorded if recorded is not None else computed_request(equation, figures)


def computed_request(equation: Equation, figures: Figures) -> int | float | None:
    total, utilization = figures.get(equation.base), figures.get(equation.share)
    if total is None or utilization is None:
        return None
    product = total * utilization
    return {"float": product, "int": int(product), "ceil": math.ceil(product)}[equation.request]


def evaluate(
    equation: Equation, figures: Figures, half_units: Mapping[str, int] | None = None
) -> Evaluation:
    """Recompute one rank's KV budget.

    Args:
        equation: the row that belongs to the run.
        figures: FIGURES of the rank, bytes; None is unknown.
        half_units: half of the last printed digit per figure, bytes, of those read from text.

    Returns:
        The terms and the result; a missing figure makes the result None, never a smaller sum.
    """
    half_units = half_units or {}
    asked = requested(equation, figures)
    present = _terms_for(equation, figures)
    terms = [
        TermRow(
            term.name,
            term.value(figures),
            term.is_subtracted(figures),
            term.half_unit(figures, half_units),
        )
        for term in present
    ]
    fixed = figures.get(equation.override) if equation.override else None
    if fixed is not None:
        by = STARTUP_PLAN if figures.get("startup_plan_bytes") else "kv_cache_memory_bytes"
        size = int(fixed)
        for stage in equation.stages:
            if stage.replaces and (planned := stage.apply(size, figures)) is not None:
                size = planned
        return Evaluation(asked, terms, size, 0, override=by)
    if equation.limited_by is not None and figures.get(equation.limited_by) is not None:
        return Evaluation(asked, terms, None, 0, override=equation.limit_option)
    subtracted = [row for row in terms if row.subtracted]
    slack = _slack(equation, figures, half_units, subtracted) // equation.divisor
    printed = half_units.get("kv_cache_bytes", 0)
    if asked is None or any(row.bytes is None for row in subtracted):
        return Evaluation(asked, terms, None, slack + printed)
    budget = asked - sum(row.bytes for row in subtracted if row.bytes is not None)
    if equation.divisor != 1:
        budget = budget // equation.divisor
    run: list[str] = []
    for stage in equation.stages:
        after = stage.apply(budget, figures)
        if after is not None:
            terms.append(TermRow(stage.name, int(budget) - after, True, 0))
            run.append(stage.name)
            slack = math.ceil(slack * (stage.factor(figures) or 1.0))
            if half_units:  # the factor was read from text
                slack += math.ceil(abs(budget) * stage.printed_half_unit)
            budget = after
    result = max(0, int(budget)) if equation.floor_zero else int(budget)
    page = _page(equation, figures)
    if page:
        terms.append(TermRow(_WHOLE_PAGES, result % page, True, 0))
        result -= result % page
    return Evaluation(asked, terms, result, slack + printed, stages=tuple(run))


def counted_per_byte(
    equation: Equation | None, figures: Figures, *, fixed_size: bool = False
) -> float:
    """Return the bytes of KV cache that the engine counts per byte that the device holds of it.

    1 where what it returns are bytes of the device, as in every release without stages.

    Args:
        equation: of the engine.
        figures: of one rank.
        fixed_size: of a size given by --kv-cache-memory-bytes, which the engine takes as what it
            counts: it scales it by no factor, and hands it to its planners as bytes of the device.
    """
    stages = () if equation is None else equation.stages
    factors = [each.factor(figures) for each in stages if not (fixed_size and each.replaces)]
    return math.prod(factor for factor in factors if factor is not None)


def _terms_for(equation: Equation, figures: Figures) -> list[Term]:
    """Return the terms that a set of figures fills: a printed sum where its parts are unknown."""
    apart = {term.name: term for term in equation.terms}
    left_out: set[str] = set()
    for joint in (term for term in equation.terms if term.stands_for):
        parts = [apart[name] for name in joint.stands_for]
        told_apart = all(
            part.is_subtracted(figures) and part.value(figures) is not None for part in parts
        )
        if told_apart or joint.value(figures) is None:
            left_out.add(joint.name)
        else:
            left_out.update(joint.stands_for)
    if _page(equation, figures):
        left_out.add(_HALF_A_PAGE)
    return [
        term
        for term in equation.terms
        if term.name not in left_out and not (term.optional and term.value(figures) is None)
    ]


def _page(equation: Equation, figures: Figures) -> int | None:
    """Return the bytes of a page, to whole ones of which the result goes down; None: unknown."""
    size = None if equation.pages is None else figures.get(equation.pages)
    return None if size is None else int(size)


def _slack(
    equation: Equation, figures: Figures, half_units: Mapping[str, int], terms: Sequence[TermRow]
) -> int:
    """Return what the rounding of the figures in an equation adds up to, bytes.

    A figure in the request and in a term counts once, with what both make of it.
    """
    base = equation.base
    joint = [term for term in equation.terms if term.figure is None and base in term.plus]
    if not joint or figures.get("requested_bytes") is not None:
        asked = _requested_half_unit(equation, figures, half_units)
        return asked + sum(row.half_unit_bytes for row in terms)
    share = len(joint) - (figures.get(equation.share) or 0)
    apart = sum(row.half_unit_bytes for row in terms) - len(joint) * half_units.get(base, 0)
    return math.ceil(abs(share) * half_units.get(base, 0)) + apart


def _requested_half_unit(
    equation: Equation, figures: Figures, half_units: Mapping[str, int]
) -> int:
    if figures.get("requested_bytes") is not None:
        return half_units.get("requested_bytes", 0)
    return math.ceil(half_units.get(equation.base, 0) * (figures.get(equation.share) or 1))
