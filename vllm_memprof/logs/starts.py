"""Sorts figures into starts of an engine and their workers.

One text may hold several starts, instances and ranks, with or without prefixes. A start is first
set up by lines without figures, and waits; the first figure of one of its processes opens it. A
figure belongs to the open start whose process printed it; without a prefix to the newest start. A
new start begins after a line that starts an engine, after a heading, when a process prints a line
of a stage that it has passed, or when it prints another value for a figure that has one value per
start.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations, starmap

from vllm_memprof.engines import VLLM
from vllm_memprof.engines.line_format import (
    ENGINE,
    LOAD,
    OOM,
    PLAN,
)
from vllm_memprof.files import limit
from vllm_memprof.logs.config import WITHIN_CORE, Config, ConfigLine, ConfigReader
from vllm_memprof.logs.engine_start import EngineStart, Worker
from vllm_memprof.logs.figures import Figure, ParsedLine, Prefix
from vllm_memprof.logs.formats import LOGS, words
from vllm_memprof.logs.notes import LogNotes
from vllm_memprof.logs.npu_smi import NpuSmi
from vllm_memprof.logs.tracebacks import Tracebacks
from vllm_memprof.record.loader import PrintedSleep

_BROKEN, _UP = words("broken"), words("ready")
_SPEAKS = {log.engine: log.speaks for log in LOGS.values()}
#: Starts that still take figures from their processes; older ones are closed.
OPEN_STARTS = 8
#: Starts that are kept of one log, workers of a start, sleeps of a worker; the rest is counted.
MAX_STARTS, MAX_WORKERS, MAX_SLEEPS = 500, 4096, 4096
#: Figures that a worker prints each time it sleeps, in their order in one line.
_SLEPT = ("sleep_freed_bytes", "sleep_in_use_bytes")
#: Figures of which the least of several workers counts.
_LEAST_OF_PLANS = ("tokens", "max_concurrency", "blocks", "fitting_blocks")

_LOADS = re.compile(r"Starting to load model (?P<model>\S+?)(?:\.\.\.|\s|$)")
_RANK_LINE = re.compile(
    r"rank (?P<rank>\d+) in world size \d+ is assigned as DP rank (?P<dp>\d+),"
    r" PP rank (?P<pp>\d+),(?: PCP rank (?P<pcp>\d+),)? TP rank (?P<tp>\d+)"
)


class StartSorter:
    """Takes parsed lines in order; ``starts`` is the result."""

    def __init__(self) -> None:
        self.starts: list[EngineStart] = []
        self.left_out = 0  # starts beyond MAX_STARTS
        self.lines = 0
        self.telling = ""  # the last line that may tell of a failure
        self.spoken: set[str] = set()  # engines that have a line of their own
        self.newest_first = False  # the lines were turned round before they were read
        self.smi = NpuSmi()
        self.notes = LogNotes()
        self._reader = ConfigReader()
        self.exports = self._reader.exports
        self._waiting: list[EngineStart] = []  # set up, without figures
        self._pending: EngineStart | None = None  # the newest of them
        self._section = False  # a heading came: the next figure begins a start of the same set-up
        #: By (process id, address of its host): label and place.
        self._ranks_by_pid: dict[tuple[int | None, str | None], tuple[str, dict[str, int]]] = {}
        self._document = Config()  # of the whole log, as far as nothing else is said
        self._loading = ""  # the model whose weights are being loaded
        self._tracebacks = Tracebacks()
        self.full = False  # with as many workers as may be: further starts are not read

    @property
    def config(self) -> Config:
        """Return what is known of a start without figures."""
        return self._document if self._pending is None else self._pending.config

    @property
    def _newest(self) -> EngineStart | None:
        """Return the newest start, where none has been set up after it."""
        return self.starts[-1] if self.starts and self._pending is None else None

    def sort(self, lines: Iterable[ParsedLine]) -> StartSorter:
        """Read all lines of a log."""
        for line in lines:
            self.read(line)
        if self._pending is not None and len(self.starts) == 1:
            only = self.starts[0]  # its command may stand below its log
            if not only.config.command:
                only.config = self._pending.config.merged(only.config)
        return self

    def read(self, line: ParsedLine) -> None:
        """Read one line."""
        self.lines += 1
        found = self._reader.read(line.text)
        if found is not None:
            self._configure(found, line.prefix)
        prefix = line.prefix
        match = _RANK_LINE.search(line.text) if "is assigned as" in line.text else None
        if match is not None and prefix is not None and prefix.pid is not None:
            # a worker names its place: kept by process id
            start = self._waiting_for(prefix) or next(reversed(self.starts), None)
            config = Config() if start is None else start.config
            places = ("dp", *WITHIN_CORE)
            dims = {name: int(match[name]) for name in places if match[name] is not None}
            several = [
                name
                for name in dims
                if (config.parallel_size(name) or (2 if name == "tp" else 1)) > 1
            ]
            label = "_".join(f"{name.upper()}{dims[name]}" for name in several)
            if len(self._ranks_by_pid) >= MAX_WORKERS:
                self._ranks_by_pid.clear()
            known = label, {**dims, "rank": int(match["rank"])}
            self._ranks_by_pid[prefix.pid, prefix.ip] = known
        if "Starting to load" in line.text and (match := _LOADS.search(line.text)):
            # a worker that has loaded a model and goes on with another one loads a draft model
            again = self._section or match["model"] == self._loading
            newest = None if again else self._newest
            if newest is not None and all(each.stage == LOAD for each in newest.workers.values()):
                newest.config = replace(newest.config, draft_model=True)
            self._loading = match["model"]
        self._tracebacks.read(line)
        if self.starts and not line.figures:
            up = any(text in line.text for text in _UP)
            broken = any(text in line.text for text in _BROKEN)
            if up or broken:  # of the start whose process this is; the newest where none is known
                mine = (each for each in self.starts[-OPEN_STARTS:] if each.has(line.prefix))
                start = next(reversed([*mine]), self.starts[-1])
                start.finished, start.broken = start.finished or up, start.broken or broken
        if VLLM.name not in self.spoken:  # it is in most lines; another counts where it is in none
            self.spoken.update(name for name, own in _SPEAKS.items() if own.search(line.text))
        self.smi.read(line.text)
        self.notes.read(line.text)
        if line.figures and not self.full:
            self._add_figures(line)

    # --- set-up

    def _configure(self, found: ConfigLine, prefix: Prefix | None) -> None:
        config = found.config
        if config.engine:
            named = Config(engine=config.engine, ascend_version=config.ascend_version)
            self._document = self._document.merged(named)
        if found.kind in ("trace", "heading"):
            heading = found.kind == "heading"
            self._section = self._section or heading
            start = self._pending or (None if heading else self._newest)
            if start is not None:
                start.config = start.config.merged(config)
            if start is None or heading:
                self._document = self._document.merged(config)
            return
        newest = self._newest
        if newest is not None and found.kind == "init" and newest.takes_core(prefix):
            newest.config = newest.config.merged(config)
            return
        pending = self._waiting_for(prefix)
        if pending is None or (found.kind in pending.kinds and not pending.takes_core(prefix)):
            # what the same process has said before is over
            beside = [each for each in self._waiting if prefix not in each.members.values()]
            pending = self._pending = EngineStart(
                Config(around=self._document.engine, ascend_version=self._document.ascend_version)
            )
            self._waiting = [*(beside[-OPEN_STARTS:] if prefix else ()), pending]
            self._document = Config(engine=self._document.engine)
        pending.config = pending.config.merged(config)
        pending.kinds.add(found.kind)
        if prefix is not None:
            pending.members[prefix.label] = prefix

    def _waiting_for(self, prefix: Prefix | None) -> EngineStart | None:
        """Return the start that waits for a process; the newest where in doubt."""
        near = [
            (distance, -order)
            for order, each in enumerate(self._waiting)
            if (distance := each.distance(prefix)) is not None
        ]
        return self._waiting[-min(near)[1]] if near else self._pending

    # --- figures

    def _add_figures(self, line: ParsedLine) -> None:
        prefix, figures = line.prefix, list(line.figures)
        start = self._newest
        # a line that its engine alone prints while it serves begins no start, also below a heading,
        # as a driver puts it between requests
        if start is None or not all(
            figure.format.engine == start.log.engine and figure.format.stage is None
            for figure in figures
        ):
            start = self._start_of(prefix)
        names_worker = prefix is not None and prefix.is_worker and prefix.short is not None
        in_core = any(worker.in_core for worker in start.workers.values())
        if start.rejects(figures) or (names_worker and in_core):
            start = self._restart(start)
        engine_figures = [figure for figure in figures if figure.format.scope == ENGINE]
        rank_figures = [figure for figure in figures if figure.format.scope != ENGINE]
        if engine_figures:
            dp = None if prefix is None else prefix.dims.get("dp")
            plan = start.kv_plans.setdefault(dp, {})
            clash = any(
                one.name in plan and not plan[one.name].agrees(one) for one in engine_figures
            )
            if clash and start.config.world_size <= 1:
                start = self._restart(start)
                plan = start.kv_plans.setdefault(dp, {})
            for figure in engine_figures:  # of several workers the least counts
                known = plan.setdefault(figure.name, figure)
                if figure.name in _LEAST_OF_PLANS and figure.value < known.value:
                    plan[figure.name] = figure
        if rank_figures:
            start = self._add_to_worker(start, prefix, rank_figures)
        start.first_line = start.first_line or line.line
        start.last_line = line.line
        for figure in figures:
            if engine := start.engine_of(figure):
                start.engines.add(engine)
            if figure.format.equation:
                start.equations.setdefault(figure.format.equation, line.line)
        if prefix is not None:
            start.members.setdefault(prefix.label, prefix)

    def _start_of(self, prefix: Prefix | None) -> EngineStart:
        """Return the start to which the process of a prefix belongs, if need be a new one."""
        candidates = self.starts[-OPEN_STARTS:]
        pending = self._waiting_for(prefix)
        if prefix is not None and prefix.pid is not None:
            newer = [] if pending is None else [pending]
            for start in reversed(candidates):
                newer.append(start)
                if start.has(prefix) and not start.anonymous:
                    if any(starmap(EngineStart.shares, combinations(newer, 2))):
                        break  # the same process ids, as in a container: this start is over
                    return start
        near = None if pending is None else pending.distance(prefix)
        if self._section or not self.starts or (pending is not None and near is None):
            return self._new_start(pending)
        newest = self.starts[-1]
        if prefix is None or prefix.pid is None or (prefix.is_worker and prefix.short is None):
            return newest if pending is None else self._new_start(pending)
        if newest.has(prefix) and pending is None:
            return newest
        beside = [
            (distance, -order)
            for order, each in enumerate(reversed(candidates))
            if prefix.label not in each.members
            and not each.anonymous
            and (distance := each.distance(prefix)) is not None
        ]
        if beside and (near is None or min(beside)[0] < near):
            return candidates[min(beside)[1] - 1]
        other = pending is not None or prefix.label in newest.members
        return self._new_start(pending) if other else newest

    def _new_start(self, pending: EngineStart | None) -> EngineStart:
        """Open a start that waits; without one begin a start with the set-up of the one before."""
        if pending is not None:
            start = pending
            around = replace(self._document, engine=None, ascend_version=None)
            start.config = replace(around, around=self._document.engine).merged(start.config)
            self._waiting.remove(start)
        else:
            previous = self.starts[-1].config if self.starts else Config()
            start = EngineStart(previous.merged(self._document))
            if self._section and start.config.command:
                start.heading = start.config.heading
        if pending is self._pending:
            self._pending = None
        self._section = False
        if sum(len(each.workers) for each in self.starts) >= limit("workers"):
            self.full = True
            return start
        if len(self.starts) >= MAX_STARTS:
            self.left_out += 1
            self.starts.pop()
        self.starts.append(start)
        return start

    def _restart(self, start: EngineStart) -> EngineStart:
        """Return a new start, with the set-up of the previous one where no line gave another."""
        configured = self._pending is not None or self._section
        new = self._new_start(self._pending)
        if not configured:
            new.config, new.heading = start.config, start.heading
            new.inferred = True
        return new

    def _add_to_worker(
        self, start: EngineStart, prefix: Prefix | None, figures: list[Figure]
    ) -> EngineStart:
        """Add a worker's figures; return their start, which is a new one where they contradict."""
        is_oom = any(figure.format.stage == OOM for figure in figures)
        device = next((figure.device for figure in figures if figure.device is not None), None)
        if is_oom and any(worker.has_all(figures) for worker in start.workers.values()):
            return start  # executors print a worker's error again
        worker = self._worker(start, prefix, device if is_oom else None)
        worker.device = worker.device or device
        if is_oom:
            # the first OOM is the cause; later ones are counted only
            if worker.oom is None:
                worker.oom = start.oom_of(worker, self._tracebacks.take(prefix), self.notes)
                self.notes = LogNotes()
            elif any(figure.name == "oom_requested_bytes" for figure in figures):
                worker.oom.failures += 1
            if worker.oom.failures > 1 or any(map(worker.contradicts, figures)):
                return start
        figures = start.of_two_models(worker, figures)
        apart = [figure for figure in figures if start.several_values(figure)]
        worker.unknown |= {figure.name for figure in apart if worker.contradicts(figure)}
        single = [figure for figure in figures if figure not in apart]
        again = single if start.drafts else figures
        if any(map(worker.restarts_with, again)) or any(map(worker.breaks, single)):
            other = start.unnamed_peer(worker, figures)
            if other is None:
                start = self._restart(start)
                other = self._worker(start, prefix, None)
            worker = other
            worker.device = worker.device or device
        if prefix is not None and prefix.is_core:
            stages = {figure.format.stage for figure in figures}
            worker.in_core = worker.in_core or bool(stages - {None, PLAN, OOM})
        for figure in figures:
            worker.add(figure)
        slept = [int(figure.value) for figure in figures if figure.name in _SLEPT]
        if slept and len(worker.sleeps) < MAX_SLEEPS:
            worker.sleeps.append(PrintedSleep(figures[0].line, *slept[:2]))
        return start

    def _worker(self, start: EngineStart, prefix: Prefix | None, oom_device: str | None) -> Worker:
        """Return the worker of a prefix, if need be a new one."""
        key, label, dims = "", None, {}
        if prefix is not None and prefix.is_worker:
            assigned = self._ranks_by_pid.get((prefix.pid, prefix.ip))
            by_pid = f"pid {prefix.pid}" if prefix.ip is None else f"{prefix.ip} pid {prefix.pid}"
            if assigned is not None:
                label, dims = prefix.short or assigned[0] or None, {**assigned[1], **prefix.dims}
                key = label or f"pid {prefix.pid}"
            else:
                key = label = prefix.short or by_pid
                dims = prefix.dims
                if prefix.label.startswith("rank_"):
                    # torch names a worker by its rank, vLLM by its place
                    for worker in start.workers.values():
                        rank = worker.dims.get("rank")
                        if rank is None and not {"dp", "pp", "pcp"} & worker.dims.keys():
                            rank = worker.dims.get("tp")
                        if rank == dims["rank"]:
                            key, label, dims = worker.key, worker.label, worker.dims
                            break
        elif prefix is not None and prefix.replica is not None:
            # with one worker per engine core, the core prints the worker's lines
            key = label = f"DP{prefix.replica}"
            dims = prefix.dims
        first = start.workers.get(key)
        if oom_device and label is None and first and first.device not in (None, oom_device):
            key = f"device {oom_device}"  # OOM messages of several devices: several workers
        if key not in start.workers:
            named = prefix is not None and prefix.is_worker and not start.anonymous
            worker = Worker(key, label, prefix.pid if named and prefix is not None else None, dims)
            if len(start.workers) >= MAX_WORKERS:
                return worker  # read, and not kept
            start.workers[key] = worker
        return start.workers[key]
