"""Build what stands in for libraries: the simulated device, and CUDA, which a stack leaves out.

One library answers for every library of a kind that the engine needs, under the names of all of
them: the loader maps it once. In: the binaries and headers of an engine environment, ``native/``.
Out: a folder for ``LD_LIBRARY_PATH``, with ``names.inc``, every name in its state. Runs in the
launcher's process; needs a C++17 compiler, g++ or clang++, with binutils.
"""

from __future__ import annotations

import filecmp
import hashlib
import os
import re
import shlex
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vllm_memprof.errors import SetupError
from vllm_memprof.sim.elf import files_like, read_binary, system_library
from vllm_memprof.sim.folders import write_file
from vllm_memprof.sim.stacks import cache_dir
from vllm_memprof.sim.symbols import NATIVE_DIR, collect_demand, load_rules, make_rows

LIBRARY = "libascendcl.so"
_FLAGS = ["-std=c++17", "-O1", "-g0", "-fPIC", "-fvisibility=hidden", "-DFUNC_VISIBILITY"]
#: Products are rounded before they are added: aarch64 would do both in one instruction.
_FLAGS += ["-Wno-deprecated-declarations", "-ffp-contract=off"]
_HEADERS = ["torch_npu/include/third_party/acl/inc", "torch_npu/include/third_party/hccl/inc"]
#: So many objects are kept, those last used: of several stacks, and of sources that change.
_KEPT_OBJECTS = 500


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


def native_sources() -> list[Path]:
    """Return the sources, headers and rules of what is built, folders below included."""
    kinds = {".cpp", ".h", ".S", ".c", ".toml"}
    return sorted(path for path in NATIVE_DIR.rglob("*") if path.suffix in kinds)


def build_shim(site_packages: Path, out_dir: Path, say: Callable[[str], None]) -> Path:
    """Build the simulated device for one engine environment.

    Args:
        site_packages: of the environment, which has torch_npu.
        out_dir: folder for the library; created.
        say: told in words what happens.

    Returns:
        The library.

    Raises:
        SetupError: no compiler, no engine, or a failed compilation, with its first errors.
    """
    compiler = find_compiler()
    demand = collect_demand(site_packages, compiler[0])

    # What the installed headers declare: an older torch_npu lacks names (compat.h).
    folders = [site_packages / folder for folder in _HEADERS]
    headers = [path for folder in folders for path in sorted(folder.rglob("*.h"))]
    declared = "".join(path.read_text("utf-8", errors="replace") for path in headers)
    texts = {path: path.read_text(encoding="utf-8") for path in native_sources()}
    asked = re.findall(r"\bLACKS_(\w+)", "".join(texts.values()))
    lacking = sorted({*asked}.difference(re.findall(r"\w+", declared)))

    flags = [*_FLAGS, *(f"-DLACKS_{name}" for name in lacking)]
    include = [NATIVE_DIR, out_dir, site_packages / "torch_npu" / "include", *folders]
    command = [*compiler, *flags, *(f"-I{folder}" for folder in include)]
    own_headers = [text for path, text in texts.items() if path.suffix == ".h"]
    made_with = repr((compiler, flags, own_headers, declared))
    cache = cache_dir() / "objects"
    generated = [path for path in texts if path.parent.name == "generated"]
    sources = [path for path in texts if path.suffix == ".cpp" and path not in generated]
    say(f"compiling {len(sources)} files of the simulated device")
    objects = compile_objects(command, sources, cache, made_with)

    rows = make_rows(
        demand.linked | demand.looked_up,
        load_rules("symbols")[1],
        demand.linked,
        implemented={name for path in objects for name in read_binary(path, "--syms").defined},
        null_on_failure=set(re.findall(r"\*\s*((?:acl|Hccl)\w+)\s*\(", declared)),
    )
    say(f"generating {len(rows)} names the engine can ask for")
    names = "\n".join([*rows, ""])
    write_file(out_dir / "names.inc", names)
    objects += compile_objects(command, generated, cache, made_with + names)

    say("linking")
    options = ["-shared", *map(str, objects), "-pthread", "-ldl", "-Wl,-z,defs"]
    library = link_library([*compiler, *options], out_dir / LIBRARY, demand.sonames)
    by_use = sorted(cache.glob("*.o"), key=lambda path: path.stat().st_mtime)
    for path in by_use[:-_KEPT_OBJECTS]:
        path.unlink(missing_ok=True)
    return library


def build_left_out(site_packages: Path, out_dir: Path) -> set[str]:
    """Build a stand-in for the libraries that the engine's torch links and that are not there.

    The names that it binds must be there; nothing ever calls them. With a CPU build of torch there
    is nothing to build.

    Returns:
        The names of the libraries.

    Raises:
        SetupError: the compiler failed.
    """
    compiler = find_compiler()
    engine, rules = load_rules("left_out")
    there = {path.name for path in site_packages.rglob("*.so*")}
    binaries = [
        read_binary(path)
        for path in files_like(site_packages, engine["libraries"])
        if path.name not in engine["opened_late"]
    ]
    needed = set().union(*(binary.needed for binary in binaries)) - there
    sonames = {name for name in needed if system_library(compiler[0], name) is None}
    if not sonames:
        return sonames
    versions, unversioned = defaultdict[str, set[str]](set), set[str]()
    for binary in binaries:
        for name, (soname, version) in binary.undefined.items():
            if soname in sonames:
                versions[version].add(name)
            # Without a version it may be of any library that the binary needs; torch's own C++ and
            # the interpreter's names are not.
            elif not version and binary.needed & sonames and not re.match("_Z|_?Py[A-Z_]", name):
                unversioned.add(name)
    unversioned = unversioned.difference(*(binary.defined for binary in binaries))
    rows = make_rows(unversioned.union(*versions.values()), rules)
    write_file(out_dir / "names.inc", "\n".join([*rows, ""]))
    options = ["-x", "c", "-shared", "-fPIC", "-fno-builtin", "-w", f"-I{out_dir}"]
    options.append(str(NATIVE_DIR / "left_out.c"))
    if versions:
        script = out_dir / "versions.map"
        nodes = (f"{node} {{ global: {'; '.join(sorted(versions[node]))}; }};" for node in versions)
        write_file(script, "\n".join(nodes))
        options.append(f"-Wl,--version-script={script}")
    link_library([*compiler, *options], out_dir / "libleft_out.so", sonames)
    return sonames


def compile_objects(
    command: list[str], sources: Iterable[Path], out_dir: Path, made_with: str
) -> list[Path]:
    """Compile files side by side, unless an object made from the same is there.

    Args:
        command: the compiler and its options.
        sources: the files.
        out_dir: folder of the objects, which are named by what they are made from; created.
        made_with: what else that is, beside the file.

    Raises:
        SetupError: a compilation failed; with its first errors.
    """
    out_dir.mkdir(parents=True, exist_ok=True)

    def compile_file(source: Path) -> Path:
        digest = hashlib.sha256(source.read_bytes() + made_with.encode()).hexdigest()
        target = out_dir / f"{source.name}.{digest[:24]}.o"
        if target.exists():
            os.utime(target)
            return target
        temporary = target.with_suffix(f".{os.getpid()}")
        options = ["-c", str(source), "-o", str(temporary)]
        run_compiler([*command, *options], f"compiling {source.name}")
        return temporary.replace(target)

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        return list(pool.map(compile_file, sources))


def link_library(command: list[str], library: Path, also: Iterable[str] = ()) -> Path:
    """Link a library, which appears at once or not at all, and links to it under other names.

    One that is the same stays: a process that is loading it would map both.

    Raises:
        SetupError: the compiler failed; with its first errors.
    """
    temporary = library.with_name(f".{library.name}.{os.getpid()}")
    run_compiler([*command, "-o", str(temporary)], f"linking {library.name}")
    if library.is_file() and filecmp.cmp(temporary, library, shallow=False):
        temporary.unlink()
    else:
        temporary.replace(library)
    links = {library.with_name(name) for name in also} - {library}
    for path in {*library.parent.glob("lib*.so*")} - links:
        if path.is_symlink() and path.resolve() == library.resolve():
            path.unlink()  # no longer wanted
    for path in links:
        if not path.is_symlink():
            path.unlink(missing_ok=True)
            path.symlink_to(library.name)
    return library


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
