"""An engine's row in ``ENGINES``: what ``row.json`` of its folder says. Imports none of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vllm_memprof.errors import UsageError
from vllm_memprof.files import read_table
from vllm_memprof.options import DeviceFactor, Kind, Option

_KINDS: dict[str, Kind] = {"str": str, "int": int, "float": float, "bool": bool}


@dataclass(frozen=True)
class Arguments:
    """What an engine calls the options that findings and remedies name."""

    share: str  # of memory, that it asks for where no equation names another
    #: Why a lower share makes the KV cache smaller by as much.
    share_grounds: str
    ranks: str
    no_graphs: str
    graph_sizes: str  # a list of batch sizes
    #: Other words of a command that leave graphs out, each with its value.
    no_graphs_too: tuple[tuple[str, str], ...] = ()
    largest_graph: str | None = None  # the largest batch size, where that is the option
    #: What makes a step of requests smaller, where no profile run tells its size.
    steps: tuple[str, ...] = ()
    #: Ids of ``accounting.oom.remedies.REMEDIES`` that do not apply to the engine.
    without: tuple[str, ...] = ()
    #: The share is one of the device's total.
    share_of_total: bool = True
    negatable: bool = True  # ``--no-x`` is an option beside ``--x``


@dataclass(frozen=True)
class EngineRow:
    """One engine: how it is started and followed, and what its options are called."""

    folder: Path  # with all that is about it
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
    #: What it logs. ``ready``: that it is up, as our own event of that may be missing; ``fatal``:
    #: that it has failed and is about to end; ``lost``: that a process of its own ended and nobody
    #: had asked. A host of a deployment without an API server prints none of the first, but of its
    #: head (``head``, HOST:PORT in the group), and each engine core that it is there
    #: (``core_ready``). ``dead_core``: what an API server logs when an engine core said that it
    #: fails, on whatever host.
    lines: Mapping[str, re.Pattern[str]]
    logger: str  # a child of its own: level, format and process prefix apply
    #: Module whose function is calling the plug-in, or ``module:function`` where it has several ->
    #: role of the process.
    roles: Mapping[str, str]
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
    compared: str | None = None  # what a comparison with another engine has to say
    beside: tuple[str, ...] = ()  # modules that have to be importable besides ``package``
    log_lines: str | None = None  # module whose ``LOG`` has its lines; None: it prints none
    #: Path fragments of frames that only forward ``empty_cache``.
    forwarders: tuple[str, ...] = ()
    #: Its functions that empty the cache only to read memory: patterns of module and function, and
    #: what they do.
    observing: tuple[tuple[str, str, str], ...] = ()
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
    #: Stack of a simulated device where none is named; None: the default of ``sim``.
    stack: str | None = None
    stack_engine: str = ""  # ``engine`` of the stacks that it runs on
    #: Sources, as globs below its package, that name its options.
    option_files: tuple[str, ...] = ()
    #: Packages that it needs besides, which no stack of a simulated device has.
    needs: str | None = None
    #: Options of memprof that it has no counterpart for -> what to do instead.
    without: Mapping[str, str] = field(default_factory=dict)
    #: Its server is a script that pip installs, for which Python does not look for modules in the
    #: current folder, as it does for ``python -m``.
    script: bool = False
    #: First release whose plans can be forked after the engine's import; see ``launch.warm``. None:
    #: no release.
    warm_since: tuple[int, int] | None = None
    #: Its --quantization of weights that msmodelslim has made.
    quantization: str = "ascend"


def read_row(folder: Path) -> EngineRow:
    """Return the row of an engine, from its folder."""
    given = read_table(folder / "row.json")
    for name in ("set_up", "part"):
        options = given.get(name, ())
        given[name] = tuple(Option(option, _KINDS[kind], *also) for option, kind, *also in options)
    given["arguments"] = Arguments(**given["arguments"])
    given["devices"] = tuple(DeviceFactor(*size) for size in given.get("devices", ()))
    given["lines"] = {what: re.compile(line) for what, line in given["lines"].items()}
    return EngineRow(folder, **given)


def refuse(row: EngineRow, option: str) -> None:
    """Refuse an option that an engine has no counterpart for.

    Raises:
        UsageError: it has none.
    """
    if option in row.without:
        raise UsageError(f"{option} has no counterpart in {row.title}", hint=row.without[option])


def same_lines(one: str, other: str) -> bool:
    """Return True for equations whose lines one start may print."""
    return one == other or {one, other} == {"E4", "E4p"}
