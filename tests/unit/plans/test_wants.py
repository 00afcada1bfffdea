"""What is wanted: strict to read, and a plan held against it."""

from __future__ import annotations

import pytest

from vllm_memprof.errors import UsageError
from vllm_memprof.plans.model import PlanRow
from vllm_memprof.plans.wants import Want, lengths, misses, parse_wants

GIB = 1 << 30


ROW = PlanRow(
    values={}, status="ok", tokens=500_000, kv_cache_bytes=40 * GIB, max_model_len=32768,
    max_concurrency=15.26,
    concurrency_at={8192: 61.0, 65536: None}, headroom_bytes=2 * GIB, headroom_how="derived",
)  # fmt: skip


def test_wants_are_read() -> None:
    wants = parse_wants(
        ["tokens=500_000", "concurrency=8@32768", "concurrency=4", "kv_cache=40GiB"], "1.5GiB"
    )
    assert wants == [
        Want("tokens", 500_000),
        Want("concurrency", 8, 32768),
        Want("concurrency", 4),
        Want("kv-cache", 40 * GIB),
        Want("headroom", 3 * GIB // 2),
    ]
    assert lengths(wants) == (32768,)
    assert [want.text for want in wants] == [
        "KV tokens >= 500,000", "concurrency at 32,768 tokens >= 8",
        "concurrency at max_model_len >= 4",
        "KV cache >= 40.0000 GiB", "headroom >= 1.5000 GiB",
    ]  # fmt: skip
    assert parse_wants([], None) == [Want("headroom", 0)]
    assert parse_wants([], None, "ready") == []  # it has shown what it needs
    assert parse_wants([], "0", "ready") == [Want("headroom", 0)]


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("driver.py: error: unrecognized arguments: --speed 5", "refused"),
        ("driver.py: error: argument --x: expected one argument", "refused"),
        ("memprof plan: error: --until ready: a pipeline stage alone gets no batch", "refused"),
        ("error: argument --dtype: invalid choice: '5' (choose from auto)", "plan"),
        ("Value error, max_num_batched_tokens (512) must be greater than or equal to max_num_seqs "
         "(1024).", "small"),
        ("ValueError: No available memory for the cache blocks. Try increasing "
         "`gpu_memory_utilization`", "room"),
    ],
)  # fmt: skip
def test_what_the_engine_says_of_a_plan_that_failed(reason: str, kind: str) -> None:
    prefix = "the engine exited with status 1 (TP0 after the plan): "
    [miss] = misses(PlanRow({}, "failed", reason), [])
    assert (miss.text, miss.kind) == (reason, kind)
    [miss] = misses(PlanRow({}, "failed", prefix + reason), [])
    assert miss.text == reason


def test_what_is_short_in_bytes() -> None:
    wants = parse_wants(["kv-cache=41GiB", "tokens=500001"], "3GiB")
    assert [miss.short_bytes for miss in misses(ROW, wants)] == [GIB, None, GIB]


@pytest.mark.parametrize(
    ("texts", "headroom", "message"),
    [
        (["tokens"], None, "--want 'tokens' is not known"),
        (["token=5"], None, "--want 'token=5' is not known"),
        (["tokens="], None, "--want 'tokens=' is not known"),
        (["tokens=1e6"], None, "is not known"),
        (["tokens=-5"], None, "is not known"),
        (["tokens=0"], None, "is not known"),
        (["concurrency=8@"], None, "is not known"),
        (["concurrency=8@32k"], None, "is not known"),
        (["concurrency=8x32768"], None, "is not known"),
        (["kv-cache=40GB"], None, "not a size: '40GB'"),
        (["tokens=5", "tokens=6"], None, "a condition is given twice"),
        ([], "2GB", "not a size: '2GB'"),
        ([], "-1GiB", "not a size: '-1GiB'"),
    ],
)
def test_a_want_that_is_none_is_refused_with_what_to_write(
    texts: list[str], headroom: str, message: str
) -> None:
    with pytest.raises(UsageError) as error:
        parse_wants(texts, headroom)
    assert message in str(error.value)
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    ("want", "missing"),
    [
        (Want("tokens", 500_000), None),
        (Want("tokens", 500_001), "KV tokens 500,000 < 500,001"),
        (Want("kv-cache", 41 * GIB), "KV cache 40.0000 GiB < 41.0000 GiB"),
        (Want("concurrency", 15), None),
        (Want("concurrency", 16), "concurrency at max_model_len 15.26 < 16"),
        (Want("concurrency", 61, 8192), None),
        (Want("concurrency", 62, 8192), "concurrency at 8,192 tokens 61.0 < 62"),
        (Want("concurrency", 1, 32000), "concurrency at 32,000 tokens: not known"),
        (
            Want("concurrency", 1, 65536),
            "requests of 65,536 tokens are above --max-model-len 32,768",
        ),
        (Want("headroom", 2 * GIB), None),
        (
            Want("headroom", 5 * GIB // 2),
            "headroom 2.0000 GiB < 2.5000 GiB",
        ),  # the lesser of both headrooms counts
    ],
)
def test_a_plan_is_held_against_a_want(want: Want, missing: str | None) -> None:
    assert [miss.text for miss in misses(ROW, [want])] == ([] if missing is None else [missing])


def test_what_is_not_known_is_not_held() -> None:
    row = PlanRow(values={}, status="ok")
    found = misses(row, parse_wants(["tokens=1", "concurrency=1", "kv-cache=1"], None))
    assert [miss.text.endswith("not known") for miss in found] == [True] * 4
