"""Each row of the book knows its own example, and what the reader makes of several lines."""

from __future__ import annotations

import re

import pytest

from vllm_memprof.causes.book import BOOK, ORIGINS
from vllm_memprof.causes.reader import SIGNALS, CauseReader
from vllm_memprof.causes.rows import Row
from vllm_memprof.record.cause import KINDS, NamedFailure


def named(text: str) -> list[tuple[int, NamedFailure]]:
    reader = CauseReader()
    for number, line in enumerate(text.splitlines(), start=1):
        reader.add(number, line)
    return reader.finish()


def only(text: str) -> NamedFailure:
    ((_, failure),) = named(text)
    return failure


@pytest.mark.parametrize("row", BOOK, ids=lambda row: f"{row.kind}: {row.title[:40]}")
def test_a_row_knows_its_example(row: Row) -> None:
    failure = only(row.example)
    assert (failure.kind, failure.title) == (row.kind, row.title)
    assert failure.evidence
    assert failure.cures


def test_rows_are_of_known_kinds_and_every_kind_has_one() -> None:
    kinds = {row.kind for row in BOOK}
    assert kinds <= KINDS.keys()
    assert KINDS.keys() - kinds == {"not-returned-after-kill"}, "no text alone tells it"
    assert sum(map(len, ORIGINS.values())) == len(BOOK)


def test_what_is_no_matter_of_memory_gets_no_advice_about_memory() -> None:
    about_memory = re.compile(r"memory-util|mem-fraction|batched|model-len|ALLOC_CONF")
    for row in BOOK:
        if row.kind == "not-memory-at-all":
            said = " ".join(f"{cure.argument} {cure.environment}" for cure in row.cures)
            assert about_memory.search(said) is None, row.title


def test_nothing_is_called_enough_that_was_not_tried() -> None:
    assert {cure.enough for row in BOOK for cure in row.cures} == {"unknown"}


def test_the_first_cause_counts() -> None:
    failure = only(
        "ERROR EI0007: Failed to allocate resource[qp] with info [x]. Reason: Memory resources are "
        "exhausted.\n"
        "INFO Available memory: 0, total memory: 65464696832\n"
        "ERROR RuntimeError: Connection closed by peer\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert failure.kind == "communicator-resources"
    assert not failure.is_memory
    assert failure.evidence[0].line == 1


def test_a_cause_behind_the_words_that_wrap_it_counts() -> None:
    failure = only(
        "ERROR ACLgraph has insufficient available streams to capture the configured number.\n"
        "ERROR EI0006: [PID: 1] Getting socket times out. Reason: Remote Rank did not send.\n"
    )
    assert (failure.kind, failure.is_memory) == ("not-memory-at-all", False)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Failed to apply for memory.\nERROR [SqCqManage]Alloc sq cq fail, stream_id=1", None),
        ("ERROR error code is 207005\n[Error]: Failed to apply for memory.", "graph-streams"),
        (
            "aclrtMallocHostWithCfg failed 207001\nRuntimeError: operation not permitted when a "
            "stream is capturing",
            "host-memory",
        ),
        (
            "RuntimeError: CUDA error: operation not permitted when stream is capturing",
            "not-memory-at-all",
        ),
        ("ERROR EI0019: Failed to enable listening for the host", "not-memory-at-all"),
    ],
)
def test_traps(text: str, kind: str | None) -> None:
    assert only(text).kind == (kind or "graph-streams")


def test_a_value_is_computed_from_the_message() -> None:
    failure = only(
        "ValueError: To serve at least one request with the models's max seq len (131072), (4.54 "
        "GiB KV cache is needed, which is larger than the available KV cache memory (1.71 GiB). "
        "Based on the available memory, the estimated maximum model length is 45136. Try"
    )
    assert (failure.kind, failure.cures[0].value) == ("kv-too-small", "45136")
    assert failure.cures[0].enough == "computed"
    free = only("ValueError: Free memory on device cuda:0 (8.88/121.69 GiB) on startup is less")
    assert [cure.value for cure in free.cures] == [None, None, "0.07"]


def test_engines_get_their_own_arguments() -> None:
    oom = "RuntimeError: NPU out of memory. Tried to allocate 2.00 MiB"
    arguments = {cure.argument for cure in only(f"sglang\n{oom}").cures}
    assert "--mem-fraction-static" in arguments
    assert "--gpu-memory-utilization" not in arguments
    vllm = only(f"(EngineCore pid=1) ERROR {oom}").cures
    assert "--mem-fraction-static" not in {cure.argument for cure in vllm}
    assert "PYTORCH_CUDA_ALLOC_CONF" not in {cure.environment for cure in vllm}


def test_an_error_that_no_row_names_is_shown_as_it_is() -> None:
    failure = only("ERROR core.py] ValueError: the moon is in the wrong house\nEngineDeadError")
    assert failure.title == "failed: ValueError: the moon is in the wrong house; not recognised"
    assert (failure.kind, failure.confidence) == ("other", "unrecognised")
    assert failure.cures == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "INFO If out-of-memory error occurs during cudagraph capture, consider decreasing it\n",
        "WARNING Failed to import from vllm._C with ImportError('no')\n",
        "ValueError: odd\nINFO: Application startup complete.\n",
        "INFO: Application startup complete.\nERROR ValueError: top_k is not supported here\n",
        'INFO: 1.2.3.4:5 - "POST /v1/completions HTTP/1.1" 200 OK\n',
    ],
)
def test_a_healthy_log_names_no_failure(text: str) -> None:
    assert named(text) == []


def test_each_start_has_its_own_failure() -> None:
    begin = "INFO Initializing a V1 LLM engine (v0.11.0)\n"
    text = (
        f"{begin}ERROR CUBLAS_STATUS_ALLOC_FAILED\nERROR EngineCore failed to start.\n"
        f"{begin}OSError: [Errno 98] address already in use\nEngineCore failed to start\n"
    )
    assert [(line, one.kind) for line, one in named(text)] == [
        (2, "profile-too-small"),
        (5, "not-memory-at-all"),
    ]


def test_far_down_a_log_the_reader_still_gets_every_example() -> None:
    missed = [row.title for row in BOOK if not any(each in row.example for each in SIGNALS)]
    assert len(missed) < 20, missed
