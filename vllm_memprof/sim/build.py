"""Build the shim: one shared library that answers for every CANN library the engine needs.

In: the interpreter of an engine environment (its headers, its binaries), ``native/``. Out: a folder
of libraries for ``LD_LIBRARY_PATH``, and ``symbols.json``. Runs in the launcher's process; needs a
C++17 compiler, g++ or clang++.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from vllm_memprof.errors import SetupError
from vllm_memprof.sim import elf, symbols

_SIM_DIR = Path(__file__).parent
NATIVE_DIR = _SIM_DIR / "native"
LIBRARY = "libascendcl.so"
_STAMP = "shim.stamp"
_WORK = ".build"  # objects, named by what they are made from
_FLAGS = ["-std=c++17", "-O1", "-g0", "-fPIC", "-fvisibility=hidden", "-DFUNC_VISIBILITY"]
_FLAGS += ["-Wno-deprecated-declarations"]
_INCLUDES = [
    "torch_npu/include",
    "torch_npu/include/third_party/acl/inc",
    "torch_npu/include/third_party/hccl/inc",
]

Progress = Callable[[str], None]


@dataclass(frozen=True)
class ShimBuild:
    """A shim that is in place."""

    lib_dir: Path  # for LD_LIBRARY_PATH
    library: Path
    symbols_file: Path  # every name the engine can ask for, with its state
    fingerprint: str  # of everything the shim is built from
    built: bool  # False: it was already there
    seconds: float


def build_shim(
    engine_python: Path,
    out_dir: Path,
    progress: Progress | None = None,
    others: Iterable[Path] = (),
) -> ShimBuild:
    """Build the shim for one engine environment into `out_dir`, or find it already there.

    Args:
        engine_python: interpreter of the environment that has torch_npu installed.
        out_dir: folder for the libraries; created. A build appears in it at once or not at all.
        progress: told in words what happens.
        others: folders of other shims, whose objects are linked where they are the same.

    Raises:
        SetupError: no compiler, no torch_npu, or a failed compilation, with its first errors.
    """
    start = time.monotonic()
    say = progress or (lambda _: None)
    site_packages = _site_packages(engine_python)
    compiler = find_compiler()
    fingerprint = _fingerprint(site_packages, compiler)
    out_dir.mkdir(parents=True, exist_ok=True)
    with (out_dir / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            current = (out_dir / _STAMP).read_text() == fingerprint
        except OSError:
            current = False
        built = not (current and (out_dir / LIBRARY).exists())
        if built:
            _build(site_packages, compiler, out_dir, say, [each / _WORK for each in others])
            _write_atomically(out_dir / _STAMP, fingerprint)
    return ShimBuild(
        lib_dir=out_dir,
        library=out_dir / LIBRARY,
        symbols_file=out_dir / "symbols.json",
        fingerprint=fingerprint,
        built=built,
        seconds=time.monotonic() - start,
    )


def find_compiler() -> list[str]:
    """Return the command of the C++ compiler: $CXX, else g++, else clang++.

    Raises:
        SetupError: there is none.
    """
    configured = os.environ.get("CXX")
    for command in [shlex.split(configured)] if configured else [["g++"], ["clang++"], ["c++"]]:
        if command and shutil.which(command[0]):
            return command
    missing = f"CXX={configured!r}" if configured else "no C++ compiler"
    raise SetupError(
        f"{missing} was not found; the simulated device is compiled on this machine",
        "install g++ or clang++ (Debian, Ubuntu: apt install g++; openEuler, Fedora: "
        "dnf install gcc-c++), or set CXX",
    )


def _site_packages(engine_python: Path) -> Path:
    script = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    command = [str(engine_python), "-I", "-c", script]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise SetupError(
            f"cannot run the engine's interpreter {engine_python}: {error}",
            "run: memprof sim setup",
        ) from error
    site_packages = Path(done.stdout.strip())
    if not (site_packages / "torch_npu").is_dir():
        raise SetupError(f"torch_npu is not installed in {site_packages}", "run: memprof sim setup")
    return site_packages


def native_sources() -> list[Path]:
    """Return the sources, headers and rules of the shim, folders below included."""
    return sorted(path for path in NATIVE_DIR.rglob("*") if path.suffix in {".cpp", ".h", ".toml"})


def _fingerprint(site_packages: Path, compiler: list[str]) -> str:
    digest = hashlib.sha256()
    for path in [*native_sources(), Path(__file__), Path(symbols.__file__), Path(elf.__file__)]:
        digest.update(f"{path.relative_to(_SIM_DIR)}\0".encode() + path.read_bytes())
    digest.update(repr((compiler, shutil.which(compiler[0]), _FLAGS)).encode())
    rules = symbols.load_rules()
    for path in symbols.engine_libraries(
        site_packages, [*rules.libraries, *rules.operator_libraries]
    ):
        status = path.stat()
        digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def _build(
    site_packages: Path, compiler: list[str], out_dir: Path, say: Progress, others: list[Path]
) -> None:
    work = out_dir / _WORK
    work.mkdir(exist_ok=True)
    include_flags = [f"-I{path}" for path in (NATIVE_DIR, *map(site_packages.joinpath, _INCLUDES))]
    lacking = [f"-DLACKS_{name}" for name in lacking_names(site_packages)]
    include_flags += lacking
    headers = repr((_headers_digest(site_packages), lacking))
    sources = [path for path in native_sources() if path.suffix == ".cpp"]
    say(f"compiling {len(sources)} files of the simulated device")
    rules = symbols.load_rules()
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        pending = [
            pool.submit(_compile, compiler, include_flags, path, work, headers, others)
            for path in sources
        ]
        demand = symbols.collect_demand(site_packages, rules, compiler[0])
        objects = [future.result() for future in pending]
    pointers = symbols.pointer_functions(site_packages / directory for directory in _INCLUDES[1:])
    plan = symbols.make_plan(demand, rules, symbols.defined_symbols(objects), pointers)
    say(f"generating {len(plan.symbols)} names the engine can ask for")
    generated = [work / "generated.cpp", work / "operators.S"]
    generated[0].write_text(symbols.generate_cpp(plan), encoding="utf-8")
    generated[1].write_text(symbols.generate_assembly(plan), encoding="utf-8")
    objects += [_compile(compiler, include_flags, path, work) for path in generated]
    library = work / LIBRARY
    say("linking")
    link = [*compiler, "-shared", "-o", str(library), *map(str, objects)]
    run_compiler([*link, "-pthread", "-ldl", "-Wl,-z,defs"], "linking the simulated device")
    _install(library, plan, out_dir)


def lacking_names(site_packages: Path) -> list[str]:
    """Return the names behind ``LACKS_<name>`` in the sources that no installed header mentions."""
    asked = {
        name
        for path in native_sources()
        for name in re.findall(r"\bLACKS_(\w+)", path.read_text(encoding="utf-8"))
    }
    headers = [
        path for directory in _INCLUDES[1:] for path in (site_packages / directory).rglob("*.h")
    ]
    declared = {
        name for path in headers for name in re.findall(r"\w+", path.read_text("utf-8", "replace"))
    }
    return sorted(asked - declared)


def _headers_digest(site_packages: Path) -> str:
    """Return a digest of the engine's headers, the same wherever they are installed."""
    digest = hashlib.sha256()
    for folder in map(site_packages.joinpath, _INCLUDES):
        for path in sorted(folder.rglob("*.h")):
            digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _compile(
    compiler: list[str],
    include_flags: list[str],
    source: Path,
    work: Path,
    engine_headers: str = "",
    others: Iterable[Path] = (),
) -> Path:
    """Compile one file, unless an object of the same content is there or in another folder."""
    headers = b"".join(path.read_bytes() for path in native_sources() if path.suffix == ".h")
    command = [*compiler, *_FLAGS, *include_flags]
    made_with = repr((compiler, _FLAGS, engine_headers or include_flags))
    content = source.read_bytes() + headers + made_with.encode()
    target = work / f"{source.name}.{hashlib.sha256(content).hexdigest()[:24]}.o"
    if not target.exists():
        for stale in work.glob(f"{source.name}.*.o"):
            stale.unlink()
        for other in others:
            with contextlib.suppress(OSError):
                os.link(other / target.name, target)
                return target
        temporary = target.with_suffix(".tmp")
        run_compiler(
            [*command, "-c", str(source), "-o", str(temporary)], f"compiling {source.name}"
        )
        temporary.replace(target)
    return target


def run_compiler(command: list[str], what: str) -> None:
    """Run a command of the compiler.

    Raises:
        SetupError: it failed; with its first errors.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    lines = done.stderr.splitlines()
    useful = [line for line in lines if "error" in line or "undefined" in line] or lines
    shown = "\n  ".join(useful[:8])
    raise SetupError(
        f"{what} failed ({command[0]} exited with {done.returncode}):\n  {shown}",
        "is the compiler older than C++17?",
    )


def _install(library: Path, plan: symbols.SymbolPlan, out_dir: Path) -> None:
    """Install one file, and a link to it for every other library name: the loader maps it once."""
    _write_atomically(out_dir / "symbols.json", json.dumps(plan.to_json(), indent=0) + "\n")
    library.replace(out_dir / LIBRARY)
    wanted = {soname for soname in plan.sonames if soname != LIBRARY}
    for soname in sorted(wanted):
        temporary = out_dir / f".{soname}.tmp"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(LIBRARY)
        temporary.replace(out_dir / soname)
    for path in out_dir.glob("lib*.so"):
        if path.is_symlink() and path.name not in wanted:
            path.unlink()


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
