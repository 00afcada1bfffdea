"""Logs of SGLang: figures, the KV cache by its equation, set-ups, ranks, failures.

The logs are of SGLang on a simulated device; the figures that are expected are computed here, from
their lines and the numbers of the models.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from tests.unit.logs.dirt import LOSSY
from vllm_memprof.accounting import Report, build_report
from vllm_memprof.accounting.budget.equations import EQUATIONS, evaluate, select
from vllm_memprof.engines.line_format import Given
from vllm_memprof.engines.sglang.log_lines import Lines, read_server_args, set_up
from vllm_memprof.logs.to_record import read_log
from vllm_memprof.record.codec import to_json
from vllm_memprof.report.markdown import render_markdown
from vllm_memprof.units import GIB

from .conftest import explain
from .samples import DSV4

DATA = Path(__file__).parents[2] / "data"
LOGS = {path.name: path.read_text() for path in sorted((DATA / "logs").glob("sglang_*.log"))}
#: Bytes per token: layers x heads of keys and values on a rank x head size x 2 bytes x 2.
QWEN3_8B = 36 * 8 * 128 * 2 * 2
QWEN3_30B_TP2 = 48 * 2 * 128 * 2 * 2
PAGE = 128


def reports(text: str) -> list[Report]:
    return [build_report(run) for run in explain(text)]


def gib(text: str) -> float:
    return float(text) * GIB


#: Log -> (tokens, bytes per token, free before, free after (least), share, K, weights, graph).
SIZED = {
    "sglang_0.5.18_8b_eager.log": (
        237_696, QWEN3_8B, "60.26", "44.70", 0.8, "16.33", "15.55", None,
    ),
    "sglang_0.5.18_8b_graph.log": (
        234_240, QWEN3_8B, "60.26", "44.70", 0.792, "16.09", "15.55", "0.18",
    ),
    "sglang_0.5.23_8b_graph.log": (
        233_728, QWEN3_8B, "60.26", "44.70", 0.791, "16.06", "15.55", "0.20",
    ),
    "sglang_0.5.23_30b_tp2.log": (
        424_448, QWEN3_30B_TP2, "60.24", "31.48", 0.8, "9.72", "28.75", "0.69",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(SIZED))
def test_tokens_sizes_and_budget_are_those_of_the_lines(name: str) -> None:
    tokens, per_token, before, after, share, k, weights, graph = SIZED[name]
    (report,) = reports(LOGS[name])
    assert (report.run.engine, report.run.engine_version, report.run.device) == (
        "sglang", None, "npu",
    )  # fmt: skip
    # SGLang's arithmetic, by hand: the rest of the share, down to whole pages
    rest = gib(after) - gib(before) * (1 - share)
    digits = 0.005 * GIB * (1 + (1 - share))
    assert (rest - digits) // (per_token * PAGE) * PAGE <= tokens
    assert tokens <= (rest + digits) // (per_token * PAGE) * PAGE
    for rank in report.ranks:
        assert rank.kv.tokens == tokens
        assert rank.figures["k_pool_bytes"] == rank.figures["v_pool_bytes"] == round(gib(k))
        assert rank.figures["weights_bytes"] == round(gib(weights))
        assert rank.figures.get("graph_bytes") == (None if graph is None else round(gib(graph)))
        budget = rank.budget
        assert budget.equation == "S1"
        assert budget.requested_bytes == int(gib(before) * share)
        granted, recomputed = budget.engine_kv_cache_bytes, budget.kv_cache_bytes
        assert granted is not None
        assert recomputed is not None
        # the pool that is printed has one page more than the tokens; two figures of 0.01 GiB
        assert abs(granted - tokens * per_token) <= 0.01 * GIB
        # the rest loses between nothing and a page, so half a page is taken and half tolerated
        assert abs(recomputed - (rest - per_token * PAGE / 2)) < 0.0001 * GIB
        allowed = digits + 0.01 * GIB + per_token * PAGE / 2
        assert budget.tolerance_bytes == pytest.approx(allowed, rel=0.001)
        assert budget.balanced
        assert (budget.fits_device_bytes, budget.headroom_bytes) == (None, None)
        assert budget.fits_request_bytes is None  # what the first steps keep is not in the log


def test_a_wrong_share_does_not_balance() -> None:
    """The check can fail: with a share of 0.79, 0.6 GiB are missing."""
    text = LOGS["sglang_0.5.18_8b_eager.log"]
    (report,) = reports(text.replace("mem_fraction_static=0.8,", "mem_fraction_static=0.79,"))
    (rank,) = report.ranks
    assert rank.budget.balanced is False
    assert rank.budget.residual_bytes == pytest.approx(60.26 * 0.01 * GIB, abs=0.02 * GIB)
    assert "equation-unbalanced" in {found.id for found in report.findings}


def test_free_memory_at_every_edge() -> None:
    (report,) = reports(LOGS["sglang_0.5.23_30b_tp2.log"])
    tp0, tp1 = report.ranks
    names = ("before_load", "after_load", "after_pools", "before_capture", "after_capture", "ready")

    def free(rank: object) -> list[float | None]:
        figures = rank.figures  # type: ignore[attr-defined]
        sizes = [figures.get(f"free_{name}_bytes") for name in names]
        return [None if size is None else round(size / GIB, 2) for size in sizes]

    assert (tp0.label, tp1.label) == ("TP0", "TP1")
    assert free(tp0) == [60.24, 31.48, 11.42, 11.40, 10.71, 10.71]
    assert free(tp1) == [60.59, 31.83, 11.77, 11.75, 11.06, None]
    items = {item.name: item.bytes for item in tp1.budget.not_subtracted}
    assert items["request_pools"] == pytest.approx((31.83 - 11.77 - 2 * 9.72) * GIB, abs=4)
    assert items["graph"] == round(gib("0.69"))
    assert items["first_steps"] is None


@pytest.mark.parametrize(
    "name", [name for name in sorted(LOGS) if "server" in name], ids=lambda name: name[7:-4]
)
def test_a_server_whose_tokens_were_given(name: str) -> None:
    """--max-total-tokens replaces the equation; keys and values are below the printed digits."""
    (report,) = reports(LOGS[name])
    (rank,) = report.ranks
    assert rank.kv.tokens == 4096
    assert rank.figures["k_pool_bytes"] == 0
    assert rank.figures["free_at_update_bytes"] == round(gib("59.93"))
    budget = rank.budget
    assert budget.override == "max_total_tokens"
    assert (budget.kv_cache_bytes, budget.engine_kv_cache_bytes) == (None, None)
    if "0.5.18" in name:
        emptied = ("emptied_before_bytes", "emptied_after_bytes", "emptied_bytes")
        assert [rank.figures[each] >> 20 for each in emptied] == [74, 50, 24]


def test_a_rank_whose_lines_are_missing_leaves_the_least_unknown() -> None:
    lines = LOGS["sglang_0.5.23_30b_tp2.log"].split("\n")
    text = "\n".join(line for line in lines if "TP0] Load weight end" not in line)
    (report,) = reports(text)
    assert {rank.budget.kv_cache_bytes for rank in report.ranks} == {None}
    assert {rank.kv.tokens for rank in report.ranks} == {424_448}


def test_lines_that_lost_their_rank_are_not_put_together() -> None:
    """Two figures of two ranks would give a difference that no rank has."""
    text = LOGS["sglang_0.5.23_30b_tp2.log"]
    text = text.replace("[2026-11-21 23:59:04 TP1] Memory pool", "Memory pool")
    text = text.replace("[2026-11-21 23:59:04 TP0] Capture target", "Capture target")
    for report in reports(text):
        for rank in report.ranks:
            items = {item.name: item.bytes for item in rank.budget.not_subtracted}
            assert items["runner_buffers"] in (None, pytest.approx(0.02 * GIB, abs=4))


def test_two_starts_in_a_log_are_two_reports() -> None:
    first, second = LOGS["sglang_0.5.18_8b_eager.log"], LOGS["sglang_0.5.18_8b_graph.log"]
    found = reports(first + second)
    assert [report.ranks[0].kv.tokens for report in found] == [237_696, 234_240]
    assert [report.ranks[0].budget.balanced for report in found] == [True, True]
    # the second without its server_args: its share is not that of the first
    bare = "\n".join(line for line in second.split("\n") if "server_args" not in line)
    found = reports(first + bare)
    assert [report.ranks[0].kv.tokens for report in found] == [237_696, 234_240]
    assert [report.ranks[0].budget.kv_cache_bytes is None for report in found] == [False, True]


@pytest.mark.parametrize("lines", range(2, 17))
def test_a_log_cut_short_gives_the_same_or_nothing(lines: int) -> None:
    whole = reports(LOGS["sglang_0.5.18_8b_eager.log"])[0].ranks[0]
    cut = "\n".join(LOGS["sglang_0.5.18_8b_eager.log"].split("\n")[:lines])
    for report in (build_report(run) for run in explain(cut)):
        for rank in report.ranks:
            assert rank.kv.tokens in (None, whole.kv.tokens)
            assert rank.budget.kv_cache_bytes in (None, whole.budget.kv_cache_bytes)
            assert rank.figures.items() <= whole.figures.items()


@pytest.mark.parametrize("kind", ["cut_lines", "cut_at_random", "lost_lines", "lost_beginnings"])
@pytest.mark.parametrize("name", sorted(LOGS))
def test_mutated_logs_never_give_a_wrong_number(name: str, kind: str) -> None:
    """What is derived of all ranks as well: the share, the least of free memory, the KV cache."""
    known = {
        (label, value)
        for report in reports(LOGS[name])
        for rank in report.ranks
        for label, value in _derived(rank)
    }
    for seed in range(6):
        dirty = LOSSY[kind](LOGS[name], random.Random(seed))
        assert isinstance(dirty, str)
        for report in (build_report(run) for run in explain(dirty)):
            for rank in report.ranks:
                assert set(_derived(rank)) <= known, seed


def _derived(rank: object) -> list[tuple[str, object]]:
    budget, kv = rank.budget, rank.kv  # type: ignore[attr-defined]
    found = [
        ("recomputed", budget.kv_cache_bytes),
        ("requested", budget.requested),
        ("fits_request", budget.fits_request_bytes),
        ("tokens", kv.tokens),
        ("per token", kv.bytes_per_token),
        *((term.name, term.bytes) for term in budget.terms),
        *((item.name, item.bytes) for item in budget.not_subtracted),
    ]
    return [(name, value) for name, value in found if value is not None]


# --- the set-up

FULL = (DATA / "sglang_server_args.txt").read_text().split("\n")[:2]


@pytest.mark.parametrize("line", FULL, ids=["ServerArgs", "dict"])
def test_the_whole_line_of_a_release_is_read(line: str) -> None:
    found, closed = read_server_args(line)
    assert closed
    assert found["tp_size"] == 1  # not that of attn or draft options
    assert found["page_size"] == 128  # not c128_page_size
    assert found["mem_fraction_static"] in (0.8, 0.791)
    assert found["device"] == "npu"
    given = set_up(found, whole=False)["given"]
    assert given == Given("sglang", device="npu", arguments=found)
    assert found["max_total_tokens"] is None


@pytest.mark.parametrize("line", FULL, ids=["ServerArgs", "dict"])
def test_a_cut_line_gives_the_same_or_nothing(line: str) -> None:
    whole, _ = read_server_args(line)
    for end in range(20, len(line), 37):
        found, closed = read_server_args(line[:end])
        assert found.items() <= whole.items()
        if len(found) < len(whole):
            assert not closed or not found
            assert set_up(found, whole=False)["given"] == Given(
                "sglang",
                device=found.get("device"),
                arguments=found if "speculative_algorithm" in found else {},
            )


@pytest.mark.parametrize("width", [64, 80, 133])
def test_a_wrapped_line_is_put_together(width: int) -> None:
    line, lines = FULL[0], Lines()
    pieces = [line[at : at + width] for at in range(0, len(line), width)]
    fed = [lines.feed(piece) for piece in pieces]
    assert not any(fed[:-1])
    found, (whole, _) = fed[-1], read_server_args(line)
    assert found.items() <= whole.items()
    assert len(found) >= len(whole) // 2  # a value across two lines is not read
    del pieces[3]
    lines = Lines()
    fed = [lines.feed(piece) for piece in pieces]
    rest = fed[-1] or lines.feed("")
    assert not lines.is_open
    assert rest.items() <= whole.items()


def test_nothing_in_the_line_is_evaluated_and_no_secret_comes_out() -> None:
    args = (
        "server_args=ServerArgs(model_path='m, tp_size=8', x=__import__('os').abort(), "
        "api_key='sk-marked-secret', admin_api_key='marked-secret', tp_size=1, pp_size=1, "
        "json_model_override_args='{\"tp_size\": 4}', mem_fraction_static=0.8, page_size=128, "
        "max_total_tokens=None, device='cuda', speculative_algorithm=None)"
    )
    text = re.sub(r"server_args=.*", lambda _: args, LOGS["sglang_0.5.18_8b_eager.log"])
    (report,) = reports(text)
    assert report.run.device == "cuda"
    assert report.ranks[0].budget.balanced
    assert "marked-secret" not in f"{to_json(report)}{render_markdown(report)}"
    assert "marked-secret" not in repr(explain(text))


def test_a_command_stands_in_for_the_line() -> None:
    text = LOGS["sglang_0.5.18_8b_eager.log"]
    text = "\n".join(line for line in text.split("\n") if "server_args" not in line)
    command = "python -m sglang.launch_server --model-path Qwen/Qwen3-8B --mem-fraction-static 0.8"
    (report,) = reports(f"$ {command} --page-size 128 --api-key marked-secret\n{text}")
    assert report.run.model == "Qwen/Qwen3-8B"
    assert report.ranks[0].budget.balanced
    assert "marked-secret" not in str(to_json(report))
    # without a page size a page may be anything up to 128 tokens: the equation needs it
    (report,) = reports(f"$ {command}\n{text}")
    assert report.ranks[0].budget.balanced is None


def test_speculative_decoding_recomputes_nothing() -> None:
    text = LOGS["sglang_0.5.18_8b_eager.log"]
    text = text.replace("speculative_algorithm=None", "speculative_algorithm='EAGLE'")
    loaded = [line for line in text.split("\n") if "Load weight" in line or "KV Cache is" in line]
    draft = [line.replace("60.26", "11.59").replace("44.70", "10.02") for line in loaded]
    draft = [re.sub("15.55|16.33", "1.57", line) for line in draft]
    (report,) = reports(text + "\n".join(draft))
    (rank,) = report.ranks
    assert rank.budget.kv_cache_bytes is None
    assert rank.kv.tokens == 237_696
    assert not {"weights_bytes", "free_before_load_bytes", "k_pool_bytes"} & {
        name for name, value in rank.figures.items() if value is not None
    }
    assert any("speculative decoding" in note for note in report.run.notes)


def test_pipeline_stages_recompute_nothing() -> None:
    """Each stage has other layers, and all serve the tokens of the one with the fewest."""
    text = LOGS["sglang_0.5.23_30b_tp2.log"].replace("'tp_size': 2", "'tp_size': 1")
    text = text.replace("'pp_size': 1", "'pp_size': 2").replace(" TP", " PP")
    (report,) = reports(text)
    assert [rank.label for rank in report.ranks] == ["PP0", "PP1"]
    assert {rank.budget.kv_cache_bytes for rank in report.ranks} == {None}
    assert {rank.kv.tokens for rank in report.ranks} == {424_448}


def test_several_pools_on_a_rank_are_left_out() -> None:
    text = LOGS["sglang_0.5.18_8b_eager.log"]
    pool = next(line for line in text.split("\n") if "KV Cache is" in line)
    other = pool.replace("237696", "190156").replace("16.33", "4.01")
    (report,) = reports(text.replace(pool, f"{pool}\n{other}"))
    (rank,) = report.ranks
    assert rank.kv.tokens == 237_696
    assert rank.budget.engine_kv_cache_bytes is None
    assert rank.budget.kv_cache_bytes is None
    assert any("several sizes" in note for note in report.run.notes)


def test_pools_that_take_more_than_sglang_sized() -> None:
    """11.89 GiB of 19.15 - 1.62 = 17.53, of which 0.03 are the table of requests."""
    (report,) = reports(DSV4)
    assert [rank.label for rank in report.ranks] == ["TP0", "TP1"]
    first = report.ranks[0]
    assert round((first.budget.engine_kv_cache_bytes or 0) / GIB, 2) == 11.89
    found = [each for each in report.findings if each.id == "pools-larger-than-sized"]
    assert {each.rank for each in found} == {0, 1}
    said = next(each for each in found if each.rank == 0)
    assert said.evidence.startswith("sized 11.89 GiB, took 17.50 +-0.02 GiB")
    assert round((said.bytes or 0) / GIB, 2) == 5.61
    tokens = re.search(r"--max-total-tokens (\d+)", said.action)
    assert tokens is not None
    assert int(tokens[1]) == int(1641472 * 11.89 / 17.4988) // 256 * 256


def test_pools_of_two_sizes_are_not_compared() -> None:
    """A limit of tokens makes them smaller after they were sized."""
    again = "[2026-08-07 17:35:58 TP0] DSV4 pool sizes: full=1200128, swa=120064, c4=300032\n"
    at = DSV4.index("[2026-08-07 17:35:59 TP1]")
    (report,) = reports(DSV4[:at] + again + DSV4[at:])
    assert [each.rank for each in report.findings if each.id == "pools-larger-than-sized"] == [1]
    assert report.ranks[0].budget.engine_kv_cache_bytes is None


def test_what_is_reserved_for_multimodal_input_is_subtracted() -> None:
    text = LOGS["sglang_0.5.23_8b_graph.log"]
    line = next(line for line in text.split("\n") if "KV Cache is" in line)
    said = (
        line[: line.index("KV Cache")]
        + "Reserving 0.10 GB of the KV budget for post-sizing multimodal allocations "
        "(feature-transport pools + embedding cache)."
    )
    (before,), (after,) = reports(text), reports(text.replace(line, f"{said}\n{line}"))
    plain, less = before.ranks[0].budget, after.ranks[0].budget
    assert less.term("mm_reserved") == round(0.10 * GIB)
    assert (plain.kv_cache_bytes or 0) - (less.kv_cache_bytes or 0) == round(0.10 * GIB)


def test_json_before_the_prefix_makes_no_other_worker() -> None:
    """Another process wrote without an end of its line."""
    glued = (
        '{"time": "2026-08-07T17:35:47", "event": "loaded", "path": "/models/a", "shards": ['
        + ("1, " * 60 + "2]}")
    )
    lines = [
        glued + line if "TP1] Load weight end" in line or "TP1] Memory" in line else line
        for line in DSV4.split("\n")
    ]
    (whole,), (report,) = reports(DSV4), reports("\n".join(lines))
    assert [rank.label for rank in report.ranks] == ["TP0", "TP1"]
    assert [rank.figures for rank in report.ranks] == [rank.figures for rank in whole.ranks]


def test_a_draft_model_is_told_by_the_memory_that_its_target_takes() -> None:
    """Without the line of arguments: before the second model is loaded, the first is there."""
    lines = DSV4.split("\n")
    draft = (
        "[2026-08-07 17:35:50 TP{0}] Load weight begin. avail mem={1} GB\n"
        "[2026-08-07 17:35:55 TP{0}] Load weight end. elapsed=5 s, type=NextN, avail "
        "mem={2} GB, mem usage=2.80 GB.\n"
    )
    more = draft.format(0, "19.15", "16.35") + draft.format(1, "19.21", "16.41")
    (report,) = reports("\n".join(lines[:4]) + f"\n{more}" + "\n".join(lines[4:]))
    assert [rank.label for rank in report.ranks] == ["TP0", "TP1"]
    assert any("speculative decoding" in note for note in report.run.notes)
    # a device that is free again is that of another start
    other = draft.format(0, "60.51", "57.71") + draft.format(1, "60.57", "57.77")
    assert len(reports("\n".join(lines[:4]) + f"\n{other}")) == 2


# --- failures

_NPU = (
    "NPU out of memory. Tried to allocate 2.77 GiB (NPU 0; 60.96 GiB total capacity; 56.20 GiB "
    "already allocated; 56.20 GiB current active; 0.97 GiB free; 56.89 GiB reserved in total by "
    "PyTorch)"
)
_CUDA = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.77 GiB. GPU 0 has a total "
    "capacity of 79.11 GiB of which 0.97 GiB is free. Of the allocated memory 70.11 GiB is "
    "allocated by PyTorch, and 1.20 GiB is reserved by PyTorch but unallocated."
)
_TRACE = """[2026-11-21 23:50:01] Scheduler hit an exception: Traceback (most recent call last):
  File "/opt/sglang/srt/managers/scheduler.py", line 2100, in event_loop_overlap
  File "/opt/sglang/srt/managers/tp_worker.py", line 300, in {function}
RuntimeError: {said}
"""


@pytest.mark.parametrize(("said", "chip"), [(_NPU, "npu"), (_CUDA, "cuda")])
def test_an_oom_is_sglang_s_and_so_are_its_remedies(said: str, chip: str) -> None:
    text = LOGS["sglang_0.5.18_8b_graph.log"].replace("device='npu'", f"device='{chip}'")
    text += _TRACE.format(function="forward_batch_generation", said=said)
    (report,) = reports(text)
    assert (report.run.engine, report.run.status) == ("sglang", "oom")
    (rank,) = report.ranks
    assert rank.oom is not None
    assert rank.oom.phase == "request"
    named = " ".join(remedy.argument for remedy in rank.oom.remedies)
    assert "--mem-fraction-static 0." in named
    assert "--chunked-prefill-size" in named
    assert "--max-running-requests" in named
    assert "--disable-cuda-graph" in named
    said_all = str(to_json(report)) + render_markdown(report)
    for option in (
        "--gpu-memory-utilization",
        "--max-num-batched-tokens",
        "--max-num-seqs",
        "--enforce-eager",
        "--tensor-parallel-size",
        "--kv-cache-memory-bytes",
        "--cudagraph-capture-sizes",
    ):
        assert option not in said_all, option
    # the share that makes the missing 1.80 GiB free: 60.26 GiB x the difference
    share = re.search(r"--mem-fraction-static (0\.\d\d)\b", named)
    assert share is not None
    assert 1.80 <= (0.792 - float(share[1])) * 60.26 <= 1.80 + 0.01 * 60.26


def test_an_oom_without_any_other_line_is_torch_s() -> None:
    (report,) = reports(_NPU)
    assert report.run.engine is None  # it proves torch_npu alone
    said = [remedy.argument for rank in report.ranks for remedy in rank.oom.remedies]
    assert not [argument for argument in said if argument.startswith("--")]


def test_an_oom_of_cuda_without_an_engine_gets_cuda_s_variable() -> None:
    (report,) = reports(_CUDA)
    said = [remedy.argument for rank in report.ranks for remedy in rank.oom.remedies]
    assert report.run.engine is None
    assert said == ["PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"]


def test_a_log_of_sglang_names_no_option_of_vllm() -> None:
    for name, text in LOGS.items():
        for report in reports(text):
            said = " ".join(f"{one.evidence} {one.action}" for one in report.findings)
            assert not re.search(
                r"--(gpu-memory|kv-cache-memory|enforce|max-num|max-model)", said
            ), name


def test_every_release_has_a_row_with_one_arithmetic() -> None:
    figures = {
        "least_free_before_load_bytes": 60 * GIB,
        "least_free_after_load_bytes": 44 * GIB,
        "mem_fraction_static": 0.75,
        "half_page_bytes": 0,
    }
    rows = [row for row in EQUATIONS if row.id == "S1"]
    found = {release: select("sglang", release)[0] for release in ("0.5.6", "0.5.10.post1",
        "0.5.12.post1", "0.5.14", "0.5.16", "0.5.18", "0.5.23")}  # fmt: skip
    assert set(found.values()) == set(rows)
    for row in rows:
        assert evaluate(row, figures).kv_cache_bytes == 29 * GIB  # 44 - 60 x 0.25
    assert select("sglang", "0.5.24")[0] is None  # nobody has read it
    assert select("sglang", "0.5.5")[0] is None


def test_no_path_of_the_machine_is_in_the_logs() -> None:
    whole = "".join(LOGS.values()) + "".join(FULL)
    assert not re.search(r"/(work|root|home|tmp)/|site-packages", whole.replace("/root/.cache", ""))


def test_read_from_a_file() -> None:
    (run,) = read_log(str(DATA / "logs" / "sglang_0.5.23_30b_tp2.log"))
    assert run.forms == ["S1"]
    assert run.info.model == "Qwen/Qwen3-30B-A3B"
