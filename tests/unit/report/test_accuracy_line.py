"""A plan's report says how far plans of its kind were off; other reports say nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_memprof.accuracy.spread import ErrorSpread
from vllm_memprof.cli.show import draw
from vllm_memprof.report.documents import report as document
from vllm_memprof.sources import read_report

DATA = Path(__file__).parents[2] / "data"
SPREAD = ErrorSpread("E4", "ascend910b", 12, -332_859_596, 53_687_091, 687_194_767)
SAID = "on 12 published runs of this kind the error was -0.31 to +0.64 GiB, median +0.05"


def drawn(name, monkeypatch, spread, lang="en"):
    asked = []
    monkeypatch.setattr(document, "spread_of", lambda *kind: asked.append(kind) or spread)
    text = draw(read_report(str(DATA / name)), "markdown", lang=lang)
    return " ".join(text.split()), asked


def test_a_plan_has_the_spread_of_its_device_and_equation(monkeypatch):
    text, asked = drawn("plan_tp2", monkeypatch, SPREAD)
    assert SAID in text
    assert asked == [("E4", "ascend910b")]


def test_nothing_is_said_without_enough_runs(monkeypatch):
    text, _ = drawn("plan_tp2", monkeypatch, None)
    assert "published runs" not in text


@pytest.mark.parametrize("name", ["recorded_tp2", "eager_tp2"])
def test_a_run_has_no_spread(name, monkeypatch):
    text, asked = drawn(name, monkeypatch, SPREAD)
    assert "published runs" not in text
    assert asked == []


def test_in_chinese(monkeypatch):
    text, _ = drawn("plan_tp2", monkeypatch, SPREAD, "zh")
    assert "在 12 次同类的公开运行上，误差为 -0.31 至 +0.64 GiB" in text
