"""Several instances on one device: the same answer as table, markdown and JSON, in both languages."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from functools import partial

import pytest
from rich.console import Console

from tests.unit.report.test_schemas import assert_obeys
from vllm_memprof.plans.share import Figures, SharedDevice, SharingRule, ways
from vllm_memprof.plans.share_document import share_document
from vllm_memprof.plans.share_rows import DeviceShare, InstanceStart, SharingPlan, SoloPlan, Started
from vllm_memprof.record.codec import from_json
from vllm_memprof.report import render_markdown, render_table
from vllm_memprof.report.json_text import render_result_json

GIB = 1 << 30
TOTAL = 60 * GIB


def alone(name: str, own: int) -> SoloPlan:
    return SoloPlan(
        name, f"some/model-{name.lower()}", ["--max-model-len", "4096"],
        ["KV tokens >= 1,000"] if name == "B" else [], "ok", run=f"plans/{name}",
        subtracted_bytes=own, held_ready_bytes=own + GIB // 2, held_peak_bytes=own + GIB,
        context_bytes=GIB // 4, need_bytes=GIB, bytes_per_block=1 << 20, tokens_per_block=16.0,
    )  # fmt: skip


def started(way: SharingPlan, status: str = "ok") -> SharingPlan:
    """The same way with one start, whose last instance ended with this status."""
    names = way.order or [each.name for each in way.flags]
    results = [
        Started(each.name, "ok", None, each.kv_cache_bytes, each.tokens) for each in way.flags
    ]
    if status != "ok":
        results[-1] = Started(results[-1].name, status, "it ran out of device memory")
    return replace(way, starts=[InstanceStart(list(names), "served", results, GIB // 2)])


def share(equation: str, status: str = "ok") -> DeviceShare:
    rows = [alone("A", 4 * GIB), alone("B", 20 * GIB)]
    figures = [each for row in rows if (each := Figures.of(row)) is not None]
    found = ways(SharedDevice(TOTAL, SharingRule.of(equation)), figures)
    return DeviceShare(
        ["memprof", "share", "some/model-a", "--", "some/model-b"], rows, equation,
        TOTAL, 0, 0, [started(way, status) if way.flags else way for way in found],
        seconds=1.0, notes=["a note"], simulated=True,
    )  # fmt: skip


def drawn(found: DeviceShare, width: int, lang: str = "en") -> str:
    console = Console(width=width, no_color=True, file=io.StringIO())
    with console.capture() as capture:
        console.print(render_table(partial(share_document, found), lang=lang))
    return capture.get()


@pytest.mark.parametrize("equation", ["E2", "E3", "E4"])
@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_tables_have_the_flags_and_fit(equation: str, width: int, lang: str) -> None:
    found = share(equation)
    text = drawn(found, width, lang)
    joined = " ".join(text.split())
    if lang == "en":
        assert max(map(len, text.splitlines())) <= width
    for way in found.ways:
        for each in way.flags:
            assert f"{each.name}: {each.flags}" in joined
    ways_of = {"E2": 3, "E3": 3, "E4": 1}[equation]
    assert text.count("--gpu-memory-utilization") == 2 * ways_of
    if lang == "en":
        answer = "found and started" if equation == "E4" else "3 ways, each started"
        assert f"answer {answer}" in joined
        assert ("none: the equation subtracts what a neighbour holds" in joined) is (
            equation != "E4"
        )
        assert "B wants: KV tokens >= 1,000" in joined


def test_flags_whose_start_failed_are_no_answer() -> None:
    found = share("E4", "oom")
    assert not found.found
    text = drawn(found, 120)
    assert "answer  none" in text
    assert "--gpu-memory-utilization" not in text.split("answer")[1]
    assert "A, B: B: it ran out of device memory" in text


def test_flags_that_were_not_started_are_no_answer() -> None:
    found = share("E4")
    unstarted = replace(found, ways=[replace(way, starts=[]) for way in found.ways])
    assert not unstarted.found


def test_why_there_is_nothing_to_compute() -> None:
    failed = replace(alone("A", GIB), status="oom", reason="TP0 ran out of device memory")
    found = DeviceShare(
        ["memprof"], [failed], None, None, 0, 0, why_none="instance A does not start"
    )
    assert not found.found
    assert "why     instance A does not start" in drawn(found, 100)


def test_markdown_has_the_same() -> None:
    text = render_markdown(partial(share_document, share("E2")))
    assert text.startswith("# memprof share: A some/model-a, B some/model-b")
    for way in share("E2").ways:
        for each in way.flags:
            assert each.flags in text


def test_json_obeys_its_schema_and_is_read_back() -> None:
    for found in (share("E2"), share("E3"), share("E4"), share("E4", "failed")):
        text = render_result_json(found)
        assert_obeys("share", text)
        data = json.loads(text)
        assert data["schema"] == "memprof.share/1"
        assert data["found"] is found.found
        assert from_json(DeviceShare, data) == found
        for way, read in zip(found.ways, data["ways"], strict=True):
            assert read["holds"] is way.holds
            assert [each["flags"] for each in read["flags"]] == [each.flags for each in way.flags]
