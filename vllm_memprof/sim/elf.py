"""The parts of an ELF file that a linker and a loader look at, read with ``readelf`` of binutils.

A path enters, names leave. Runs in the launcher's process, while a stack is set up.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from vllm_memprof.errors import SetupError

_NEEDED = re.compile(r"\(NEEDED\).*\[(.+)\]")
#: A row of a table of symbols: binding, visibility, section, name, and the number of its version.
_SYMBOL = re.compile(
    r"^ +\d+: \w+ +\w+ \w+ +(GLOBAL|WEAK|UNIQUE) +(\w+) +(?:\[.*?\] +)?(\w+) ([^@\s]+)"
    r"(?:@+\S+(?: \((\d+)\))?)?$",
    re.MULTILINE,
)
#: A library that versions are wanted of, or one of them with its number.
_VERSION = re.compile(r"  File: (\S+)  Cnt: |  Name: (\S+)  Flags: .*?  Version: (\d+)")


@dataclass(frozen=True)
class Binary:
    """The names of one library or object file."""

    needed: set[str]  # the sonames that the loader fetches with it
    defined: set[str]  # without hidden ones
    #: What the loader has to find: name -> soname of its library, symbol version. Both are empty
    #: for a symbol without a version: it may come from any library. Weak ones may stay missing.
    undefined: dict[str, tuple[str, str]]


def read_binary(path: Path, symbols: str = "--dyn-syms") -> Binary:
    """Read a library, or with ``--syms`` an object file.

    Raises:
        SetupError: it is something else.
    """
    done = subprocess.run(
        ["readelf", "--wide", "--dynamic", "--version-info", symbols, str(path)],
        env={**os.environ, "LC_ALL": "C"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SetupError(f"{path} cannot be read: {done.stderr.strip()}")
    versions, soname = dict[str, tuple[str, str]](), ""
    for library, version, number in _VERSION.findall(done.stdout):
        soname = library or soname
        if number:
            versions[number] = (soname, version)
    defined, undefined = set[str](), dict[str, tuple[str, str]]()
    for binding, visibility, section, name, number in _SYMBOL.findall(done.stdout):
        if section == "UND" and binding != "WEAK":
            undefined[name] = versions.get(number, ("", ""))
        elif section != "UND" and visibility != "HIDDEN":
            defined.add(name)
    return Binary(set(_NEEDED.findall(done.stdout)), defined, undefined)


def files_like(site_packages: Path, patterns: Iterable[str]) -> list[Path]:
    """Return the files below site-packages that match one of the globs."""
    return sorted(
        {path for pattern in patterns for path in site_packages.glob(pattern) if path.is_file()}
    )


def system_library(compiler: str, soname: str) -> Path | None:
    """Return a library of this machine, where a compiler finds it; None where there is none."""
    command = [compiler, f"-print-file-name={soname}"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return Path(found) if found != soname and Path(found).is_file() else None
