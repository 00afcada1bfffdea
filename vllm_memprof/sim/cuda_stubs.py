"""Libraries that an engine stack links and leaves out: 4.3 GB of CUDA on a machine without a GPU.

The package index carries a CUDA build of torch. It only has to import: the loader must find the
libraries that it names and the symbols that it binds, nothing ever calls them. Both lists are read
from the installed binaries. For each library that neither the environment nor the system has, a
stand-in is compiled whose functions fail by name, with the code that CUDA gives where there is no
device. With a CPU build of torch the list is empty and nothing is built.

Runs on the launcher's side, during ``memprof sim setup``. Needs the machine's C compiler.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from vllm_memprof.errors import SetupError
from vllm_memprof.sim.elf import INTERPRETER, ElfFile, is_elf

#: Result of a stand-in: cudaErrorNoDevice (driver_types.h). Other CUDA libraries read any value
#: other than 0 as a failure.
NO_DEVICE = 100
#: Functions that run when the libraries are loaded, or by which torch looks for a device.
#: They answer without a word; every other function prints its name.
QUIET = {
    r"__cuda.*": 0,  # registration of kernels by static constructors; asks for no device
    r"cudaGetDeviceCount|cudaGetLastError|cudaPeekAtLastError|cudaDriverGetVersion": NO_DEVICE,
}
#: Functions that return the name or the message of an error: torch puts it into its own message.
#: (`cuGetErrorString` and `cuGetErrorName` of the driver return a code.)
TEXTS = re.compile(r"(?!cuGet)\w+Get(?:Error|Status)(?:String|Name)|ncclGetLastError")
#: Packages of an environment whose libraries are looked at.
PACKAGES = ("torch", "torchvision", "torchaudio")
#: Binaries that torch opens only once there is a CUDA device: never here.
#: (aten/src/ATen/cuda/detail, 2.10)
OPENED_LATE = {"libcaffe2_nvrtc.so", "libtorch_cuda_linalg.so"}


@dataclass
class Wanted:
    """The names that binaries ask of libraries that are not there."""

    libraries: set[str] = field(default_factory=set)  # sonames
    versioned: dict[tuple[str, str], set[str]] = field(
        default_factory=lambda: defaultdict(set)
    )  # (soname, version)
    unversioned: set[str] = field(default_factory=set)


def system_libraries() -> set[str]:
    """Return the sonames that the dynamic loader finds without help."""
    for tool in ("ldconfig", "/sbin/ldconfig", "/usr/sbin/ldconfig"):
        try:
            listing = subprocess.run(
                [tool, "-p"], capture_output=True, text=True, check=False
            ).stdout
        except FileNotFoundError:
            continue
        return set(re.findall(r"^\s+(\S+) \(", listing, re.MULTILINE)) | {"ld-linux-x86-64.so.2"}
    raise SetupError(
        "ldconfig was not found", "it belongs to the C library of the system: check PATH"
    )


def find_wanted(site_packages: Path, provided: Iterable[str] = ()) -> Wanted:
    """Find what the libraries of ``PACKAGES`` want from libraries that do not exist here.

    Args:
        site_packages: of the engine environment.
        provided: sonames that somebody else builds (the simulated device).
    """
    binaries = [
        path
        for name in PACKAGES
        for path in sorted((site_packages / name).rglob("*.so*"))
        if path.is_file() and path.name not in OPENED_LATE and is_elf(path)
    ]
    present = (
        {path.name for path in site_packages.rglob("*.so*")} | system_libraries() | set(provided)
    )
    wanted = Wanted()
    defined: set[str] = set()
    unversioned: set[str] = set()
    for binary in map(ElfFile, binaries):
        missing = set(binary.needed()) - present
        defined |= {name for name, is_defined, _, _ in binary.symbols() if is_defined}
        wanted.libraries |= missing
        for name, library, version in binary.undefined() if missing else ():
            if library in missing:
                wanted.versioned[(library, version)].add(name)
            elif not version:
                unversioned.add(name)
    wanted.unversioned = {
        name
        for name in unversioned - defined
        if not name.startswith("_Z") and not INTERPRETER.match(name)
    }
    return wanted


def stand_in_source(names: Iterable[str]) -> str:
    """Return C text with one failing function per name; those that return text return a message."""
    lines = ["#include <stdio.h>"]
    for name in sorted(names):
        if TEXTS.fullmatch(name):
            lines.append(f'const char *{name}(void) {{ return "no CUDA here (memprof sim)"; }}')
            continue
        quiet = next(
            (value for pattern, value in QUIET.items() if re.fullmatch(pattern, name)), None
        )
        if quiet is not None:
            lines.append(f"long {name}(void) {{ return {quiet}; }}")
        else:
            say = f'fprintf(stderr, "memprof sim: {name}: no CUDA here\\n")'
            lines.append(f"long {name}(void) {{ {say}; return {NO_DEVICE}; }}")
    return "\n".join(lines) + "\n"


def build_left_out(
    site_packages: Path, out_dir: Path, compiler: str, provided: Iterable[str] = ()
) -> list[Path]:
    """Compile a stand-in for every missing library into ``out_dir``.

    Symbols without a version do not say which library they belong to; the loader looks through all
    of them, so the first stand-in carries them.

    Returns:
        The libraries written, none where nothing is missing.

    Raises:
        SetupError: the compiler failed, or two versions of one library are wanted by one name.
    """
    wanted = find_wanted(site_packages, provided)
    out_dir.mkdir(parents=True, exist_ok=True)
    built = []
    for index, soname in enumerate(sorted(wanted.libraries)):
        versions = {
            version: names
            for (library, version), names in wanted.versioned.items()
            if library == soname
        }
        names = set().union(*versions.values())
        extra = wanted.unversioned - names if index == 0 else set()
        source = out_dir / f"{soname}.c"
        script = out_dir / f"{soname}.map"
        target = out_dir / soname
        source.write_text(stand_in_source(names | extra))
        options = f"-x c -shared -fPIC -fno-builtin -w -Wl,-soname,{soname}".split()
        command = [compiler, *options, str(source), "-o", f"{target}.tmp"]
        if versions:
            nodes = [
                f"{version} {{ global: {' '.join(f'{name};' for name in sorted(n))} }};"
                for version, n in versions.items()
            ]
            script.write_text("\n".join(nodes) + "\n")
            command.append(f"-Wl,--version-script={script}")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            first = "\n".join(done.stderr.splitlines()[:5])
            raise SetupError(
                f"the compiler could not build the stand-in for {soname}:\n{first}",
                "see the lines above",
            )
        Path(f"{target}.tmp").replace(target)
        source.unlink()
        script.unlink(missing_ok=True)
        built.append(target)
    return built
