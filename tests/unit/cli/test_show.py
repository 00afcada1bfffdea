"""Tables that go into a pipe or a file: 120 characters wide, no colour, no blanks at the ends of lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.cells import cell_len
from typer.testing import CliRunner

from vllm_memprof.cli.commands import check, diff, report

DATA = Path(__file__).parents[2] / "data"
OLD, NEW, BUDGET = (
    str(DATA / name) for name in ("recorded_013_tp2", "recorded_023_tp2", "budgets/passed.toml")
)


@pytest.mark.parametrize("into", ["pipe", "file"])
@pytest.mark.parametrize(
    ("app", "arguments"),
    [
        (report.app, [OLD]),
        (report.app, [OLD, "--lang", "zh"]),
        (diff.app, [OLD, NEW]),
        (check.app, [NEW, "--budget", BUDGET]),
    ],
    ids=["report", "report in Chinese", "diff", "check"],
)
def test_tables_without_a_terminal(into: str, app, arguments: list[str], tmp_path: Path) -> None:
    target = tmp_path / "report.txt"
    done = CliRunner().invoke(app, [*arguments, *(["-o", str(target)] if into == "file" else [])])
    assert done.exit_code in (0, 1), done.exception
    text = target.read_text() if into == "file" else done.stdout
    lines = text.removesuffix("\n").split("\n")
    assert len(lines) > 10
    assert lines == [line.rstrip() for line in lines]
    assert 100 < max(map(cell_len, lines)) <= 120
    assert "\x1b" not in text
