"""Add a release of vllm-ascend as an engine stack: ``python -m scripts.add_stack 0.26.0rc1``.

Writes the stack's two files (``--lock`` stops there), sets it up and checks it: calls that nobody
has implemented, a tiny model with graphs, eagerly and on two ranks, values that nobody computed.
``--check NAME`` only checks a stack, of any engine; ``--compare NAME`` makes the lock of a stack
anew and prints what differs; ``--hashes`` asks the index for the hashes of all locks and writes
them, no other pin or line. Each line that says FAILED names the file that it goes into. Needs one
stack that is set up: its Python prepares the metadata of what is built from source.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from vllm_memprof.sim.poison import UNWRITTEN
from vllm_memprof.sim.runtime import stack_state
from vllm_memprof.sim.selftest import run_selftest
from vllm_memprof.sim.setup import MACHINES, VERIFY_SCRIPT, wheels_for, without_build
from vllm_memprof.sim.stacks import (
    EXTRAS_DIR,
    STACKS_DIR,
    Stack,
    default_prefix,
    list_stacks,
    load_stack,
    normalize,
    parse_lock,
)

Report = dict[str, dict[str, Any]]  # normalized name -> pip's metadata, "url" and "sha256" beside
Hashes = dict[tuple[str, str], list[str]]  # (normalized name, version) -> of its wheels

#: Packages that are installed as they are named, without what they ask for: a stack has no CUDA.
ROOTS = ("torch", "torch-npu", "torchvision", "torchaudio", "vllm", "vllm-ascend")
#: Names that a stack leaves out, whoever asks for them: Triton and CUDA, build tools, typing stubs,
#: stores for KV pools, clients of cloud services.
LEFT_OUT = re.compile(
    r"triton(-ascend)?|nvidia-.*|cuda-.*|cmake|ninja|pybind11|pip|.*-stubs|arctic-inference|"
    r"mem(fabric|cache)-hybrid|fastapi-cli|fastapi-cloud-cli|fastar|sentry-sdk|rignore"
)
#: What the builds need and their metadata does not say. (vllm/pyproject.toml, build-system)
BUILD_TOOLS = (
    "setuptools>=77.0.3,<81", "wheel", "packaging", "setuptools-rust", "setuptools-scm",
)  # fmt: skip
#: What torch_npu imports and does not name.
WITH_TORCH_NPU = ("pillow", "PyYAML", "decorator", "scipy", "attrs", "psutil")
PARTS = 4
HEAD = (
    "# Exact pins of the stack, installed with pip's --no-deps. One pip command per chunk; "
    "finished chunks are kept.\n"
)
#: What a failure says -> where it goes, below vllm_memprof/. The first that matches counts.
PLACES = (
    (r"is not implemented", "docs/develop/adr/0002-unimplemented-calls-fail.md"),
    (r"undefined symbol|cannot open shared object", "[engine] in sim/native/symbols.toml"),
    (r"is not a member|was not declared|does not name a type", "sim/native/compat.h"),
    (r"No module named '(?!vllm)", "a package in sim/site, or a pin of the lock"),
    (r"EngineArgs|unrecognized arguments|No module named 'vllm", "engines/vllm/driver.py"),
    (r"^hook ", "engines/vllm/hooks.json"),
    (r"^equation|^residual|^cross-check", "engines/vllm/equations.toml"),
    (r"^not measured", "engines/vllm/hooks.json or capture/names.json"),
    (r"^nobody computed", "sim/native/kernels"),
)
#: States of a required hook that saw nothing of its phase.
LOST = ("stale", "error", "overwritten", "missing", "never_called")
RUNS: dict[str, list[str]] = {
    "graphs": [],
    "eager": ["--enforce-eager"],
    "two ranks": ["--tensor-parallel-size", "2"],
}
SGLANG_RUNS: dict[str, list[str]] = {
    "graphs": [],
    "eager": ["--disable-cuda-graph"],
    "two ranks": ["--tp-size", "2"],
}


# --- the lock


def write_stub(folder: Path, name: str, version: str) -> None:
    """Write a wheel without content: pip takes it for the package, and asks for nothing more."""
    stem = f"{name.replace('-', '_')}-{version}"
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        for file, text in files.items():
            wheel.writestr(f"{stem}.dist-info/{file}", text)


def ask_pip(like: Stack | None, requirements: Iterable[str], *options: str, **env: str) -> Report:
    """Return the metadata of what pip would install: into a stack that is set up, or anywhere.

    Raises:
        SystemExit: pip found no answer; with its own words.
    """
    python = sys.executable
    if like is not None:
        prefix = default_prefix(like.name)
        python = str(prefix / "bin/python")
        env = {key: value for build in like.builds for key, value in build.env.items()} | env
        env["LD_LIBRARY_PATH"] = str(prefix / "left_out")
        env["PYTHONPATH"] = str(VERIFY_SCRIPT.parent)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            python, "-m", "pip", "install", "--quiet", "--dry-run",
            "--ignore-installed", "--no-build-isolation", "--report", str(report),
            *options, *requirements,
        ]  # fmt: skip
        done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"pip: {done.stderr[-3000:]}")
        found = json.loads(report.read_text())["install"]
    return {
        normalize(row["metadata"]["name"]): {
            **row["metadata"],
            "url": row["download_info"]["url"],
            "sha256": row["download_info"]["archive_info"]["hashes"]["sha256"],
        }
        for row in found
    }


def hashes_of(pins: Iterable[tuple[str, str]]) -> Hashes:
    """Return the hash of each pin's wheel for every machine, once where they take the same."""
    hashes: Hashes = {pin: [] for pin in pins}
    for machine in MACHINES:
        left = list(hashes)
        while left:
            together = dict(reversed(left))  # pip takes one version of a package at a time
            left = [pin for pin in left if together[pin[0]] != pin[1]]
            asked = [f"{name}=={version}" for name, version in together.items()]
            options = ["--no-deps", "--target", tempfile.gettempdir(), *wheels_for(machine)]
            options += ["--python-version", load_stack().python]
            for name, row in ask_pip(None, asked, *options).items():
                found = hashes[name, together[name]]
                found += [row["sha256"]] * (row["sha256"] not in found)
    return hashes


def with_hashes(text: str, hashes: Hashes) -> str:
    """Return a lock with these hashes in place of those that it has."""
    bare = re.sub(r"(?: \\\n)?\s+--hash=\S+", "", text)
    return re.sub(
        r"(?m)^([\w.-]+)==(\S+)$",
        lambda pin: " \\\n    --hash=sha256:".join([pin[0], *hashes[normalize(pin[1]), pin[2]]]),
        bare,
    )


def with_source_hash(text: str, name: str, row: dict[str, Any]) -> str:
    """Return a stack's file with the version and hash of what is built from source."""
    pin = f'"{name}=={row["version"]} --hash=sha256:{row["sha256"]}"'
    return re.sub(rf'"{name}==[^"]+"', pin, text)


def write_hashes() -> None:
    """Write the hashes of every lock, and of what stacks build from source."""
    stacks = list_stacks()
    locks = [*(stack.sources[1] for stack in stacks), *EXTRAS_DIR.glob("*.lock")]
    pins = [pin for lock in locks for chunk in parse_lock(lock.read_text()) for pin in chunk.pins]
    hashes = hashes_of(dict.fromkeys(pins))
    for lock in locks:
        lock.write_text(with_hashes(lock.read_text(), hashes))
    for path, build in ((stack.sources[0], build) for stack in stacks for build in stack.builds):
        with tempfile.TemporaryDirectory() as folder:
            pin, env = f"{build.name}=={build.version}", without_build(Path(folder), build)
            rows = ask_pip(None, [pin], "--no-deps", "--no-binary", build.name, **env)
        name = build.name.replace("-", "_")
        path.write_text(with_source_hash(path.read_text(), name, rows[build.name]))


def needs(metadata: dict[str, Any]) -> Iterator[Requirement]:
    """Return what a package asks for on this machine, without its extras."""
    for line in metadata.get("requires_dist", []):
        need = Requirement(line)
        if need.marker is None or need.marker.evaluate({"extra": ""}):
            yield need


def resolve(like: Stack, release: str, vllm: str, unlimited: set[str]) -> tuple[Report, Report]:
    """Return the roots, and everything else that they need.

    Args:
        like: a stack that is set up.
        release: of vllm-ascend.
        vllm: the release of vLLM that it goes with.
        unlimited: packages whose range in vllm-ascend's metadata is not kept.
    """
    asked = [f"vllm=={vllm}", f"vllm_ascend=={release}"]
    env = {"VLLM_VERSION_OVERRIDE": vllm}
    roots = ask_pip(like, asked, "--no-deps", "--no-binary", "vllm", **env)
    named = {normalize(need.name): need for need in needs(roots["vllm-ascend"])}
    pins = {name: f"{name}{named[name].specifier}" for name in ROOTS if name in named}
    roots |= ask_pip(like, [pins.pop("torch-npu")], "--no-deps")  # its torch is +cpu
    # torchvision, which releases name without a version, names the torch that it was built for
    found = ask_pip(like, pins.values())
    roots |= {name: row for name, row in found.items() if name in pins}

    lines, left_out = list(BUILD_TOOLS) + list(WITH_TORCH_NPU), {}
    for root in roots:
        for need in needs(roots[root]):
            name = normalize(need.name)
            if LEFT_OUT.fullmatch(name):
                exact = [each.version for each in need.specifier if each.operator == "=="]
                left_out[name] = exact[0] if exact and "*" not in exact[0] else "9999"
            elif name not in ROOTS and not (root == "vllm-ascend" and name in unlimited):
                need.marker = None
                lines.append(str(need))
    with tempfile.TemporaryDirectory() as folder:
        for name in roots:
            write_stub(Path(folder), name, str(roots[name]["version"]).split("+")[0] + "+stub")
        clients = ("triton", "fastapi-cli", "fastapi-cloud-cli", "sentry-sdk", "rignore", "fastar")
        for name, version in {**dict.fromkeys(clients, "9999"), **left_out}.items():
            write_stub(Path(folder), name, version)
        others = ask_pip(like, lines, "--find-links", folder)
    stubs = {*roots, *filter(LEFT_OUT.fullmatch, others)}
    return roots, {name: row for name, row in others.items() if name not in stubs}


def closure(names: Iterable[str], rows: Report) -> list[str]:
    """Return packages with all that they need, in the order they are met."""
    found: list[str] = []
    queue = [normalize(name) for name in names]
    while queue:
        name = queue.pop(0)
        if name in rows and name not in found:
            found.append(name)
            queue += [normalize(need.name) for need in needs(rows[name])]
    return found


def lock_text(roots: Report, others: Report) -> str:
    """Return the lock file of a stack."""
    from_wheel = roots["vllm-ascend"]["url"].endswith(".whl")
    tools = closure([Requirement(line).name for line in BUILD_TOOLS], others)
    plain = {normalize(need.name) for need in needs(roots["torch"])} | {"numpy"}
    torch = [name for name in closure(sorted(plain), others) if name not in tools]
    beside = [normalize(name) for name in WITH_TORCH_NPU]
    first = {*tools, *torch, *beside}
    rest = sorted(name for name in others if name not in first)
    size = -(-len(rest) // PARTS)
    chunks = {
        "build tools": tools,
        "torch": ["torch", *sorted(torch)],
        f"torch_npu{' and vllm-ascend' * from_wheel}": [
            "torch-npu", *["torchaudio"] * ("torchaudio" in roots), "torchvision",
            *["vllm-ascend"] * from_wheel, *beside,
        ],
    }  # fmt: skip
    for part in range(PARTS):
        title = f"libraries of the engine, part {part + 1} of {PARTS}"
        chunks[title] = rest[part * size : (part + 1) * size]
    text = HEAD
    rows = {**others, **roots}
    for title, names in chunks.items():
        pins = [f"{rows[name]['name']}=={rows[name]['version']}\n" for name in names]
        text += f"# chunk: {title}\n{''.join(pins)}"
    return text


def toml_text(like: Stack, name: str, release: str, roots: Report) -> str:
    """Return the other file of a stack: that of a stack like it, with the new versions."""
    text = like.sources[0].read_text(encoding="utf-8")
    old = dict(re.findall(r"(\w+) ([\w.]+)", like.title))
    old_vllm, vllm = old["vLLM"], str(roots["vllm"]["version"])
    text = text.replace(like.name, name)
    text = text.replace(f"vllm-ascend {like.engine_version}", f"vllm-ascend {release}")
    for package in ("vllm", "vllm_ascend"):
        text = with_source_hash(text, package, roots[normalize(package)])
    text = re.sub(r'(?m)^(engine_version = ").*(")', rf"\g<1>{release}\g<2>", text)
    for before in ("vLLM ", 'VLLM_VERSION_OVERRIDE = "'):
        text = text.replace(f"{before}{old_vllm}", f"{before}{vllm}")
    for package in ("torch", "torch_npu"):
        version = str(roots[normalize(package)]["version"]).split("+")[0]
        text = text.replace(f"{package} {old[package]}", f"{package} {version}")
    return text.replace(f"{old_vllm}+empty", f"{vllm}+empty")


def differences(old: str, new: str) -> Iterator[str]:
    """Return what two locks do not have in common, a line for each package."""
    pins = [dict(pin for chunk in parse_lock(text) for pin in chunk.pins) for text in (old, new)]
    for name in sorted({*pins[0], *pins[1]}):
        before, after = (each.get(name, "-") for each in pins)
        if before != after:
            yield f"{name:40} {before:16} {after}"


# --- the checks


def place_of(message: str) -> str:
    """Return where a failure goes; see ``PLACES``."""
    found = (place for pattern, place in PLACES if re.search(pattern, message, re.MULTILINE))
    return next(found, "read it")


def problems_of(report: dict[str, Any], events: list[dict[str, Any]], log: str) -> list[str]:
    """Return what is not as it should be in a run: a sentence each.

    Args:
        report: of the run, ``report.json``.
        events: of all its processes.
        log: of the engine.
    """
    found = [
        f"not measured: {row['phase']}: {row['reason']}"
        for row in report["not_measured"]
        if row["reason"] != "eager mode"
    ]
    for rank in report["ranks"]:
        budget, label = rank["budget"] or {}, rank["label"]
        if not budget.get("equation"):
            found.append(f"equation: none for this release ({label})")
        elif budget["residual_bytes"] != 0:
            found.append(f"residual: {budget['residual_bytes']} bytes ({label})")
        found += [
            f"cross-check: {row['name']} {row['difference_bytes']} bytes ({label})"
            for row in budget.get("audit", [])
            if row.get("agrees") is False
        ]
    for event in events:
        if event["kind"] == "hook" and event["need"] == "required" and event["state"] in LOST:
            found.append(f"hook {event['hook']}: {event['state']}")
        elif event["kind"] == "error":
            found.append(f"error in the observer: {json.dumps(event)[:300]}")
    found += re.findall(r"\S+ is not implemented: the call fails", log)
    return list(dict.fromkeys(found))


def failing_names(stack: Stack) -> set[str]:
    """Return the calls that a stack can make and the simulated device does not implement."""
    path = default_prefix(stack.name) / "shim/names.inc"
    text = path.read_text() if path.is_file() else ""
    return set(re.findall(r"FAILING\((\w+)\)", text))


def run_once(stack: Stack, arguments: list[str]) -> list[str]:
    """Run a tiny model on a stack; return what is wrong with it."""
    with tempfile.TemporaryDirectory(prefix="memprof-add-stack-") as folder:
        run_dir = Path(folder) / "run"
        engine = ["--engine", "sglang"] if stack.engine == "sglang" else []
        command = [
            sys.executable, "-m", "vllm_memprof", "offline", "memprof/tiny", *engine,
            "--device", "sim:910b", "--stack", stack.name, "--run-dir", str(run_dir), *arguments,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return [(done.stdout + done.stderr)[-1500:]]
        lines = [
            line
            for path in sorted((run_dir / "events").glob("*.jsonl"))
            for line in path.read_text().splitlines()
        ]
        report = json.loads((run_dir / "report.json").read_text())
        log = (run_dir / "engine.log").read_text(errors="replace")
        return problems_of(report, [json.loads(line) for line in lines], log)


def check(stack: Stack, like: Stack) -> int:
    """Set a stack up and try it; return how many checks failed."""
    failed = 0

    def tell(what: str, problems: list[str]) -> None:
        nonlocal failed
        failed += bool(problems)
        print(f"{'FAILED' if problems else 'passed'}  {what}", flush=True)
        for problem in problems:
            print(f"        {problem}\n        -> {place_of(problem)}", flush=True)

    command = [sys.executable, "-m", "vllm_memprof", "sim", "setup", "--stack", stack.name]
    done = subprocess.run(command, capture_output=True, text=True)
    tell("set-up", [(done.stdout + done.stderr)[-1500:]] if done.returncode else [])
    if done.returncode:
        return failed
    new = sorted(failing_names(stack) - failing_names(like))
    print(f"        calls not implemented, and not asked for by {like.name}: {', '.join(new) or 0}")
    for title, arguments in (SGLANG_RUNS if stack.engine == "sglang" else RUNS).items():
        tell(title, run_once(stack, arguments))
    if stack.engine == "vllm-ascend":
        reads = run_selftest(stack.name, "memprof/tiny", "910b")
        unwritten = (read for read in reads if read.kind == UNWRITTEN)
        tell("values", [f"nobody computed: {read}" for read in unwritten])
    return failed


def main(arguments: list[str] | None = None) -> int:
    """Do what the command line asks for; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("release", nargs="?", help="of vllm-ascend, as the index names it")
    parser.add_argument("--like", help="a stack that is set up, whose files are the pattern")
    parser.add_argument("--vllm", help="release of vLLM; default: of the same number")
    parser.add_argument("--lock", action="store_true", help="only write the two files")
    parser.add_argument("--check", metavar="STACK", help="only check a stack")
    parser.add_argument("--compare", metavar="STACK", help="its lock, made anew")
    parser.add_argument("--hashes", action="store_true", help="write those of all locks anew")
    parser.add_argument(
        "--unlimited", action="append", default=[], metavar="PACKAGE",
        help="do not keep vllm-ascend's range of this package",
    )  # fmt: skip
    given = parser.parse_args(arguments)
    ready = [
        each for each in list_stacks() if stack_state(each, default_prefix(each.name)) == "ready"
    ]
    if given.check:
        stack = load_stack(given.check)
        others = [each for each in ready if each.name != stack.name and each.engine == stack.engine]
        return int(check(stack, load_stack(given.like) if given.like else [*others, stack][0]) > 0)
    if given.hashes:
        write_hashes()
        return 0
    release = load_stack(given.compare).engine_version if given.compare else given.release
    if release is None:
        parser.error("a release, --check or --compare")
    like = load_stack(given.like or given.compare or next(s for s in ready if s.builds).name)
    vllm = given.vllm or re.sub(r"(rc|\.post)\d+$", "", release)
    unlimited = {normalize(name) for name in given.unlimited}
    roots, others = resolve(like, release, vllm, unlimited)
    text = lock_text(roots, others)
    if given.compare:
        print("\n".join(differences(like.sources[1].read_text(), text)) or "the same")
        return 0
    if roots["vllm-ascend"]["url"].endswith(".whl") == (len(like.builds) > 1):
        parser.error("--like: a stack whose vllm-ascend comes as this one's, wheel or source")
    name = f"vllm-ascend-{release}"
    pins = [pin for chunk in parse_lock(text) for pin in chunk.pins]
    text = with_hashes(text, hashes_of(pins))
    (STACKS_DIR / f"{name}.lock").write_text(text)
    (STACKS_DIR / f"{name}.toml").write_text(toml_text(like, name, release, roots))
    print(f"wrote {name}.lock and {name}.toml in {STACKS_DIR}: read them")
    return 0 if given.lock else int(check(load_stack(name), like) > 0)


if __name__ == "__main__":
    raise SystemExit(main())
