"""Types of an engine's row in ``ENGINES``: data, and no code. Imports nothing of an engine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_memprof.errors import UsageError
from vllm_memprof.options import DeviceFactor, Option
from vllm_memprof.text import Text


@dataclass(frozen=True)
class Arguments:
    """What an engine calls the options that findings and remedies name."""

    share: str  # of memory, that it asks for where no equation names another
    #: Why a lower share makes the KV cache smaller by as much.
    share_grounds: Text
    ranks: str
    no_graphs: str
    graph_sizes: str  # a list of batch sizes
    #: Other words of a command that leave graphs out, each with its value.
    no_graphs_too: tuple[tuple[str, str], ...] = ()
    largest_graph: str | None = None  # the largest batch size, where that is the option
    #: What makes a step of requests smaller, where no profile run tells its size.
    steps: tuple[str, ...] = ()
    #: Ids of ``accounting.oom.remedies.REMEDIES`` that do not apply to the engine.
    without: frozenset[str] = frozenset()
    #: The share is one of the device's total.
    share_of_total: bool = True
    negatable: bool = True  # ``--no-x`` is an option beside ``--x``


@dataclass(frozen=True)
class EngineRow:
    """One engine: how it is started and followed, and what its options are called.

    How its server is started, by which name its plug-ins are allowed, and what it prints when it is
    ready, when it fails, and when it lost a process of its own.
    """

    name: str  # of --engine
    title: str
    package: str  # that has to be importable, and whose version counts
    server: tuple[str, ...]  # arguments of the interpreter; the model follows
    driver: str  # module that runs it without a server; known here by name alone
    modes: tuple[str, ...]  # serve | offline | plan
    plugins: str  # variable: an allow-list of plug-ins by name
    group: str  # of our entry point
    #: Name of a run's engine by the package that tells it: the first that is installed counts.
    known_as: tuple[tuple[str, str], ...]
    #: Its line at readiness, for an engine in which our own event is missing.
    ready_line: bytes
    #: What it logs when it has failed and is about to end.
    fatal_lines: tuple[bytes, ...]
    hooks: str  # module with its rows of hooks, imported in its processes
    logger: str  # a child of its own: level, format and process prefix apply
    #: Module whose function is calling the plug-in, with that function's name where the module has
    #: several -> role of the process.
    roles: Mapping[tuple[str, str | None], str]
    #: What it logs when a process of its own ended and nobody had asked.
    lost_lines: tuple[bytes, ...]
    arguments: Arguments
    #: Name of its runs that are on CUDA; None: the device that a run names tells.
    cuda: str | None = None
    #: Phases that every start-up passes.
    phases: tuple[str, ...] = (
        *("device_init", "hccl_init", "weight_load", "profile_run"),
        *("kv_cache_alloc", "graph_capture", "warm_up"),
    )
    #: It runs a profile of the largest step, and measures weights; else it reads its free memory.
    profiles: bool = True
    #: Its size of the KV cache is that of its tokens, not of what it was given to fill.
    whole_pools: bool = False
    compared: Text | None = None  # what a comparison with another engine has to say
    beside: tuple[str, ...] = ()  # modules that have to be importable besides ``package``
    #: Module whose ``EQUATIONS`` tell how it sizes its KV cache.
    equations: str | None = None
    log_lines: str | None = None  # module whose ``LOG`` has its lines; None: those of vLLM alone
    #: Path fragments of frames that only forward ``empty_cache``.
    forwarders: tuple[str, ...] = ()
    #: Its functions that empty the cache only to read memory: patterns of module and function, and
    #: what they do.
    observing: tuple[tuple[str, str, Text], ...] = ()
    #: Class of a KV pool that stands for a spec of vLLM's: its layers take as much -> that spec.
    pools: Mapping[str, str] = field(default_factory=dict)
    process_title: str | None = None  # what its processes' titles begin with, before "::"
    parallel_state: str | None = None  # module in which it keeps its groups by name
    #: Function that finds the requests of a failed step in its frames: ``module:name``; None: the
    #: output of the scheduler tells them.
    failed_requests: str | None = None
    #: Options whose values multiply to the number of devices of a plan.
    devices: tuple[DeviceFactor, ...] = ()
    set_up: tuple[Option, ...] = ()  # what the set-up of a run is read from, in a log too
    part: tuple[Option, ...] = ()  # what says which part of a deployment a host is
    #: A host of a deployment that has no API server prints no ``ready_line``: what it prints of its
    #: head, HOST:PORT in the group, and what each of its engine cores prints when it is ready.
    head_line: re.Pattern[bytes] | None = None
    core_ready_line: bytes | None = None
    #: What its API server logs when an engine core said that it fails, on whatever host.
    dead_core_line: bytes | None = None
    #: Stack of a simulated device where none is named; None: the default of ``sim``.
    stack: str | None = None
    stack_engine: str = ""  # ``engine`` of the stacks that it runs on
    #: Sources, as globs below its package, that name its options.
    option_files: tuple[str, ...] = ()
    #: Packages that it needs besides, which no stack of a simulated device has.
    needs: str | None = None
    #: Options of memprof that it has no counterpart for.
    without: tuple[str, ...] = ()
    #: One of those -> what to do, where that is not to leave it out.
    instead: Mapping[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)  # unless the user set them
    #: Its server is a script that pip installs, for which Python does not look for modules in the
    #: current folder, as it does for ``python -m``.
    script: bool = False
    #: First release whose plans can be forked after the engine's import; see ``launch.warm``. None:
    #: no release.
    warm_since: tuple[int, int] | None = None

    @property
    def folder(self) -> str:
        """Return its package: ``failures.toml`` and ``findings.toml`` there are its own."""
        return self.hooks.rpartition(".")[0]


def refuse(row: EngineRow, option: str) -> None:
    """Refuse an option that an engine has no counterpart for.

    Raises:
        UsageError: it has none.
    """
    if option in row.without:
        hint = row.instead.get(option, "leave it out")
        raise UsageError(f"{option} has no counterpart in {row.title}", hint=hint)


def same_lines(one: str, other: str) -> bool:
    """Return True for equations whose lines one start may print."""
    return one == other or {one, other} == {"E4", "E4p"}
