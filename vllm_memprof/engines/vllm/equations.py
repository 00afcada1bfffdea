"""The equations of vLLM and vllm-ascend: data. A new release costs a row."""

from __future__ import annotations

from dataclasses import replace

from vllm_memprof.engines.equation import BudgetStage, Equation, Term

#: What an engine computes on the way to its equation, and neither keeps nor prints. Bytes.
PASSING_FIGURES = (
    "profile_end_free_bytes",  # free after the profile run, before its last empty_cache
    "profile_after_allocated_bytes",  # after the profile run and its last empty_cache
    "cleared_bytes",  # non_torch_memory_cleared_by_empty_cache of E3
)
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
    # The peak of all torch memory, and what is in use beside it, other processes included.
    # (vllm-project/vllm#10451)
    replace(
        _E2,
        id="E0a",
        engine="vllm",
        versions=">=0.6.4,<0.6.5",
        read_in="0.6.4.post1",
        cite="vllm/worker/worker.py::Worker.determine_num_available_blocks",
    ),
    # V0 and V1 live in the same releases; the lines of V0 tell which one ran.
    Equation(
        id="E0",
        engine="vllm",
        versions=">=0.6.5,<0.10",
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
)
