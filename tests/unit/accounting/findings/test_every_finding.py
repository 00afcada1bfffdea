"""Every finding with a log that has it, and with the nearest log that has not.

The two logs of a row differ in one figure, so that neither a finding that never shows nor one that
always shows passes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from vllm_memprof.accounting import Report, build_report
from vllm_memprof.accounting.findings.table import FINDINGS
from vllm_memprof.accounting.model import Finding
from vllm_memprof.logs.to_record import read_log


def ascend(
    persistent: float = 9.45,
    cleared: float = 1.07,
    reserved: float = 10.00,
    kv: str = "44.30",
    graph: float = 0.0,
) -> str:
    """vllm-ascend with a developer's debug lines; by default everything is charged and fits."""
    return f"""
vllm serve some/model --gpu-memory-utilization 0.95
non_torch_memory before init HCCL is 0.35 G
Loading weights took 9.20 GB
torch_memory before profiling is 9.75 G
torch_peak before profiling is {persistent:.2f} G
torch_memory after profiling, before empty_cache() is {reserved:.2f} G
non_torch_memory after profiling, before empty_cache() is {cleared:.2f} G
torch_memory after profiling, after empty_cache() is 9.75 G
torch_peak after profiling, after empty_cache() is 13.30 G
non_torch_memory after profiling, after empty_cache() is 0.91 G
Initial free memory: 60.61 GiB; Requested memory: 0.95 (util), 57.91 GiB
Total non KV cache memory: 13.61 GiB; torch peak memory increase: 3.86 GiB;
non-torch forward increase memory: 0.56 GiB; weights memory: 9.20 GiB.
[worker.py:357] Available KV cache memory: {kv} GiB
GPU KV cache size: 645,120 tokens
vllm_ascend: Graph capturing finished in 9 secs, took {graph:.2f} GiB
"""


def sglang_refused(said: str) -> str:
    return f"""
[2026-11-21 23:42:44] Load weight begin. avail mem=60.26 GB
[2026-11-21 23:42:44] Load weight end. elapsed=0.05 s, type=Qwen3ForCausalLM, \
avail mem=44.70 GB, mem usage=15.55 GB.
ValueError: {said} under --mem-fraction-static=0.25. Raise \
--mem-fraction-static above 0.259 (minimum viable = 1 - available/pre = 0.2583).
"""


def sglang(pools: str) -> str:
    return f"""
[2026-11-21 23:42:11] server_args=ServerArgs(model_path='some/model', mem_fraction_static=0.8, \
max_total_tokens=None, page_size=128, tp_size=1, pp_size=1, device='npu', \
speculative_algorithm=None)
[2026-11-21 23:42:44] Load weight begin. avail mem=60.26 GB
[2026-11-21 23:42:44] Load weight end. elapsed=0.05 s, type=Qwen3ForCausalLM, \
avail mem=44.70 GB, mem usage=15.55 GB.
[2026-11-21 23:42:44] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 237696, \
K size: 16.33 GB, V size: 16.33 GB
[2026-11-21 23:42:44] Memory pool end. avail mem={pools} GB
[2026-11-21 23:42:44] max_total_num_tokens=237696, chunked_prefill_size=8192, \
max_prefill_tokens=16384, max_running_requests=2971, context_len=40960, available_gpu_mem=11.57 GB
"""


def sglang_pools(after: str) -> str:
    return f"""
[2026-08-07 17:33:36] Load weight begin. avail mem=60.51 GB
[2026-08-07 17:35:48] Load weight end. elapsed=131.05 s, type=DeepseekV4ForCausalLM, \
avail mem=19.15 GB, mem usage=41.35 GB.
[2026-08-07 17:35:58] DSV4 memory calculation: bytes_per_full_token=7705.45, \
available_bytes=11.89 GB, c128_state_fixed=0.11 GB, full_token=1641472
[2026-08-07 17:35:58] DSV4 pool sizes: full=1641472, swa=164096, c4=410368, c128=12824
[2026-08-07 17:35:59] Memory pool end. avail mem={after} GB
"""


def refused(free: float, asked: float) -> str:
    return (
        f"ValueError: Free memory on device ({free}/60.96 GiB) on startup is less than desired "
        f"GPU memory utilization (0.9, {asked} GiB). Decrease GPU memory utilization."
    )


def npu_oom(free: str, allocated: str, reserved: str) -> str:
    return (
        f"NPU out of memory. Tried to allocate 4.50 GiB (NPU 1; 60.96 GiB total capacity; "
        f"{allocated} GiB already allocated; {allocated} GiB current active; {free} GiB free; "
        f"{reserved} GiB reserved in total by PyTorch)"
    )


def e6(estimate: str, suggested: str, graph: str = "0.50") -> str:
    return f"""
INFO Free memory on device (78.59/79.11 GiB) on startup. Desired GPU memory utilization is \
(0.92, 72.78 GiB). Actual usage is 20.00 GiB for consumed memory (weights + non-torch), \
2.00 GiB for peak activation, and {graph} GiB for CUDAGraph memory. Replace \
gpu_memory_utilization config with \
`--kv-cache-memory={round(float(suggested) * 2**30)}` ({suggested} GiB) to fit into requested \
memory. Current kv cache memory in use is 50.78 GiB.
INFO CUDA graph pool memory: {graph} GiB (actual), {estimate} GiB (estimated), \
difference: 0.00 GiB (0.0%).
"""


def plan(tokens: str, concurrency: str, kv: str = "20.00") -> str:
    return f"""
[worker.py:357] Available KV cache memory: {kv} GiB
GPU KV cache size: {tokens} tokens
Maximum concurrency for 4,096 tokens per request: {concurrency}x
vllm_ascend
"""


def override(blocks: int) -> str:
    return f"""
Available KV cache memory: 44.30 GiB
Overriding num_gpu_blocks=5040 with num_gpu_blocks_override={blocks}
GPU KV cache size: {blocks * 128:,} tokens
NPUWorker
"""


def too_small(needed: str) -> str:
    return (
        f"ValueError: To serve at least one request, ({needed} GiB KV cache is needed, which is "
        "larger than the available KV cache memory (0.30 GiB). Based on the available memory, the "
        "estimated maximum model length is 720."
    )


def v0(kv: str) -> str:
    return (
        "the current vLLM instance can use total_gpu_memory (79.22GiB) x "
        "gpu_memory_utilization (0.90) = 71.29GiB\n"
        "model weights take 14.96GiB; non_torch_memory takes 1.79GiB; PyTorch activation peak "
        f"memory takes 1.26GiB; the rest of the memory reserved for KV Cache is {kv}GiB."
    )


def ranks(second: str) -> str:
    return (
        "(Worker_TP0 pid=11) INFO [worker.py:1] Available KV cache memory: 41.10 GiB\n"
        f"(Worker_TP1 pid=12) INFO [worker.py:1] Available KV cache memory: {second} GiB"
    )


def at_the_start(free: float) -> str:
    asked = f"Initial free memory: {free:.2f} GiB; Requested memory: 0.95 (util), 57.91 GiB"
    return f"{asked}\n{snapshot_of(free)}"


def snapshot_of(free: float) -> str:
    return (
        f"worker init memory snapshot: torch_peak=0.0GiB, free_memory={free:.2f}GiB, "
        "total_memory=60.96GiB, x=1"
    )


def base(claimed: float) -> str:
    return (
        "Initial free memory: 60.61 GiB; Requested memory: 0.95 (util), 57.91 GiB\n"
        "[worker.py:357] Available KV cache memory: 44.30 GiB\n"
        f"= Initial free memory: {claimed:.2f} GiB * 0.95\n"
    )


def alloc(more: str) -> str:
    setting = f'export PYTORCH_NPU_ALLOC_CONF="{more}expandable_segments:True"'
    return f"{setting}\nAvailable KV cache memory: 9.95 GiB"


#: Findings about what is not an amount of memory.
WITHOUT_BYTES = ("hybrid-concurrency", "allocator-config-conflict", "static-share-too-small")


@dataclass(frozen=True)
class Row:
    """A finding: where it shows, where it must not, and the flag that its action gives, or ""."""

    with_it: str
    without: str
    flag: str = ""


TABLE: dict[str, Row] = {
    "static-share-too-small": Row(
        sglang_refused("Loaded weights leave no GPU memory for the KV cache"),
        sglang_refused("Loaded weights"),
        "--mem-fraction-static 0.259 ",
    ),
    "request-pool-not-subtracted": Row(
        sglang(pools="11.59"), sglang(pools="12.04"), "--max-running-requests "
    ),
    "pools-larger-than-sized": Row(
        sglang_pools(after="1.62"), sglang_pools(after="7.02"), "--max-total-tokens "
    ),
    "uncharged-persistent-torch": Row(
        ascend(), ascend(persistent=9.20), "--kv-cache-memory-bytes "
    ),
    "non-torch-read-after-empty-cache": Row(
        ascend(), ascend(cleared=0.91), "--kv-cache-memory-bytes "
    ),
    "graph-not-charged": Row(ascend(graph=0.40), ascend(graph=0.0), "--kv-cache-memory-bytes "),
    "reserved-peak-beyond-device": Row(
        ascend(reserved=19.13), ascend(), "--kv-cache-memory-bytes "
    ),
    "co-tenant": Row(at_the_start(40.61), at_the_start(60.61)),
    "startup-refused": Row(refused(50.0, 54.86), v0("53.28"), "--gpu-memory-utilization 0.8200 "),
    "fragmentation": Row(
        npu_oom("2.77", "52.87", "56.89"),
        npu_oom("2.77", "56.80", "56.89"),
        "expandable_segments:True",
    ),
    "rank-skew": Row(ranks("40.10"), ranks("41.10")),
    "negative-kv": Row(ascend(kv="-0.87"), ascend(), "--gpu-memory-utilization "),
    "kv-too-small": Row(too_small("1.34"), too_small("0.29"), "--max-model-len 720 "),
    "equation-unbalanced": Row(v0("50.28"), v0("53.28")),
    "engine-suggestion-wrong": Row(
        e6("0.50", "50.13"), e6("0.50", "50.63"), "--kv-cache-memory-bytes "
    ),
    "graph-estimate-high": Row(
        e6("1.50", "50.13"), e6("0.50", "50.13"), "--gpu-memory-utilization "
    ),
    "requested-base-mistaken": Row(base(60.61), base(60.96)),
    "hybrid-concurrency": Row(plan("282,240", "210.07"), plan("282,240", "68.91")),
    "budget-halved": Row(
        "Available KV cache memory: 9.95 GiB (halved for workspace)",
        "Available KV cache memory: 9.95 GiB",
    ),
    "gb-is-gib": Row(
        "Loading model weights took 9.1948 GB\nNPUWorker",
        "Loading model weights took 9.1948 GB\nNCCL",
    ),
    "allocator-config-conflict": Row(
        alloc("max_split_size_mb:256,"), alloc(""), "=expandable_segments:True "
    ),
    "block-override-beyond-budget": Row(
        override(6000), override(4096), "--num-gpu-blocks-override 5040 "
    ),
}
#: Findings that no log can show: they compare the allocator, or the hooks, with the plan. Where
#: their tests are, below the tests of accounting.
FROM_HOOKS = {
    "weights-above-checkpoint": "test_weights.py::test_clones_of_experts",
    "replicated-weights": "test_weights.py::test_a_draft_model_with_ends_of_its_own",
    "silent-dequantisation": "test_weights.py::test_padding_ties_stages_and_dtypes",
    "weights-fragmented": "test_weights.py::test_fragmentation_is_beside_the_sum",
    "growth-while-serving": "findings/test_serving_growth.py::"
    "test_a_leak_on_the_device_and_one_on_the_host",
    "engine-term-off": "test_audit.py::test_the_engine_halves_its_peak_and_its_residual_stays_0",
    "out-of-memory": "findings/test_oom.py::test_before_the_kv_cache_its_size_is_not_to_blame",
    "kv-allocation-off-plan": "findings/test_kv_cache.py::test_a_kv_cache_that_is_not_the_plan",
    "kv-out-of-reach": "test_usable.py::"
    "test_a_request_that_waits_for_ever_is_found_and_on_the_first_screen",
    "step-not-profiled": "test_usable.py::test_a_step_beyond_the_profile_is_found",
    "host-limit": "../../integration/test_host_memory.py::test_memlock",
    "pinned-rounding": "../../integration/test_host_memory.py::test_owners_add_up_to_the_cgroup",
    "hosts-differ": "test_deployment.py::test_what_differs_between_hosts_is_named",
    "events-lost": "test_build.py::test_events_that_could_not_be_written",
    "hook-not-bound": "test_build.py::test_hooks_in_trouble",
    "hook-overwritten": "test_build.py::test_hooks_in_trouble",
    "hook-never-called": "test_build.py::test_hooks_in_trouble",
    "allocation-outside-torch": "findings/test_outside_torch.py::"
    "test_memory_past_torch_after_profiling_is_not_subtracted",
    "communicator-buffers": "findings/test_outside_torch.py::"
    "test_buffers_that_the_environment_makes_larger",
    "empty-cache-in-hot-path": "findings/test_empty_cache.py::"
    "test_a_call_in_a_step_is_priced_and_a_call_between_requests_is_not",
    "observation-empties-cache": "findings/test_empty_cache.py::"
    "test_a_reading_that_empties_is_found_with_what_it_hid",
    "empty-cache-refilled": "findings/test_empty_cache.py::"
    "test_what_comes_back_as_cache_is_taken_again",
    "flush-frees-nothing": "findings/test_empty_cache.py::"
    "test_a_flush_in_which_the_cache_is_not_emptied",
    "reserved-grows-without-empty-cache": "findings/test_cycles.py::"
    "test_reserved_memory_that_grows_with_every_update",
    "kv-cache-beyond-device": "findings/test_fits_device.py::test_one_verdict_one_finding",
    "headroom-small": "findings/test_fits_device.py::test_one_verdict_one_finding",
    "engine-suggestion-beyond-device": "findings/test_fits_device.py::"
    "test_the_engine_s_own_suggestions_are_held_against_the_device",
    "residue-per-cycle": "findings/test_cycles.py::test_a_leak_of_each_cycle",
    "mm-profile-under": "test_requests.py::"
    "test_a_larger_item_than_profiled_is_found_with_tokens_and_bytes",
    "mm-profile-over": "test_requests.py::test_a_profile_of_which_less_than_half_came_is_told",
    "merge-not-profiled": "test_requests.py::"
    "test_a_merge_that_profiling_did_not_run_is_told_with_its_bytes",
}


def read(tmp_path: Path, text: str) -> list[Report]:
    path = tmp_path / "engine.log"
    path.write_text(text + "\n")
    return [build_report(run) for run in read_log(str(path))]


def found_in(reports: list[Report], finding_id: str) -> list[Finding]:
    return [
        finding for report in reports for finding in report.findings if finding.id == finding_id
    ]


def test_every_finding_has_a_row_or_a_test() -> None:
    assert set(FINDINGS) == set(TABLE) | set(FROM_HOOKS)
    folder = Path(__file__).parents[1]
    for place in FROM_HOOKS.values():
        file, _, test = place.partition("::")
        assert f"def {test}(" in (folder / file).read_text(), place


@pytest.mark.parametrize("finding_id", sorted(TABLE))
def test_a_finding_shows_where_it_applies(tmp_path: Path, finding_id: str) -> None:
    row = TABLE[finding_id]
    found = found_in(read(tmp_path, row.with_it), finding_id)
    assert found
    for finding in found:
        assert finding.severity in ("info", "warning", "error")
        assert re.search(r"\d", finding.evidence), "evidence without a figure"
        assert finding.title
        assert not finding.title.endswith(".")
        assert (finding.bytes is not None) == (finding_id not in WITHOUT_BYTES)
        assert row.flag in finding.action + " "
        for value in re.findall(r"--gpu-memory-utilization (\S+)", finding.action):
            assert re.fullmatch(r"0\.\d{4}", value) or value == "by", value
        for size in re.findall(r"--kv-cache-memory-bytes (\S+)", finding.action):
            assert 2**30 < int(size) < 2**37


@pytest.mark.parametrize("finding_id", sorted(TABLE))
def test_a_finding_that_does_not_apply_does_not_show(tmp_path: Path, finding_id: str) -> None:
    reports = read(tmp_path, TABLE[finding_id].without)
    assert reports
    assert not found_in(reports, finding_id)
