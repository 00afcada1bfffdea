"""Compile an extension module of an engine package from the package's source distribution.

For releases without a wheel: their own build wants CANN's compiler for the kernels, but the binding
of the operators needs only a C++ compiler. In: an unpacked source distribution, the row of a stack
file that names the sources, the headers of the installed torch and torch_npu. Out: the module in
``site-packages``. It is linked to torch_npu, through which the loader finds the simulated device.

Runs in the launcher's process, during ``memprof sim setup``.
"""

from __future__ import annotations

import hashlib
import subprocess
from dataclasses import dataclass
from pathlib import Path

from vllm_memprof.errors import SetupError
from vllm_memprof.sim.build import compile_objects, link_library
from vllm_memprof.sim.stacks import Extension

#: -O0: no operator computes, so that the speed of the binding is of no account.
_FLAGS = ["-std=c++17", "-O0", "-g0", "-fPIC", "-w", "-fvisibility=hidden"]
_INCLUDES = [
    "torch/include",
    "torch/include/torch/csrc/api/include",
    "torch_npu/include",
    "torch_npu/include/third_party/acl/inc",
    "torch_npu/include/third_party/hccl/inc",
]
#: The loader looks for symbols through all that a module needs, also at second hand: CANN's
#: libraries, which torch_npu needs, do not have to be named.
_LINKED = {
    "torch/lib": ["torch", "torch_cpu", "torch_python", "c10"],
    "torch_npu/lib": ["torch_npu"],
}


@dataclass(frozen=True)
class Target:
    """The interpreter that a module is built for."""

    site_packages: Path
    include: Path  # folder of Python.h
    suffix: str  # of an extension module's file

    def file_of(self, extension: Extension) -> Path:
        """Return where the module belongs."""
        return self.site_packages / f"{extension.module.replace('.', '/')}{self.suffix}"


def target_of(python: Path) -> Target:
    """Ask an interpreter what a module for it needs.

    Raises:
        SetupError: it does not run.
    """
    script = (
        "import sysconfig as s; p = s.get_paths(); "
        "print(p['purelib'], p['include'], s.get_config_var('EXT_SUFFIX'), sep='\\n')"
    )
    try:
        done = subprocess.run(
            [str(python), "-I", "-c", script],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SetupError(f"cannot run the engine's interpreter {python}: {error}") from error
    site_packages, include, suffix = done.stdout.splitlines()
    return Target(Path(site_packages), Path(include), suffix)


def fingerprint(extension: Extension, version: str, compiler: list[str]) -> str:
    """Return a digest of what a module is built from."""
    parts = (extension, version, compiler, _FLAGS, _INCLUDES, _LINKED)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def build_extension(
    extension: Extension, source: Path, target: Target, compiler: list[str]
) -> None:
    """Compile the sources side by side and link the module into its package.

    Objects are kept there, so that an interrupted build goes on.

    Args:
        extension: which files, with which definitions.
        source: the unpacked source distribution.
        target: the interpreter, and where its packages are.
        compiler: command of a C++17 compiler.

    Raises:
        SetupError: a file that the row names is missing, or the compiler failed.
    """
    files = [source / name for name in extension.sources]
    for path in files:
        if not path.is_file():
            raise SetupError(f"the source distribution has no {path.relative_to(source)}")
    folders = [*map(target.site_packages.joinpath, _INCLUDES), target.include]
    folders += map(source.joinpath, extension.includes)
    flags = [*_FLAGS, *extension.flags]
    flags += [f"-D{name}" for name in extension.defines]
    flags += [f"-DTORCH_EXTENSION_NAME={extension.module.rsplit('.', 1)[-1]}"]
    flags += [f"-I{folder}" for folder in folders]
    command = [*compiler, *flags]
    objects = compile_objects(command, files, source / "objects", repr(command))
    link = [*compiler, "-shared", *extension.flags, *map(str, objects), "-Wl,--no-as-needed"]
    for folder, names in _LINKED.items():
        link += [f"-L{target.site_packages / folder}", *(f"-l{name}" for name in names)]
    # What torch_npu links comes from the simulated device, which is built after this module.
    link.append("-Wl,--unresolved-symbols=ignore-all")
    link_library(link, target.file_of(extension))
