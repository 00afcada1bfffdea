"""``memprof sim setup`` without a network, a compiler or a device: what runs, what is kept, what is
said."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from unittest import mock

import pytest
from msgspec.structs import replace

from tests.support.stacks import version_of
from vllm_memprof.errors import SetupError, UsageError
from vllm_memprof.sim import runtime, setup
from vllm_memprof.sim.extensions import Target
from vllm_memprof.sim.setup import (
    SetupProgress,
    add_extra,
    download_stack,
    run_command,
    tail_of,
)
from vllm_memprof.sim.stacks import default_prefix, load_stack

FACTS = 'MEMPROF {"device_total_bytes": 65452113920}'


class FakeMachine:
    """Answers commands as python -m venv, pip and the verification would; installs by making
    metadata folders."""

    def __init__(self, prefix: Path) -> None:
        self.site_packages = prefix / "lib" / "python3.11" / "site-packages"
        self.prefix = prefix
        self.commands: list[list[str]] = []
        self.asked: list[str] = []
        self.pip_fails_at = ""
        self.interrupt_at = ""
        self.verify_fails = 0

    def __call__(self, command, env, listen):
        self.commands.append(command)
        if "venv" in command:
            self.site_packages.mkdir(parents=True, exist_ok=True)
            (self.prefix / "pyvenv.cfg").write_text("")
            (self.prefix / "bin").mkdir(exist_ok=True)
            (self.prefix / "bin" / "python").write_text("")
        elif "install" in command:
            return self.install(command, listen)
        elif any(word.endswith("verify.py") for word in command):
            listen("AssertionError: no" if self.verify_fails else FACTS)
            return self.verify_fails
        return 0

    def install(self, command, listen):
        lines = Path(command[command.index("-r") + 1]).read_text().splitlines()
        self.asked += lines
        for pin in (line.split()[0] for line in lines):
            name, version = pin.split("==")
            listen(f"Collecting {pin}")
            if name == self.interrupt_at:
                (self.site_packages / f"{name}-{version}.dist-info").mkdir()  # torn: no INSTALLER
                raise KeyboardInterrupt
            if name == self.pip_fails_at:
                listen("WARNING: Location 'somewhere' is ignored")
                listen(f"ERROR: Could not find a version that satisfies the requirement {pin}")
                listen(f"ERROR: No matching distribution found for {pin}")
                return 1
            folder = self.site_packages / f"{name.replace('-', '_')}-{version}.dist-info"
            folder.mkdir()
            (folder / "INSTALLER").write_text("pip")
        return 0

    @property
    def installed(self) -> list[str]:
        return [" ".join(command) for command in self.commands if "install" in command]


def setup_stack(name, prefix, progress=None, *, run, **options):
    """Set up a stack on a machine whose commands ``run`` answers."""
    with mock.patch.object(setup, "run_command", run):
        return setup.setup_stack(name, prefix, progress, **options)


class Recorder(SetupProgress):
    def __init__(self) -> None:
        self.steps: list[str] = []
        self.details: list[str] = []

    def step(self, number, total, title):
        self.steps.append(title)

    def detail(self, text):
        self.details.append(text)


@pytest.fixture
def prefix(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMPROF_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(setup, "check_platform", lambda: None)
    monkeypatch.setattr(setup, "find_compiler", lambda: ["g++"])
    monkeypatch.setattr(setup, "find_python", lambda version: "/usr/bin/python3.11")
    monkeypatch.setattr(setup, "build_left_out", lambda *args: set())
    monkeypatch.setattr(setup, "build_shim", lambda *args: None)
    monkeypatch.setattr(setup.shutil, "which", lambda name, **_: f"/usr/bin/{name}")
    monkeypatch.setattr(
        setup.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1 << 40})()
    )
    return tmp_path / "stack"


def test_a_first_setup_and_a_second(prefix):
    machine, recorder = FakeMachine(prefix), Recorder()
    result = setup_stack(None, prefix, recorder, run=machine)
    assert result.changed
    assert result.facts == {"device_total_bytes": 65452113920}
    stack = load_stack()
    assert len(machine.installed) == len(stack.chunks) + len(stack.builds)
    assert all("--no-deps" in command for command in machine.installed)
    assert all("--require-hashes" in command for command in machine.installed)
    assert all(" --hash=sha256:" in line for line in machine.asked)
    assert recorder.steps[0] == "check this machine; at most 1.2 GiB will be downloaded"
    assert "--no-build-isolation" in machine.installed[-1]
    assert runtime.stack_state(stack, prefix) == "ready"
    assert len(list((prefix / "profiles").glob("ascend910b-*.txt"))) == 1
    machine.commands.clear()
    again = setup_stack(None, prefix, run=machine)
    assert not again.changed
    assert machine.commands == []
    assert again.seconds < 1


def test_a_prefix_of_the_users_choice_is_found_again(prefix, tmp_path):
    usual = tmp_path / "cache" / "stacks" / "vllm-ascend-0.23.0"
    assert default_prefix("vllm-ascend-0.23.0") == usual
    setup_stack(None, prefix, run=FakeMachine(prefix))
    assert runtime.prepare_runtime("910b").python == prefix / "bin" / "python"
    assert not setup_stack(None, None, run=FakeMachine(prefix)).changed
    setup_stack(None, usual, run=FakeMachine(usual))  # back to the usual place
    assert runtime.prepare_runtime("910b").python == usual / "bin" / "python"


def test_a_failed_download_names_the_package_and_is_resumed(prefix):
    machine = FakeMachine(prefix)
    machine.pip_fails_at = "torchvision"
    with pytest.raises(SetupError) as caught:
        setup_stack(None, prefix, run=machine)
    assert "torchvision==0.25.0" in caught.value.message
    assert "No matching distribution" in caught.value.message
    assert "WARNING" not in caught.value.message
    assert "memprof sim setup" in (caught.value.hint or "")
    assert runtime.stack_state(load_stack(), prefix) == "incomplete"
    machine.pip_fails_at = ""
    machine.commands.clear()
    assert setup_stack(None, prefix, run=machine).changed
    assert (
        len(machine.installed) == len(load_stack().chunks) - 2 + 1
    )  # the first two chunks are kept


def test_an_interruption_is_resumed_and_torn_packages_are_installed_anew(prefix):
    machine = FakeMachine(prefix)
    machine.interrupt_at = "sympy"
    with pytest.raises(SetupError, match="interrupted") as caught:
        setup_stack(None, prefix, run=machine)
    assert f"--prefix {prefix}" in (caught.value.hint or "")
    assert caught.value.exit_code == 130
    machine.interrupt_at = ""
    setup_stack(None, prefix, run=machine)
    folder = next(machine.site_packages.glob("sympy-*.dist-info"))
    assert (folder / "INSTALLER").is_file()


def test_a_failed_verification_leaves_no_stamp(prefix):
    machine = FakeMachine(prefix)
    machine.verify_fails = 1
    with pytest.raises(
        SetupError, match="does not work on the simulated device:\n  AssertionError: no"
    ):
        setup_stack(None, prefix, run=machine)
    assert runtime.read_stamp(prefix) is None


def test_a_verification_that_takes_too_long_says_so(prefix):
    machine = FakeMachine(prefix)
    machine.verify_fails = 124  # of timeout(1)
    with pytest.raises(
        SetupError, match=r"did not end within 900.0 s; its last lines:\n  AssertionError: no"
    ):
        setup_stack(None, prefix, run=machine)


def test_force_builds_and_verifies_but_keeps_packages(prefix):
    machine = FakeMachine(prefix)
    setup_stack(None, prefix, run=machine)
    machine.commands.clear()
    assert setup_stack(None, prefix, run=machine, force=True).changed
    assert machine.installed == []
    assert any("verify.py" in " ".join(command) for command in machine.commands)


def test_other_sources_of_the_device_ask_for_a_setup(prefix, monkeypatch):
    machine = FakeMachine(prefix)
    setup_stack(None, prefix, run=machine)
    monkeypatch.setattr(runtime, "LAYOUT", runtime.LAYOUT + 1)
    assert runtime.stack_state(load_stack(), prefix) == "outdated"
    with pytest.raises(SetupError, match="needs an update") as caught:
        runtime.prepare_runtime("910b")
    assert caught.value.hint == "memprof sim setup --stack vllm-ascend-0.23.0"


def test_no_room(prefix, monkeypatch):
    monkeypatch.setattr(
        setup.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1 << 30})()
    )
    machine = FakeMachine(prefix)
    with pytest.raises(SetupError, match=r"not enough disk space .* GiB needed, 1\.0 GiB free"):
        setup_stack(None, prefix, run=machine)
    assert machine.commands == []


def test_a_second_setup_waits_for_the_first(prefix, monkeypatch):
    machine, other, recorder = FakeMachine(prefix), FakeMachine(prefix), Recorder()
    inside, go_on = threading.Event(), threading.Event()

    def slow(command, env, listen):
        inside.set()
        assert go_on.wait(20)
        return machine(command, env, listen)

    monkeypatch.setattr(setup, "run_command", slow)
    first = threading.Thread(target=setup.setup_stack, args=(None, prefix))
    first.start()
    assert inside.wait(20)
    monkeypatch.setattr(setup, "run_command", other)
    results = []
    second = threading.Thread(
        target=lambda: results.append(setup.setup_stack(None, prefix, recorder))
    )
    second.start()
    while not any("another setup" in text for text in recorder.details):
        time.sleep(0.01)
    go_on.set()
    first.join(20)
    second.join(20)
    assert not results[0].changed
    assert other.commands == []


@pytest.mark.parametrize(
    ("system", "machine"), [("Darwin", "arm64"), ("Linux", "riscv64"), ("Windows", "AMD64")]
)
def test_the_wrong_platform(monkeypatch, system, machine):
    monkeypatch.setattr(setup.platform, "system", lambda: system)
    monkeypatch.setattr(setup.platform, "machine", lambda: machine)
    with pytest.raises(SetupError, match=f"this is {system} {machine}"):
        setup.check_platform()


@pytest.mark.parametrize(("library", "version"), [("glibc", "2.31"), ("", "")])
def test_an_old_or_foreign_c_library(monkeypatch, library, version):
    monkeypatch.setattr(setup.platform, "system", lambda: "Linux")
    monkeypatch.setattr(setup.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(setup.platform, "libc_ver", lambda: (library, version))
    with pytest.raises(SetupError, match=r"need glibc 2\.34"):
        setup.check_platform()


def test_no_python(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(SetupError, match=r"needs Python 2\.99") as caught:
        setup.find_python("2.99")
    assert "pyenv install 2.99" in (caught.value.hint or "")


def test_a_python_that_is_another_version_is_not_taken(monkeypatch, tmp_path):
    (tmp_path / "python9.9").write_text("#!/bin/sh\necho 3.4\n")
    (tmp_path / "python9.9").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    with pytest.raises(SetupError):
        setup.find_python("9.9")


def test_no_compiler(prefix, monkeypatch):
    def missing():
        raise SetupError("no C++ compiler was found (g++ or clang++)")

    monkeypatch.setattr(setup, "find_compiler", missing)
    with pytest.raises(SetupError, match=r"no C\+\+ compiler"):
        setup_stack(None, prefix, run=FakeMachine(prefix))


def test_no_binutils(prefix, monkeypatch):
    monkeypatch.setattr(setup.shutil, "which", lambda name, **_: None)
    with pytest.raises(SetupError, match="readelf was not found") as caught:
        setup_stack(None, prefix, run=FakeMachine(prefix))
    assert caught.value.hint == "install binutils"


def test_run_command_streams_lines_and_gives_the_status():
    lines: list[str] = []
    assert (
        run_command(["sh", "-c", "echo a; echo b >&2; exit 3"], dict(os.environ), lines.append) == 3
    )
    assert sorted(lines) == ["a", "b"]


def test_run_command_ends_its_children_when_interrupted(tmp_path):
    pid_file = tmp_path / "pid"

    def interrupt(line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_command(
            ["sh", "-c", f"sleep 60 & echo $! > {pid_file}; echo go; wait"],
            dict(os.environ),
            interrupt,
        )
    pid = int(pid_file.read_text())
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and Path(f"/proc/{pid}").exists():
        status = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        if status == "Z":
            break
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{pid}").exists()


def test_tail_of_a_traceback_is_its_messages():
    lines = [
        "Traceback (most recent call last):",
        '  File "x.py", line 1',
        "ImportError: libx.so",
        "RuntimeError: no backend",
    ]
    assert tail_of(lines) == "  ImportError: libx.so\n  RuntimeError: no backend"


def test_the_package_folder_holds_this_package_and_its_plugin(tmp_path):
    folder = runtime.link_package(tmp_path)
    assert runtime.link_package(tmp_path) == folder
    assert sorted(re.sub(r"-.*dist", "-VERSION.dist", path.name) for path in folder.iterdir()) == [
        "vllm_memprof",
        "vllm_memprof-VERSION.dist-info",
    ]
    assert (folder / "vllm_memprof").resolve() == runtime.PACKAGE_DIR


def test_the_environment_of_an_engine(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/mine")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/libs")
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/my/cache")
    env = runtime.engine_env(runtime.load_profile("910b"), tmp_path)
    assert env["PYTHONPATH"].split(os.pathsep)[0] == str(runtime.SITE_DIR)
    assert env["PYTHONPATH"].endswith("/mine")
    assert env["LD_LIBRARY_PATH"] == f"{tmp_path}/shim:{tmp_path}/left_out:/libs"
    assert "VLLM_CACHE_ROOT" not in env
    assert "soc_name=Ascend910B3" in Path(env["MEMPROF_SIM_PROFILE"]).read_text()


def installed_versions(home: Path) -> list[str]:
    """Return the versions that torch_npu finds (torch_npu/utils/collect_env.py)."""
    files = [path for path in home.rglob("*") if re.match(r"ascend_.*_install\.info", path.name)]
    lines = (line for path in files for line in path.read_text().splitlines() if "version" in line)
    return [line.split("=")[-1] for line in lines]


@pytest.mark.parametrize("version", ["9.1.0", "8.5.0"])
def test_the_stand_in_cann_has_the_version_of_the_profile(tmp_path, version):
    shipped = runtime.load_profile("910b")
    profile = replace(shipped, device=replace(shipped.device, cann_version=version))
    home = Path(runtime.engine_env(profile, tmp_path)["ASCEND_HOME_PATH"])
    assert installed_versions(home) == [version]
    assert all((home / name).is_dir() for name in ("opp", "runtime", "compiler"))


def test_a_profile_without_a_version_installs_no_cann(tmp_path):
    shipped = runtime.load_profile("910b")
    profile = replace(shipped, device=replace(shipped.device, cann_version=""))
    env = runtime.engine_env(profile, tmp_path)
    assert installed_versions(Path(env["ASCEND_HOME_PATH"])) == []
    assert Path(env["ASCEND_OPP_PATH"]).is_dir()


def test_a_package_of_another_stack_is_linked_and_not_downloaded(prefix):
    """``filelock`` is pinned alike in both; of the other stack's packages it alone is whole."""
    old, new = load_stack("vllm-ascend-0.13.0"), load_stack("vllm-ascend-0.18.0")
    version = version_of(old, "filelock")
    assert version == version_of(new, "filelock")
    machine = FakeMachine(prefix)
    site = default_prefix(old.name) / machine.site_packages.relative_to(prefix)
    metadata = site / f"filelock-{version}.dist-info"
    metadata.mkdir(parents=True)
    (site / "filelock.py").write_text("")
    (metadata / "INSTALLER").write_text("pip")
    empty = "sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU"
    rows = [f"filelock.py,{empty},0", f"{metadata.name}/INSTALLER,,", f"{metadata.name}/RECORD,,"]
    (metadata / "RECORD").write_text("\n".join(rows))
    recorder = Recorder()
    setup_stack(new.name, prefix, recorder, run=machine)
    assert (machine.site_packages / "filelock.py").samefile(site / "filelock.py")
    assert f"sharing filelock with {old.name}" in recorder.details
    count = sum(len(chunk.pins) for chunk in new.chunks)
    pip = [text for text in recorder.details if re.fullmatch(r"\d+ of \d+ packages", text)]
    assert sum(int(text.split()[0]) for text in pip) == count - 1


def test_an_extension_is_compiled_from_the_source_distribution(prefix, monkeypatch):
    stack = load_stack("vllm-ascend-0.30.0rc2")
    machine = FakeMachine(prefix)
    built = []

    def run(command, env, listen):
        if "download" in command:
            folder = Path(command[4].removeprefix("--dest="))
            assert env["SOC_VERSION"]  # pip prepares the metadata
            (folder / "vllm_ascend-0.30.0rc2.tar.gz").write_text("")
        return machine(command, env, listen)

    def build(extension, source, target, compiler):
        built.append(extension.module)
        target.file_of(extension).parent.mkdir(parents=True, exist_ok=True)
        target.file_of(extension).touch()

    target = Target(machine.site_packages, Path("include"), ".so")
    monkeypatch.setattr(setup, "target_of", lambda python: target)
    monkeypatch.setattr(setup, "build_extension", build)
    setup_stack(stack.name, prefix, run=run)
    assert built == ["vllm_ascend.vllm_ascend_C"]
    left = [path.suffix for path in (prefix / "extensions").iterdir()]
    assert left == [".done"]  # sources and objects are removed
    setup_stack(stack.name, prefix, run=run, force=True)
    assert len(built) == 1


def test_packages_that_an_engine_can_do_without_are_added_once(prefix, monkeypatch):
    machine = FakeMachine(prefix)
    result = setup_stack(None, prefix, run=machine)
    recorder = Recorder()
    monkeypatch.setattr(setup, "run_command", machine)
    assert add_extra(result, "ray", recorder)
    assert recorder.steps == ["install Ray"]
    assert [path.name for path in machine.site_packages.glob("ray-*")] == ["ray-2.48.0.dist-info"]
    assert runtime.stack_state(load_stack(), prefix) == "ready"
    machine.commands.clear()
    assert not add_extra(result, "ray", recorder)
    assert machine.commands == []
    with pytest.raises(UsageError, match="nothing named 'rays'") as refused:
        add_extra(result, "rays", recorder)
    assert refused.value.hint == "known: ray, tests"


def toy(folder: Path, name: str = "toy", version: str = "1.0") -> str:
    """Write a wheel; return its hash."""
    info = f"{name}-{version}.dist-info"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def pip_job(offline: Path | None) -> setup._Setup:
    """Return a setup whose pip is the real one, that of the tests."""
    job = setup._Setup(load_stack(), Path("stack"), None, offline)
    job.python = Path(sys.executable)
    return job


def test_a_file_with_another_hash_ends_the_setup(tmp_path):
    digest, wrong = toy(tmp_path), 64 * "0"
    job = pip_job(tmp_path)
    job.pip([f"toy==1.0 --hash=sha256:{digest}"], to=tmp_path / "good")
    assert [path.name for path in (tmp_path / "good").iterdir()] == ["toy-1.0-py3-none-any.whl"]
    with pytest.raises(SetupError) as caught:
        job.pip([f"toy==1.0 --hash=sha256:{wrong}"], to=tmp_path / "bad")
    message = caught.value.message
    assert message.startswith("the file of toy==1.0 is not the one that the lock names:\n")
    assert re.search(rf"Expected sha256 {wrong}\n +Got +{digest}", message)
    assert "as they were published" in (caught.value.hint or "")
    with pytest.raises(SetupError, match="Hashes are required"):
        job.pip(["toy==1.0"], to=tmp_path / "none")


def test_a_folder_that_lacks_a_file_is_named_and_no_index_is_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    digest = toy(tmp_path)
    with pytest.raises(SetupError, match=r"toy==2.0 could not be installed from the fol") as caught:
        pip_job(tmp_path).pip([f"toy==2.0 --hash=sha256:{digest}"], to=tmp_path)
    assert "--stack vllm-ascend-0.23.0" in (caught.value.hint or "")
    assert "--download FOLDER" in (caught.value.hint or "")


def test_no_network(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(SetupError, match=r"the package index was not reached for toy==1") as caught:
        pip_job(None).pip(["toy==1.0 --hash=sha256:00"], to=tmp_path)
    assert "--offline FOLDER here" in (caught.value.hint or "")


def test_a_source_distribution_is_downloaded_without_its_build(tmp_path):
    """Its own backend wants what is not there, and its metadata may have another version."""
    source = tmp_path / "vllm_toy-1.0"
    source.mkdir()
    (source / "setup.py").write_text("import torch")
    backend = '[build-system]\nrequires = []\nbuild-backend = "setuptools.build_meta"\n'
    (source / "pyproject.toml").write_text(backend)
    (source / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: vllm-toy\nVersion: 1.0+empty\n")
    archive = Path(shutil.make_archive(str(source), "gztar", tmp_path, source.name))
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    build = dataclasses.replace(load_stack().builds[0], name="vllm-toy", version="1.0")
    options = ["--no-build-isolation", "--no-binary", build.name]
    env = setup.without_build(tmp_path / "backend", build)
    requirement = f"vllm-toy==1.0 --hash=sha256:{digest}"
    pip_job(tmp_path).pip([requirement], options, env, tmp_path / "to")
    assert (tmp_path / "to/vllm_toy-1.0.tar.gz").is_file()


@pytest.mark.parametrize(("given", "version"), [("0.11.0", "0.11.0"), ("", "0.11.0+empty")])
def test_a_build_keeps_the_version_of_its_archive(tmp_path, given, version):
    """As setup.py of vLLM 0.11 makes its own."""
    (tmp_path / "setuptools_scm.py").write_text("def get_version(write_to): return '0.11.0'\n")
    code = "from setuptools_scm import get_version\nnumber = get_version(write_to='')\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}number += '+empty'\nprint(number)"],
        env={
            "PYTHONPATH": f"{setup.VERIFY_SCRIPT.parent}:{tmp_path}",
            "VLLM_VERSION_OVERRIDE": given,
        },
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"{version}\n", done.stderr


def test_a_folder_is_filled_for_another_machine(prefix, tmp_path, monkeypatch):
    asked: list[tuple[str, str]] = []

    def run(command, env, listen):
        if "download" in command:
            text = Path(command[command.index("-r") + 1]).read_text()
            asked.append((" ".join(command), text))
        return 0

    monkeypatch.setattr(setup, "run_command", run)
    download_stack(None, tmp_path / "files", "aarch64", ["ray"])
    stack = load_stack()
    assert len(asked) == len(stack.chunks) + 1 + len(stack.builds)
    wheels, source = asked[:-1], asked[-1]
    assert all("--platform=manylinux_2_34_aarch64" in command for command, _ in wheels)
    assert wheels[-1][1].startswith("ray==2.48.0 --hash=")
    assert "--no-binary vllm" in source[0]
    assert source[1].startswith("vllm==0.23.0 ")
    assert all(f"--dest={tmp_path / 'files'} " in command for command, _ in asked)
    with pytest.raises(UsageError, match="no stack runs on riscv64"):
        download_stack(None, tmp_path, "riscv64")
