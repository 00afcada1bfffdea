"""Every command that README and docs show, with its options.

It is run where no engine is needed; its options are read where one is. A command that is in neither
class fails here, so that none is passed over.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.support.host_runs import write_hosts
from vllm_memprof.cli import app
from vllm_memprof.cli.arguments import ENGINE_ARGS

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "vllm_memprof").rglob("*.md")),
]

#: Commands of memprof that need an engine, or its stack -> the integration test that runs them.
NEED_ENGINE = {
    "offline": "test_offline.py",
    "plan": "test_offline.py",
    "fit": "test_plans.py",
    "share": "test_share.py",
    "sweep": "test_plans.py",
    "serve": "test_serve.py",
    "sim setup": "test_stacks.py",
    "who": "test_who.py",
}
#: Commands that are run here.
NEED_NOTHING = ("attach", "explain", "report", "diff", "check", "doctor", "sim list", "sim stop")
#: What else the pages show, as a whole: how it is tested, or why not.
OTHERS = {
    "memprof sim run --report --dummy-weights pytest --import-mode=append "
    "tests/e2e/pull_request/one_card/test_multi_instance.py": "of a checkout of vllm-ascend",
    "export PYTHONSAFEPATH=1": "for the line below it",
    "python3 -m venv .venv && .venv/bin/pip install .": "a part of make test's own set-up",
    'python -m pip install "$MEMPROF"': "the same from a wheel",
}
#: Arguments of the engine that the pages use; those of memprof are read by memprof itself.
ENGINE_OPTIONS = {
    "-tp",
    "--port",
    "--max-model-len",
    "--prompt",
    "--enforce-eager",
    "--gpu-memory-utilization",
    "--quantization",
}

#: Names that the pages use -> what stands in for them, below tests/data.
STANDS_FOR = {
    "engine.log": "logs/recorded_tp2_0.23.0.log",
    "reports/old": "recorded_013_tp2",
    "reports/new": "recorded_023_tp2",
    "reports/guard": "plan_tp2",
    "reports/20261121-101530-Qwen3-14B": "graph_tp2",
    "baseline": "plan_tp2",
    "tests/data": ".",
}


@dataclass(frozen=True)
class Block:
    """One block of commands of a page."""

    page: str
    number: int
    commands: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}:{self.number}"


def blocks() -> list[Block]:
    """Blocks marked console, bash, sh or shell, and the commands of a workflow in a yaml block."""
    found = []
    for page in PAGES:
        for number, match in enumerate(
            re.finditer(r"^```(\w*)\n(.*?)^```", page.read_text(), re.M | re.S), start=1
        ):
            language, text = match[1], match[2].replace("\\\n", "")
            if language in ("console", "bash", "sh", "shell"):
                lines = [
                    line
                    for line in text.splitlines()
                    if line.startswith("$ ") or language != "console"
                ]
                commands = [line.removeprefix("$ ") for line in lines]
            elif language == "yaml":
                folded = re.findall(r"run: >\n((?: {10}.*\n)+)", text)
                commands = [" ".join(lines.split()) for lines in folded]
                commands += re.findall(r"run: (?!>)(.*)", text)
            else:
                commands = [
                    line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ ")
                ]
            commands = [command for command in map(without_remark, commands) if command]
            if commands:
                found.append(Block(str(page.relative_to(ROOT)), number, tuple(commands)))
    return found


def without_remark(command: str) -> str:
    return re.split(r"\s+# ", command.strip())[0].strip()


def kind_of(command: str) -> str:
    """``run``, ``engine``, ``make`` or ``other``.

    Raises:
        LookupError: none of them.
    """
    if command in OTHERS:
        return "other"
    words = command.split()
    if words[0] == "make":
        return "make"
    if words[0] == "memprof":
        for length in (2, 1):
            name = " ".join(words[1 : 1 + length])
            if name in NEED_NOTHING:
                return "run"
            if name in NEED_ENGINE:
                return "engine"
    raise LookupError(f"no test knows what to do with: {command}")


BLOCKS = blocks()


def test_the_pages_have_blocks() -> None:
    assert len(BLOCKS) > 12
    assert {block.page for block in BLOCKS} >= {"README.md", "docs/ci.md", "docs/concepts/diff.md"}


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_command_is_of_a_known_kind(block: Block) -> None:
    for command in block.commands:
        kind_of(command)


@pytest.mark.parametrize("command", ["memprof frobnicate", "curl example.org", "memprof"])
def test_a_command_of_no_kind_is_found_out(command: str) -> None:
    with pytest.raises(LookupError, match="no test knows"):
        kind_of(command)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder in which the names that the pages use are there."""
    for name, source in STANDS_FOR.items():
        if source != ".":
            copy(DATA / source, tmp_path / name)
    copy(
        DATA / "logs" / "two_methods_910b_tp2.md",
        tmp_path / "tests/data/logs/two_methods_910b_tp2.md",
    )
    for name in ("runs", "before", "after"):
        write_hosts(tmp_path / name)
    memprof(["report", "baseline", "--format", "json", "-o", "baseline/report.json"], tmp_path)
    return tmp_path


def copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy(source, target)


def memprof(arguments: list[str], folder: Path, stdin: Any = None) -> None:
    env = {
        **os.environ,
        "NO_COLOR": "1",
        "PYTHONPATH": str(ROOT),
        "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "vllm_memprof", *arguments],
        cwd=folder,
        env=env,
        stdin=stdin or subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (
        f"memprof {shlex.join(arguments)}\n{done.stdout[-2000:]}\n{done.stderr}"
    )
    written = [arguments[i + 1] for i, word in enumerate(arguments) if word in ("-o", "--junit")]
    assert done.stdout.strip() or written, "it printed nothing, and wrote no file"
    for name in written:
        assert (folder / name).stat().st_size > 0


def run_here(command: str, folder: Path) -> None:
    line, _, source = command.partition(" < ")
    arguments = shlex.split(line)[1:]
    if "--budget" in arguments and not (folder / "budget.toml").exists():
        run = arguments[1]  # the page that shows the budget file has made it before
        memprof(["check", run, "--init", "-o", "budget.toml"], folder)
        if "--baseline" in arguments:
            with (folder / "budget.toml").open("a") as budget:
                budget.write('[regression]\nmax_kv_cache_drop = "1%"\n')
    if source:
        with (folder / source).open() as stream:
            memprof(arguments, folder, stream)
    else:
        memprof(arguments, folder)


@pytest.mark.parametrize(
    "block",
    [b for b in BLOCKS if any(kind_of(command) == "run" for command in b.commands)],
    ids=str,
)
def test_what_needs_no_engine_runs(block: Block, place: Path) -> None:
    for command in block.commands:
        if kind_of(command) == "run":
            run_here(command, place)


ENGINE_COMMANDS = sorted({c for block in BLOCKS for c in block.commands if kind_of(c) == "engine"})


@pytest.mark.parametrize("command", ENGINE_COMMANDS)
def test_options_of_what_needs_an_engine_are_read(command: str) -> None:
    words = shlex.split(command.replace('"$STACK"', "vllm-ascend-0.23.0"))[1:]
    name, rest = (" ".join(words[:2]), words[2:]) if words[0] == "sim" else (words[0], words[1:])
    found: Any = typer.main.get_command(app)
    for part in name.split():
        found = found.get_command(typer.Context(found), part)
    context = found.make_context(name, rest)
    for_engine = [
        word.partition("=")[0] for word in context.meta.get(ENGINE_ARGS, []) if word.startswith("-")
    ]
    assert set(for_engine) <= ENGINE_OPTIONS, (
        "not an option of memprof, and not one of vLLM that is known here"
    )
    device = context.params.get("device")
    if device is not None:
        from vllm_memprof.launch.request import parse_device

        parse_device(device)


@pytest.mark.parametrize("name", sorted(NEED_ENGINE))
def test_what_needs_an_engine_is_run_by_a_test_of_the_engine(name: str) -> None:
    text = (ROOT / "tests" / "integration" / NEED_ENGINE[name]).read_text()
    assert f'"{name}"' in text or "require_stack(" in text


def test_make_targets_are_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    shown = {c.split()[1] for block in BLOCKS for c in block.commands if kind_of(c) == "make"}
    assert shown
    assert shown <= targets
