"""Several instances on one device: the same answer as table, markdown and JSON, in both languages."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from functools import partial

import pytest
from rich.console import Console

from tests.unit.report.test_schemas import assert_obeys
from vllm_memprof.accounting.budget.equations import form_of
from vllm_memprof.plans.documents import share_document
from vllm_memprof.plans.model import Miss, PlanRow, Try
from vllm_memprof.plans.share import (
    DeviceShare,
    Figures,
    InstanceStart,
    SharedDevice,
    SharingPlan,
    SoloPlan,
    ways,
)
from vllm_memprof.record.codec import from_json
from vllm_memprof.report.json_text import render_result_json
from vllm_memprof.report.markdown import render_markdown
from vllm_memprof.report.table import render_table

GIB = 1 << 30
TOTAL = 60 * GIB


def alone(name: str, own: int) -> SoloPlan:
    figures = Figures(own, own + GIB // 2, own + GIB, GIB // 4, GIB, 1 << 20, block_tokens=16.0)
    return SoloPlan(
        name, f"some/model-{name.lower()}", ["--max-model-len", "4096"],
        ["KV tokens >= 1,000"] if name == "B" else [], PlanRow({}, "ok", run=f"plans/{name}"),
        figures,
    )  # fmt: skip


def started(way: SharingPlan, status: str = "ok") -> SharingPlan:
    """The same way with one start, whose last instance ended with this status."""
    names = way.order or [each.name for each in way.flags]
    results = [
        Try(
            each.name, PlanRow({}, "ok", kv_cache_bytes=each.kv_cache_bytes, tokens=each.tokens), []
        )
        for each in way.flags
    ]
    if status != "ok":
        missing = [Miss("it ran out of device memory", "plan")]
        results[-1] = Try(results[-1].value, PlanRow({}, status), missing)
    return replace(way, starts=[InstanceStart(list(names), "served", results, GIB // 2)])


def share(equation: str, status: str = "ok") -> DeviceShare:
    rows = [alone("A", 4 * GIB), alone("B", 20 * GIB)]
    form = form_of(equation)
    assert form is not None
    figures = {row.name: row.figures for row in rows if row.figures is not None}
    return DeviceShare(
        rows, equation, TOTAL, 0, 0,
        [started(way, status) if way.flags else way
         for way in ways(
             SharedDevice(TOTAL, figures, form.subtracts_neighbours, form.checks_free)
         )],
        command=["memprof", "share", "some/model-a", "--", "some/model-b"], notes=["a note"],
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
        assert "answer found and started" in joined
        assert ("none: B, A: A gets" in joined) is (equation != "E4")
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
    plan = PlanRow({}, "oom", "TP0 ran out of device memory")
    failed = replace(alone("A", GIB), plan=plan, figures=None)
    found = DeviceShare([failed], None, None, 0, 0, why_none="instance A does not start")
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
