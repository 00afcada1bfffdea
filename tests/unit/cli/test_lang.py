"""``--lang zh`` of ``memprof report`` and ``memprof explain``."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_memprof.cli.commands.explain import app as explain
from vllm_memprof.cli.commands.report import app as report
from vllm_memprof.errors import UsageError

DATA = Path(__file__).parents[2] / "data"


@pytest.mark.parametrize("format_name", ["table", "markdown"])
def test_a_report_in_chinese(format_name: str) -> None:
    done = CliRunner().invoke(
        report, [str(DATA / "graph_tp2"), "--full", "--format", format_name, "--lang", "zh"]
    )
    assert done.exit_code == 0
    for text in ("重算，与引擎完全一致", "KV cache 计算公式 E4", "激活峰值", "诊断结果："):
        assert text in done.stdout
    for text in ("verdict", "peak activation", "Findings", "Try:"):
        assert text not in done.stdout


def test_several_starts_of_a_log_in_chinese() -> None:
    log = str(DATA / "logs" / "two_methods_910b_tp2.md")
    done = CliRunner().invoke(explain, [log, "--full", "--format", "markdown", "--lang", "zh"])
    assert done.exit_code == 0
    assert done.stdout.startswith("## 共 5 次引擎启动\n")
    assert "按公式 E2" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--lang", "fr"], "--lang 'fr' is not known"),
        (["--lang", "zh", "--format", "json"], "--lang zh is not there for --format json"),
        (["--lang", "zh", "--format", "csv"], "--lang zh is not there for --format csv"),
    ],
)
def test_what_there_is_in_english_alone(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(report, [str(DATA / "graph_tp2"), *arguments])
    assert isinstance(done.exception, UsageError)
    assert said in str(done.exception)
    assert done.stdout == ""
