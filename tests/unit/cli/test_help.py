"""Help that fits a screen: the overview, and each command with examples that are read."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from vllm_memprof.cli import app, main
from vllm_memprof.cli.help import COMMANDS, EVERY
from vllm_memprof.errors import UsageError


def lines_of(*args: str) -> list[str]:
    done = CliRunner().invoke(app, [*args], prog_name="memprof", env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    return done.output.splitlines()


def test_the_overview_is_one_screen_with_every_command_whole() -> None:
    lines = lines_of("--help")
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 80
    for name, row in COMMANDS.items():
        assert any(line[8:].split()[:1] == [name] and row.summary in line for line in lines)


@pytest.mark.parametrize("name", EVERY)
def test_the_help_of_a_command_begins_with_two_examples_and_fits(name: str) -> None:
    lines = lines_of(*name.split(), "--help")
    assert lines[:2] == [f"memprof {example}" for example in EVERY[name].examples]
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 80
    shown = [line for line in lines if line.startswith("  -") and "--help" not in line]
    assert len(shown) <= 12


@pytest.mark.parametrize("name", [name for name in EVERY if EVERY[name].options])
def test_the_options_that_matter_are_there_and_the_others_one_word_away(name: str) -> None:
    short, whole = lines_of(*name.split(), "--help"), lines_of(*name.split(), "--help-all")
    for option in EVERY[name].options:
        assert any(option in line.split() for line in short), option
    assert any("--help-all" in line for line in short)
    assert len(whole) > len(short)


@pytest.mark.parametrize(
    "example", sorted({each for row in EVERY.values() for each in row.examples})
)
def test_examples_are_read(example: str) -> None:
    """Every word is an option or argument of the command, or one of the engine."""
    found: Any = typer.main.get_command(app)
    words = shlex.split(example)
    context = typer.Context(found, info_name="memprof")
    while hasattr(found, "get_command"):
        found = found.get_command(context, words.pop(0))
    context = found.make_context(example.split()[0], words)
    engine = context.meta.get("vllm_memprof.engine_args", [])
    assert set(engine) <= {"-tp", "2", "--max-model-len", "32768"}


def test_a_misspelt_command_is_answered_with_the_nearest(capsys: Any) -> None:
    assert main(["explian", "a.log"]) == 2
    assert "did you mean explain" in capsys.readouterr().err
    assert main(["xyz"]) == 2
    assert "try: memprof --help" in capsys.readouterr().err


def test_an_unknown_command_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="there is no command 'xyz'"):
        app(["xyz"], prog_name="memprof")
