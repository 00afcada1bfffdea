"""A calibrated plan as a table in two widths, in Chinese, as markdown and as JSON."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import jsonschema
import pytest
from rich.console import Console

from tests.unit.report.test_schemas import schema_of
from tests.unit.test_docs import lacking
from vllm_memprof.accounting.build import build_report
from vllm_memprof.logs.to_record import read_log
from vllm_memprof.plans.calibrated import Calibrated, HardwareSource
from vllm_memprof.plans.corrections import ComparedRank, Corrections, figures_of
from vllm_memprof.plans.documents import calibrated_document
from vllm_memprof.plans.model import PlanRow
from vllm_memprof.record.codec import from_json
from vllm_memprof.record.loader import load_run
from vllm_memprof.report.html import render_html
from vllm_memprof.report.json_text import render_result_json
from vllm_memprof.report.markdown import render_markdown
from vllm_memprof.report.table import render_table
from vllm_memprof.sim.profiles import load_profile
from vllm_memprof.units import GIB, MIB

DATA = Path(__file__).parents[2] / "data"


def corrections():
    """Of a real log against the recorded plan of its command."""
    log = build_report(read_log(DATA / "logs" / "two_methods_910b_tp2.md")[2]).ranks[0]
    plan = build_report(load_run(DATA / "recorded_023_tp2")).ranks[0]
    sides = [
        ComparedRank(figures_of(log), "E4"),
        ComparedRank(figures_of(plan), "E4"),
    ]
    return Corrections(*sides, load_profile("910b")).rows


def row(name: str, kv: int, headroom: int) -> PlanRow:
    return PlanRow(
        values={"plan": name}, status="ok", kv_cache_bytes=kv, tokens=kv // 73728,
        fits_device_bytes=kv + headroom, headroom_bytes=headroom, headroom_how="modelled", simulated=True,
    )  # fmt: skip


FOUND = Calibrated(
    model="some/model",
    command=["memprof", "calibrate", "some/model", "--run", "a.log"],
    source=HardwareSource(
        name="a.log", model="some/model", engine="vllm-ascend", engine_version=None, device=None,
        devices=2, rank="worker 1 of 2",
    ),
    stack="vllm-ascend-0.23.0",
    own=row("own", 44 * GIB, GIB),
    corrections=corrections(),
    profile="calibrated.toml",
    same_command=False,
    without=row("without", 40 * GIB, 90 * MIB),
    corrected=row("with", 40 * GIB - 98 * MIB, -8 * MIB),
    seconds=30.0,
    notes=["a note"],
)  # fmt: skip


def table(found: Calibrated, width: int, lang: str = "en") -> str:
    console = Console(width=width, no_color=True, file=io.StringIO())
    with console.capture() as capture:
        console.print(render_table(partial(calibrated_document, found), lang=lang))
    return capture.get()


@pytest.mark.parametrize("width", [80, 120])
def test_each_correction_has_both_sides_and_the_answer_both_profiles(width: int) -> None:
    text = table(FOUND, width)
    assert max(map(len, text.splitlines())) <= width
    joined = " ".join(text.split())
    assert "non-torch as one 0.5600 ±0.0050 0.4648 +0.0952 +0.0952" in joined
    assert "context 0.3500 ±0.0050 0.3500 0.0000 -" in joined
    assert "kernels_bytes 0 -> 102,173,245; per process and device" in joined
    assert "own 44.00 640,796" in joined
    assert "without 40.00 582,542" in joined
    assert "with 39.90 581,148" in joined
    assert "change KV cache -0.0957 GiB, headroom -0.0957 GiB" in joined


@pytest.mark.parametrize("width", [80, 120])
def test_every_heading_has_an_entry_in_the_glossary(width: int) -> None:
    assert list(lacking(calibrated_document(FOUND, width), "Calibrated")) == []


def test_a_plan_that_fails_says_why() -> None:
    failed = PlanRow({"plan": "with"}, "oom", "TP0 ran out of device memory in profile_run")
    text = " ".join(table(replace(FOUND, corrected=failed), 120).split())
    assert "plan=with: TP0 ran out of device memory in profile_run" in text
    assert "change KV cache - GiB, headroom - GiB" in text


def test_it_is_there_in_chinese_markdown_and_html() -> None:
    text = table(FOUND, 120, "zh")
    assert "对模拟显存的校正" in text
    assert "每进程每设备" in text
    markdown = render_markdown(partial(calibrated_document, FOUND))
    assert "Corrections of modelled memory" in markdown
    assert "+0.0952" in markdown
    assert "+0.0952" in render_html(partial(calibrated_document, FOUND))


def test_its_json_obeys_the_schema_and_can_be_read() -> None:
    data = json.loads(render_result_json(FOUND))
    jsonschema.validate(data, schema_of("calibrated"))
    assert data["schema"] == "memprof.calibrated/2"
    assert {"corrected", "without"} <= data.keys()
    assert data["kv_cache_change_bytes"] == -98 * MIB
    one = next(each for each in data["corrections"] if each["owner"] == "non_torch")
    assert one["difference_bytes"] == one["applied_bytes"] == 102_173_245
    assert (one["hardware"]["how"], one["carried_how"]) == ("measured", "estimated")
    assert from_json(Calibrated, data) == FOUND
