"""Engine stacks: one release of an engine with exactly the packages that it runs with.

In: ``data/stacks/<name>.toml`` and its lock file. Out: `Stack`, and the folder of an environment
for it. Runs in the launcher's process.

A stack file holds ``name``, ``title``, ``engine``, ``engine_version``, ``python`` (major.minor),
``lock`` (file name), ``download_bytes`` (all its files, for x86-64), ``disk_bytes`` (size of the
finished environment), ``temporary_bytes`` (what pip needs besides while it unpacks) and tables
``[[build]]`` for packages that are built from their source distribution: ``requirement``, with its
hash, and ``env``. Their build requirements are pinned in the lock.
Where that build leaves out an extension module, because it wants more than a C++ compiler, a table
``[build.extension]`` names what of it compiles with one: the fields of `Extension`. A package that
no index has is a table ``[[stand_in]]``, the fields of `StandIn`.

What an engine can do without is ``data/extras/<name>.lock``: packages that a stack gets when they
are asked for.

A lock file holds exact pins in pip's format, each with the hashes of its wheels for x86-64 and
aarch64. Lines ``# chunk: title`` divide it; one pip command installs a chunk.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_memprof.errors import SetupError, UsageError, did_you_mean
from vllm_memprof.files import parse_toml
from vllm_memprof.sim.folders import write_file

STACKS_DIR = Path(__file__).parent / "data/stacks"
EXTRAS_DIR = Path(__file__).parent / "data/extras"
DEFAULT_STACK = "vllm-ascend-0.23.0"
ENV_CACHE_DIR = "MEMPROF_CACHE_DIR"

_PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==(\S+)((?:\s+--hash=\S+)*)")


@dataclass(frozen=True)
class Chunk:
    """Packages that one pip command installs."""

    title: str
    pins: tuple[tuple[str, str], ...]  # (normalized name, version)
    hashes: Mapping[str, str]  # name -> pip's options --hash

    def requirements(self, pins: Iterable[tuple[str, str]]) -> list[str]:
        """Return pins as pip wants to be asked for them."""
        return [f"{name}=={version}{self.hashes[name]}" for name, version in pins]


@dataclass(frozen=True)
class Extension:
    """An extension module that the setup compiles from a package's source distribution."""

    module: str  # dotted name
    sources: tuple[str, ...]  # below the source distribution, as the folders of `includes`
    includes: tuple[str, ...] = ()
    defines: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()  # of the compiler, when it compiles and when it links


@dataclass(frozen=True)
class Build:
    """A package that is built from its source distribution."""

    name: str  # normalized
    version: str
    hashes: str  # as pip's options
    env: dict[str, str]
    extension: Extension | None = None

    @property
    def asked(self) -> tuple[list[str], list[str]]:
        """Return it as pip wants to be asked for it, and pip's options."""
        pin = f"{self.name}=={self.version}{self.hashes}"
        return [pin], ["--no-build-isolation", "--no-binary", self.name]


@dataclass(frozen=True)
class StandIn:
    """A package that no index has: the setup writes it, with the names that are imported from it.

    What computes is a file of `engine/stand_ins`; every other name fails when it is used.
    """

    package: str
    imported_by: str  # folder below site-packages whose files are read


@dataclass(frozen=True)
class Stack:
    """One engine release and the packages it runs with."""

    name: str
    title: str
    engine: str  # "vllm-ascend" or "sglang"
    engine_version: str
    python: str  # "3.11"
    chunks: tuple[Chunk, ...]
    builds: tuple[Build, ...]
    download_bytes: int
    disk_bytes: int
    temporary_bytes: int
    sources: tuple[Path, ...]  # the files it was read from
    stand_ins: tuple[StandIn, ...] = ()


def normalize(name: str) -> str:
    """Return the canonical form of a package name: lower case, runs of -_. are one dash."""
    return re.sub(r"[-_.]+", "-", name).lower()


def cache_dir() -> Path:
    """Return the folder of what can be made again: $MEMPROF_CACHE_DIR, else in the user's cache."""
    if given := os.environ.get(ENV_CACHE_DIR):
        return Path(given).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "memprof"


def default_prefix(name: str) -> Path:
    """Return the folder of a stack's environment: of the last setup, else in the cache."""
    try:
        return Path(_prefix_note(name).read_text("utf-8").strip())
    except OSError:
        return cache_dir() / "stacks" / name


def remember_prefix(name: str, prefix: Path) -> None:
    """Make a folder that the user chose the one where the other commands look."""
    note = _prefix_note(name)
    if prefix == cache_dir() / "stacks" / name:
        note.unlink(missing_ok=True)
        return
    write_file(note, f"{prefix}\n")


def _prefix_note(name: str) -> Path:
    return cache_dir() / f"stacks/{name}.prefix"


def list_stacks() -> list[Stack]:
    """Return every stack that this memprof knows, newest engine first."""
    return [_parse(path) for path in sorted(STACKS_DIR.glob("*.toml"), reverse=True)]


def load_stack(name: str | None = None) -> Stack:
    """Read the stack of that name; without one, the default.

    Raises:
        UsageError: no such stack; the message lists those there are.
    """
    wanted = name or DEFAULT_STACK
    path = STACKS_DIR / f"{wanted}.toml"
    if os.sep in wanted or not path.is_file():
        known = [stack.name for stack in list_stacks()]
        hint = did_you_mean(wanted, known, f"known: {', '.join(known)}")
        raise UsageError(f"no engine stack named {wanted!r}", hint)
    return _parse(path)


def load_extra(name: str) -> tuple[Chunk, ...]:
    """Read packages that a stack gets when they are asked for.

    Raises:
        UsageError: none of that name; the message lists those there are.
    """
    known = {path.stem: path for path in sorted(EXTRAS_DIR.glob("*.lock"))}
    if name not in known:
        raise UsageError(f"nothing named {name!r} to add to a stack", f"known: {', '.join(known)}")
    return parse_lock(known[name].read_text("utf-8"))


def _parse(path: Path) -> Stack:
    try:
        table = parse_toml(path.read_text("utf-8"))
        lock = path.parent / table.pop("lock")
        stand_ins = tuple(StandIn(**row) for row in table.pop("stand_in", []))
        builds = []
        for row in table.pop("build", []):
            extension = None
            if given := row.get("extension"):
                module = given.pop("module")
                extension = Extension(module, **{name: tuple(v) for name, v in given.items()})
            builds.append(Build(*_parse_pin(row["requirement"]), row.get("env", {}), extension))
        chunks = parse_lock(lock.read_text("utf-8"))
        return Stack(
            **table,
            chunks=chunks,
            builds=tuple(builds),
            sources=(path, lock),
            stand_ins=stand_ins,
        )
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise SetupError(
            f"the stack file {path} cannot be read: {type(error).__name__}: {error}"
        ) from error


def parse_lock(text: str) -> tuple[Chunk, ...]:
    """Return the chunks of a lock file.

    Raises:
        ValueError: a line that is neither a pin, nor a comment, nor empty; or a package pinned
        twice.
    """
    chunks: dict[str, list[tuple[str, str]]] = {}
    title, hashes = "packages", dict[str, str]()
    for line in map(str.strip, re.sub(r"\s*\\\n\s*", " ", text).splitlines()):
        if line.startswith("# chunk:"):
            title = line.removeprefix("# chunk:").strip()
        elif line and not line.startswith("#"):
            name, version, options = _parse_pin(line)
            if name in hashes:
                raise ValueError(f"{name} is pinned twice")
            hashes[name] = options
            chunks.setdefault(title, []).append((name, version))
    return tuple(Chunk(title, tuple(pins), hashes) for title, pins in chunks.items())


def _parse_pin(line: str) -> tuple[str, str, str]:
    match = _PIN.fullmatch(line)
    if not match:
        raise ValueError(f"not an exact pin: {line!r}")
    name, version, hashes = match.groups()
    return normalize(name), version, hashes
