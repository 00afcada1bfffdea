"""What is shipped: the wheel, the source distribution, and what hints say to install or to run."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import typer

from vllm_memprof.cli import app
from vllm_memprof.version import __version__, pip_install

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "vllm_memprof"
LOG = ROOT / "tests/data/logs/recorded_tp2_0.23.0.log"
_PYTHONS = ("3.10", "3.11", "3.12")


def build(folder: Path) -> dict[str, bytes]:
    """Build both as `make dist` does; return the content of each by its name."""
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_twice_built_is_equal_and_has_every_file_of_the_package(tmp_path: Path) -> None:
    one, other = build(tmp_path / "one"), build(tmp_path / "other")
    assert one == other
    assert sorted(one) == sorted(
        [f"vllm_memprof-{__version__}-py3-none-any.whl", f"vllm_memprof-{__version__}.tar.gz"]
    )
    listed = subprocess.run(
        ["git", "ls-files", "vllm_memprof"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    with zipfile.ZipFile(next((tmp_path / "one").glob("*.whl"))) as wheel:
        held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    hidden = {name for name in listed if Path(name).name == ".gitignore"}
    assert held == {*listed, "vllm_memprof/report/glossary.md"} - hidden


def interpreter(version: str) -> str | None:
    """Return that release of Python; None where it is not on this machine."""
    for name in (f"python{version}", *Path.home().glob(f".pyenv/versions/{version}.*/bin/python")):
        try:
            subprocess.run([name, "-c", ""], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return str(name)
    return None


@pytest.mark.full
@pytest.mark.parametrize("version", _PYTHONS)
def test_the_wheel_alone_in_an_empty_folder(version: str, tmp_path: Path) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    build(tmp_path / "dist")
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    empty = tmp_path / "empty"
    empty.mkdir()
    subprocess.run([python, "-m", "venv", str(tmp_path / "venv")], check=True)
    own = tmp_path / "venv/bin"
    subprocess.run([own / "pip", "install", "-q", str(wheel)], check=True, cwd=empty)

    def memprof(*words: str) -> subprocess.CompletedProcess[str]:
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [str(own / "memprof"), *words]
        return subprocess.run(command, cwd=empty, env=env, capture_output=True, text=True)

    assert memprof("--version").stdout.split()[-1] == __version__
    explained = memprof("explain", str(LOG), "--format", "json")
    assert explained.returncode in (0, 1), explained.stderr
    (empty / "report.json").write_text(explained.stdout)
    told = json.loads(explained.stdout)
    assert told["ranks"][0]["budget"]["engine_kv_cache_bytes"]
    assert "KV cache" in memprof("report", "report.json", "--format", "markdown").stdout
    (empty / "budget.toml").write_text('[budget]\nmin_kv_cache = "1GiB"\n')
    checked = memprof("check", "report.json", "--budget", "budget.toml")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "memprof" in memprof("doctor").stdout
    # installed for an engine's interpreter the same way
    code = "from vllm_memprof.version import pip_install as p; print(p(python='PY'))"
    said = subprocess.run([own / "python", "-c", code], capture_output=True, text=True, cwd=empty)
    assert said.stdout.strip() == f"PY -m pip install file://{wheel}"


def texts() -> list[tuple[str, str]]:
    """Return every text of the package's code and data, with its file."""
    found = []
    for path in sorted(PACKAGE.rglob("*")):
        name = str(path.relative_to(PACKAGE))
        if path.suffix == ".py":
            tree = ast.parse(path.read_text())
            found += [
                (name, node.value)
                for node in ast.walk(tree)
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            ]
        elif path.suffix in (".toml", ".json") and "presets" not in name:
            found.append((name, path.read_text()))
    return found


def test_commands_that_texts_name_exist_with_their_options() -> None:
    seen, wrong = set(), []
    for name, text in texts():
        for said in re.findall(r"`memprof ([^`{]+)`", text):
            words = shlex.split(said)
            found: Any = typer.main.get_command(app)
            while words and hasattr(found, "get_command"):
                inner = found.get_command(typer.Context(found), words[0])
                if inner is None:
                    break
                seen.add(words.pop(0))
                found = inner
            options = {"--help", *(each for one in found.params for each in one.opts)}
            unknown = [word for word in words if word.startswith("-") and word not in options]
            if unknown or (hasattr(found, "get_command") and words not in ([], ["--help"])):
                wrong.append((name, said))
    assert not wrong
    assert {"doctor", "plan", "explain", "list"} <= seen


def test_no_text_installs_from_an_index_that_lacks_it() -> None:
    # what hints install is given by `pip_install`, which says where this memprof came from
    wrong = [
        (name, text) for name, text in texts() if re.search(r"pip install '?vllm-memprof", text)
    ]
    assert not wrong


@pytest.mark.full
@pytest.mark.parametrize("packages", [("ray",), ("prometheus_client",), ("zstandard",), ()])
def test_what_hints_install_can_be_installed(packages: tuple[str, ...], tmp_path: Path) -> None:
    options = ["--no-deps", "--dry-run", "--ignore-installed", "--quiet"]
    command = [*shlex.split(pip_install(*packages)), *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the container recipe, their lines joined: name and rest."""
    text = re.sub(r"(?m)^#.*\n", "", (ROOT / "Containerfile").read_text()).replace("\\\n", " ")
    return [(words[0], words[1]) for line in text.splitlines() if (words := line.split(None, 1))]


def test_the_container_recipe_is_sound() -> None:
    known = {"ARG", "FROM", "RUN", "COPY", "ENV", "WORKDIR", "ENTRYPOINT"}
    assert {name for name, _ in instructions()} <= known
    stages = [rest.split(" AS ")[1] for name, rest in instructions() if name == "FROM"]
    assert stages == ["simulated", "npu"]
    for name, rest in instructions():
        if name == "RUN":
            subprocess.run(["bash", "-nc", rest], check=True)
        elif name == "ENTRYPOINT":
            assert json.loads(rest) == ["memprof"]
    runs = " ".join(rest for name, rest in instructions() if name == "RUN")
    assert runs.count("pip install") == runs.count("--no-cache-dir") == 2


@pytest.mark.full
def test_what_the_recipe_installs_works_in_a_clean_folder(tmp_path: Path) -> None:
    """Without a container engine: its lines of pip, with a copy of the project as /src."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    for name in filter(None, listed):
        target = tmp_path / "src" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    env = {**os.environ, "PATH": f"{tmp_path / 'venv/bin'}:{os.environ['PATH']}"}
    (line,) = [
        rest for name, rest in instructions() if name == "RUN" and rest.startswith("pip install")
    ]
    command = line.replace("/src", str(tmp_path / "src"))
    subprocess.run(["bash", "-ec", command], check=True, env=env, cwd=tmp_path)
    assert not (tmp_path / "src").exists()
    said = subprocess.run(
        ["memprof", "sim", "list"], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert "vllm-ascend-0.23.0" in said.stdout
