"""docs/ci.md: its job is valid, its commands and keys exist, its budget file is read."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from vllm_memprof.check.budget_file import parse_budget
from vllm_memprof.check.limits import BUDGET, KEYS, REGRESSION
from vllm_memprof.cli.commands import check

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "ci.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def job() -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load(blocks("yaml")[0])
    return data["jobs"]["kv-cache"]


def action() -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load((DOCS.parent / "action.yml").read_text())
    return data


def commands() -> list[list[str]]:
    """Every memprof command of the page and of the action, as words."""
    typed = [line[2:] for block in blocks("console") for line in block.splitlines()]
    for step in action()["runs"]["steps"]:
        lines = step.get("run", "").replace("\\\n", " ").splitlines()
        typed += [line.strip() for line in lines if line.strip().startswith("memprof ")]
    return [shlex.split(re.split(r" >+ | -- ", line)[0], comments=True) for line in typed]


def test_the_job_gives_what_the_action_takes() -> None:
    (step,) = [each for each in job()["steps"] if "with" in each]
    assert set(step["with"]) <= set(action()["inputs"])
    assert all(each.get("description") for each in action()["inputs"].values())


def test_the_action_plans_and_checks_the_same_run_and_evaluates_no_input() -> None:
    steps = action()["runs"]["steps"]
    assert all(("run" in step) != ("uses" in step) for step in steps)
    plan, check = commands()[-4], commands()[-1]
    assert plan[:2] == ["memprof", "plan"]
    assert check[:2] == ["memprof", "check"]
    assert plan[plan.index("--run-dir") + 1] == check[2]
    assert action()["outputs"]["report"]["value"] == f"{check[2]}/report.json"
    cache = next(step["with"] for step in steps if step.get("uses", "").startswith("actions/cache"))
    assert cache["path"] == "~/.cache/memprof"
    # an expression inside of a script would be run as a part of it
    assert not [step for step in steps if "${{" in step.get("run", "")]


def test_the_hook_of_the_page_is_there_and_its_command_is_read() -> None:
    (hook,) = yaml.safe_load((DOCS.parent / ".pre-commit-hooks.yaml").read_text())
    (repo,) = yaml.safe_load(blocks("yaml")[1])["repos"]
    (used,) = repo["hooks"]
    assert used["id"] == hook["id"]
    assert re.search(hook["files"], "serving/qwen3.yaml")
    assert not re.search(hook["files"], "docs/serving.yaml")
    words = [*shlex.split(hook["entry"]), *used["args"], "serving/a.yaml", "serving/b.yml"]
    assert words[:2] == ["memprof", "check"]
    options = typer.main.get_command(check.app).make_context("check", words[2:]).params
    assert options["run"] == ["serving/a.yaml", "serving/b.yml"]
    assert (options["plan"], options["min_kv_cache"]) == ("sim:910b", "40GiB")


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_commands_have_the_options_that_the_page_uses(command: list[str]) -> None:
    assert command[0] == "memprof"
    pages = (f"{command[1]}.md", "README.md")  # that of the command, and the options of several
    known = "".join((DOCS / "commands" / page).read_text() for page in pages)
    engine = {"--max-model-len", "-c"}  # of the engine, of bash
    for word in command[2:]:
        if word.startswith("-") and word not in engine:
            assert re.search(rf"{re.escape(word)}\b", known), word


def test_the_budget_of_the_page_is_read() -> None:
    (text,) = blocks("toml")
    assert len(parse_budget(text, "ci.md").limits) == 6


def test_the_page_lists_every_key() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert listed == [key.name for key in KEYS if key.table == BUDGET]
    named = set(re.findall(r"`(max_\w+_(?:drop|growth))`", PAGE))
    assert named == {key.name for key in KEYS if key.table == REGRESSION}
