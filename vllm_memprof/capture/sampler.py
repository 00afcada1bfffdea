"""Steps of one process while it serves: the engine's calls enter, samples and requests leave.

Runs in workers and engine cores, with ``MEMPROF_SAMPLE`` only. In a step only the counters of
torch's allocator are read, which are host memory: nothing is reset, nothing waits for the device.

The allocator keeps one peak, which memprof does not reset. Where that peak rose between two
readings, the most that was allocated in between is known; where it did not, it is between the
readings and the run peak, and is written as null.
"""

from __future__ import annotations

import heapq
import json
import time
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from vllm_memprof.capture import items as mm_items
from vllm_memprof.capture.probe import Backend, HostMemory, Probe
from vllm_memprof.capture.sample_files import Losses, SampleFiles
from vllm_memprof.record.schema import (
    KV_SAMPLE_FIGURES,
    LARGEST,
    SAMPLE_FIGURES,
    SAMPLED_REQUESTS,
)
from vllm_memprof.redact import redact_text

#: The part of a step outside the multimodal stages.
STEP = "step"
#: Characters of a request's id at most: the client may choose it.
_ID_LENGTH = 80
#: Maxima that are remembered while requests run: more of them is a record of a year.
_MOST_MAXIMA = 4096
#: Bytes and items of an encoder cache that there is not.
_NOT_HELD = (None, None)
#: What makes a request large.
_RANKED_BY = ("allocated_peak_bytes", "left_allocated_bytes", "left_reserved_bytes")


class Every(NamedTuple):
    """How often a step is sampled: every ``steps`` steps, or every ``ns`` nanoseconds."""

    steps: int = 0
    ns: int = 0


def parse_every(text: str) -> Every:
    """Return what ``16`` or ``5s`` means.

    Raises:
        ValueError: it is neither, or not above 0.
    """
    every = Every(ns=int(float(text[:-1]) * 1e9)) if text.endswith("s") else Every(steps=int(text))
    if max(every) <= 0:
        raise ValueError(f"{text!r} is not above 0")
    return every


class AllocatorCounters(NamedTuple):
    """The allocator's counters at one moment, in bytes."""

    t_ns: int
    allocated: int
    allocated_peak: int  # since the engine last reset it
    reserved: int
    reserved_peak: int
    total: int  # handed out since the process began


class _Peak(NamedTuple):
    step: int
    value: int
    stage: str


class _Maxima:
    """The largest value since any step: a list of falling values, the newest at the end."""

    def __init__(self) -> None:
        self._peaks: list[tuple[int, int, str]] = []  # as _Peak; in each step, so no class

    def add(self, step: int, value: int, stage: str) -> None:
        peaks = self._peaks
        while peaks and peaks[-1][1] <= value:
            peaks.pop()
        peaks.append((step, value, stage))
        if len(peaks) > _MOST_MAXIMA:
            del peaks[: _MOST_MAXIMA // 2]

    def since(self, step: int) -> _Peak | None:
        at = bisect_left(self._peaks, step, key=lambda peak: peak[0])
        return _Peak(*self._peaks[at]) if at < len(self._peaks) else None


@dataclass(slots=True)
class _Running:
    """A request that this worker has, and what was read before its first step."""

    id: str  # as it is written
    quoted: str  # the same as JSON
    step: int
    before: AllocatorCounters | None
    readings: int  # of this process, before it
    prompt_tokens: int | None
    items: list[dict[str, object]]


@dataclass
class _Stage:
    stage: str
    begin: AllocatorCounters | None
    begin_ns: int
    requests: list[str]
    items: list[dict[str, object]]


@dataclass
class Sampler:
    """The samples of one process.

    Attributes:
        on_request_end: called with the id of a request that this worker no longer has.
        on_core_request_end: called with the id of a request that this engine core has ended.
    """

    run_dir: Path
    probe: Probe
    every: Every
    losses: Losses | None = None  # keeps account of lines that could not be written
    on_request_end: list[Callable[[str], None]] = field(default_factory=list)
    on_core_request_end: list[Callable[[str], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.files = SampleFiles(self.run_dir, self._kept, self.losses)
        self._largest: dict[str, list[tuple[int, int, dict[str, object]]]] = {}
        self._count = 0
        # worker
        self.step = 0
        self._output: Any = None  # the scheduler's, of the step under way
        self._runner: Any = None  # while a step is under way
        self._inside = 0  # calls of execute_model under way: an override calls the one below
        self._since = 0  # steps since the last sample
        self._sampled_ns = 0
        self._readings = 0
        self._counters: tuple[Backend, int, Callable[[int], Mapping[str, Any]]] | None = None
        self._last: AllocatorCounters | None = None
        self._allocated_high: int | None = None  # exact peak since the last sample
        self._reserved_high: int | None = None
        self._run_peaks = (0, 0)
        self._requests: dict[str, _Running] = {}
        self._gone: list[str] = []
        self._peaks, self._together = _Maxima(), _Maxima()
        self._stages: list[_Stage] = []
        self._cache: Mapping[Any, Any] | None = None
        self._cache_size: tuple[int, int] | None = None  # bytes, items
        self._cached_items: dict[Hashable, dict[str, object]] = {}
        self.config: Any = None  # the model's hf_config
        # engine core
        self.core_step = 0
        self._core_since = 0
        self._core_sampled_ns = 0
        self._known: dict[str, str] = {}  # id of a request -> as it is written
        self._host = HostMemory()

    def after_fork(self) -> None:
        """Close the child's copies of what is open; the sampler is its parent's."""
        self.files.close()
        self._host.close()

    # --- readings

    def read(self) -> AllocatorCounters | None:
        """Read the allocator's counters; None where the device is not initialised."""
        probe, known = self.probe, self._counters
        if known is not None and known[0] is probe.backend and known[1] == probe.device:
            return self._read(known[2](known[1]))
        backend, device = probe.backend, probe.device
        if backend is None or not backend.is_ready():
            return None
        if device is None:
            return self._read(backend.stats(backend.current_device()))
        # ready once is ready for good, so the call can be kept; a forked child has a sampler anew
        call = backend.stats if backend.bare_stats is None else backend.bare_stats()
        self._counters = backend, device, call
        return self._read(call(device))

    def _read(self, stats: Mapping[str, Any]) -> AllocatorCounters:
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        peak, reserved_peak = allocated["peak"], reserved["peak"]
        now = AllocatorCounters(
            time.monotonic_ns(),
            allocated["current"],
            peak,
            reserved["current"],
            reserved_peak,
            allocated["allocated"],
        )
        self._readings += 1
        last, self._last = self._last, now
        if last is not None:
            if peak > last.allocated_peak:
                self._allocated_high = max(self._allocated_high or 0, peak)
            if reserved_peak > last.reserved_peak:
                self._reserved_high = max(self._reserved_high or 0, reserved_peak)
        old = self._run_peaks
        if peak > old[0] or reserved_peak > old[1]:
            self._run_peaks = max(old[0], peak), max(old[1], reserved_peak)
        return now

    def fold_peak(self) -> None:
        """Read before the engine resets the peak: the run peak stays, the next rise starts low."""
        now = self.read()
        if now is not None:
            self._last = now._replace(allocated_peak=now.allocated, reserved_peak=now.reserved)

    def _remember(
        self, stage: str, now: AllocatorCounters, before: AllocatorCounters | None
    ) -> None:
        """Keep the largest that is known of the time since ``before``."""
        most = now.allocated
        if before is not None:
            if now.allocated_peak > before.allocated_peak:
                most = now.allocated_peak
            elif before.allocated > most:
                most = before.allocated
        self._peaks.add(self.step, most, stage)

    # --- steps of a worker

    def begin_step(self, output: Any, runner: Any) -> None:
        """Take note of a step before it runs."""
        self._inside += 1
        if self._inside > 1:
            return
        if self._output is not None:
            self._end_step()
        if self._cache is None:
            self._cache = _cache_of(runner)
            config = getattr(runner, "model_config", None)
            self.config = getattr(config, "hf_config", None)
        new, finished = output.scheduled_new_reqs, output.finished_req_ids
        now = self._last
        if new or finished or now is None:
            before, now = now, self.read()
            if now is not None and self._requests:
                self._remember(STEP, now, before)  # of the step that has ended
        if finished:
            self._gone = [name for name in finished if name in self._requests]
            if output.total_num_scheduled_tokens and now is not None:
                self._forget(now)  # the step is of others: what it takes is not theirs
        self._output, self._runner = output, runner
        self.step += 1
        self._since += 1
        for request in new:
            tokens = request.prompt_token_ids
            name = clean_id(request.req_id)
            self._requests[request.req_id] = _Running(
                id=name,
                quoted=json.dumps(name),
                step=self.step,
                before=now,
                readings=self._readings,
                prompt_tokens=None if tokens is None else len(tokens),
                items=mm_items.describe(getattr(request, "mm_features", None), self.config),
            )

    def leave_call(self, ended: bool, error: BaseException | None) -> None:
        """Take note of a call's end; the step ends with the call that has its result."""
        self._inside = max(self._inside - 1, 0)
        if self._inside or self._output is None:
            return
        if error is not None:
            self.fail()
        elif ended:
            self._end_step()

    def end_step(self) -> None:
        if not self._inside and self._output is not None:
            self._end_step()

    def _end_step(self) -> None:
        if self._cache is not None and self._output.scheduled_encoder_inputs:
            self.cache_inserted()
        output, self._output, self._runner = self._output, None, None
        scheduled = output.num_scheduled_tokens
        if scheduled:
            self._together.add(self.step, len(scheduled), STEP)
        every, due = self.every, bool(self._gone)
        if not due:
            due = self._since >= every.steps if every.steps else (
                time.monotonic_ns() - self._sampled_ns >= every.ns
            )  # fmt: skip
        if not due:
            return
        before = self._last
        now = self.read()
        if now is None:
            return
        if self._requests:
            self._remember(STEP, now, before)
        if self._gone:
            self._forget(now)
        held = self._held(output)
        self.files.sample(
            "sample",
            now.t_ns,
            self.step,
            self._since,
            SAMPLE_FIGURES,
            (
                output.total_num_scheduled_tokens,
                len(scheduled),
                now.allocated,
                now.reserved,
                *(_NOT_HELD if held is None else held),
                self._allocated_high,
                self._reserved_high,
                *self._run_peaks,
            ),
            self._named(output, scheduled),
        )
        self._since, self._sampled_ns = 0, now.t_ns
        self._allocated_high = self._reserved_high = None

    def _named(self, output: Any, scheduled: Mapping[str, int]) -> str:
        """Return the requests of a step as JSON; not all of a large one."""
        new, cached = output.scheduled_new_reqs, output.scheduled_cached_reqs
        parts: list[str] = []
        known = self._requests
        if new:
            for request in new[:SAMPLED_REQUESTS]:
                name, running = request.req_id, known.get(request.req_id)
                if running is not None and name in scheduled:
                    tokens = scheduled[name]
                    done = request.num_computed_tokens + tokens
                    parts.append(f"[{running.quoted},{tokens},{done}]")
        names = cached.req_ids[: SAMPLED_REQUESTS - len(parts)]
        for name, done in zip(names, cached.num_computed_tokens, strict=False):
            running = known.get(name)
            if running is not None and name in scheduled:
                tokens = scheduled[name]
                parts.append(f"[{running.quoted},{tokens},{done + tokens}]")
        return f',"requests":[{",".join(parts)}]' if parts else ""

    def _held(self, output: Any) -> tuple[int, int] | None:
        """Return bytes and items of the encoder cache; counted again where it changed."""
        cache = self._cache
        if cache is None:
            return None
        changed = output.scheduled_encoder_inputs or output.free_encoder_mm_hashes
        if self._cache_size is None or changed or len(cache) != self._cache_size[1]:
            self._cache_size = sum(_bytes_of(each) for each in list(cache.values())), len(cache)
        return self._cache_size

    def _forget(self, now: AllocatorCounters) -> None:
        names, self._gone = self._gone, []
        for name in names:
            running = self._requests.pop(name, None)
            if running is not None:
                self._write_request(running, now, finished=True)
                for call in self.on_request_end:
                    call(running.id)

    def fail(self) -> None:
        """Write what is known of all requests, because the step or the process fails."""
        self._output, self._runner, self._inside = None, None, 0
        self._stages.clear()
        before = self._last
        now = self.read()
        if now is None:
            return
        self._remember(STEP, now, before)
        for running in self._requests.values():
            self._write_request(running, now, finished=False)
        self._requests.clear()

    def _write_request(self, running: _Running, now: AllocatorCounters, finished: bool) -> None:
        peak, most = self._peaks.since(running.step), self._together.since(running.step)
        before = running.before
        known = self._readings > running.readings
        exact = before is not None and now.allocated_peak > before.allocated_peak
        fields: dict[str, object] = {
            "t_ns": now.t_ns,
            "id": running.id,
            "begin_ns": None if before is None else before.t_ns,
            "end_ns": now.t_ns,
            "first_step": running.step,
            "last_step": self.step,
            "sampled_steps": self._readings - running.readings,
            "others": None if most is None else max(most.value - 1, 0),
            "allocated_before_bytes": None if before is None else before.allocated,
            "reserved_before_bytes": None if before is None else before.reserved,
            "allocated_peak_bytes": peak.value if known and peak is not None else None,
            "peak_exact": exact,
            "allocated_run_peak_bytes": self._run_peaks[0],
            "peak_stage": peak.stage if known and peak is not None else None,
            "peak_step": peak.step if known and peak is not None else None,
            "left_allocated_bytes": None if before is None else now.allocated - before.allocated,
            "left_reserved_bytes": None if before is None else now.reserved - before.reserved,
            "finished": finished,
            "prompt_tokens": running.prompt_tokens,
            "items": running.items,
        }
        self._rank(fields)
        self.files.event("request_memory", fields)

    def _rank(self, fields: dict[str, object]) -> None:
        self._count += 1
        for name in _RANKED_BY:
            value = fields[name]
            if isinstance(value, int):
                largest = self._largest.setdefault(name, [])
                entry = (value, self._count, fields)
                if len(largest) < LARGEST:
                    heapq.heappush(largest, entry)
                elif entry > largest[0]:
                    heapq.heapreplace(largest, entry)

    def _kept(self) -> list[dict[str, object]]:
        kept = {count: fields for each in self._largest.values() for _, count, fields in each}
        return [kept[count] for count in sorted(kept)]

    # --- multimodal stages of a worker

    @property
    def in_step(self) -> bool:
        return self._output is not None

    def begin_stage(
        self, stage: str, inputs: Mapping[str, Sequence[int]] | None = None
    ) -> _Stage | None:
        """Open a stage of the step under way; None outside of a step, as in the profile run.

        Args:
            stage: of ``schema.STAGES``.
            inputs: numbers of its items among those of each request; None: those of the step.
        """
        if self._output is None or any(each.stage == stage for each in self._stages):
            return None
        now = self.read()
        requests, items = self._scheduled_items(inputs)
        if stage == "mm_merge":
            requests = [self._name(name) for name in self._output.num_scheduled_tokens]
        t_ns = time.monotonic_ns() if now is None else now.t_ns
        opened = _Stage(stage, now, t_ns, requests[:SAMPLED_REQUESTS], items)
        self._stages.append(opened)
        return opened

    def end_stage(self, opened: _Stage, error: BaseException | None) -> None:
        while self._stages and self._stages.pop() is not opened:
            pass
        before = opened.begin
        now = self.read()
        if now is not None and self._requests:
            self._remember(opened.stage, now, before)
        self._write_stage(opened, before, now, error)

    def stage_seen(self, stage: str, items: list[dict[str, object]]) -> None:
        """Write a stage that is a moment: what the encoder cache takes or gives up."""
        now = self.read()
        t_ns = time.monotonic_ns() if now is None else now.t_ns
        requests = [str(name) for item in items if (name := item.get("request")) is not None]
        self._write_stage(_Stage(stage, now, t_ns, requests, items), now, now, None)

    def _write_stage(
        self,
        opened: _Stage,
        before: AllocatorCounters | None,
        now: AllocatorCounters | None,
        error: BaseException | None,
    ) -> None:
        rose = rose_reserved = False
        if before is not None and now is not None:
            rose = now.allocated_peak > before.allocated_peak
            rose_reserved = now.reserved_peak > before.reserved_peak
        cache = self._cache
        self.files.event(
            "stage",
            {
                "t_ns": time.monotonic_ns() if now is None else now.t_ns,
                "stage": opened.stage,
                "begin_ns": opened.begin_ns,
                "step": self.step,
                "requests": opened.requests,
                "items": opened.items,
                "allocated_before_bytes": None if before is None else before.allocated,
                "allocated_bytes": None if now is None else now.allocated,
                "reserved_before_bytes": None if before is None else before.reserved,
                "reserved_bytes": None if now is None else now.reserved,
                "allocated_total_bytes": (
                    None if now is None or before is None else now.total - before.total
                ),
                "allocated_peak_bytes": now.allocated_peak if rose and now else None,
                "reserved_peak_bytes": now.reserved_peak if rose_reserved and now else None,
                "encoder_cache_bytes": (
                    None if cache is None else sum(_bytes_of(each) for each in list(cache.values()))
                ),
                "error": None if error is None else f"{type(error).__name__}: {error}",
            },
        )

    def _scheduled_items(
        self, inputs: Mapping[str, Sequence[int]] | None = None
    ) -> tuple[list[str], list[dict[str, object]]]:
        """Return the requests and the items that the encoder is to run in this step."""
        names, found = [], []
        scheduled = self._output.scheduled_encoder_inputs if inputs is None else inputs
        for name, numbers in (scheduled or {}).items():
            running = self._requests.get(name)
            names.append(self._name(name))
            for at in numbers:
                item = running.items[at] if running and at < len(running.items) else {}
                found.append({"request": names[-1], **item})
        return names, found

    def _name(self, name: str) -> str:
        running = self._requests.get(name)
        return clean_id(name) if running is None else running.id

    def cache_inserted(self) -> None:
        """Write which items the runner keeps since the step began."""
        cache = self._cache
        if cache is None or self._output is None or not self._output.scheduled_encoder_inputs:
            return
        hashes = self._hashes_scheduled(self._runner)
        items = []
        for key, item in hashes:
            if key in cache and key not in self._cached_items:
                known = {**item, "bytes": _bytes_of(cache[key])}
                self._cached_items[key] = known
                items.append(known)
        if items:
            self.stage_seen("mm_cache_insert", items)

    def cache_took(
        self, cache: Mapping[Any, Any], key: Hashable, place: tuple[str, int] | None
    ) -> None:
        """Write that a process keeps an output of the encoder now, and which it gave up for it.

        Args:
            cache: outputs that it keeps, by key.
            key: of the output.
            place: request and number of the item among its own; None: not known.
        """
        self._cache, self._cache_size = cache, None
        gone = [self._cached_items.pop(each) for each in list(self._cached_items)
                if each not in cache]  # fmt: skip
        if gone:
            self.stage_seen("mm_cache_evict", gone)
        if key not in cache or key in self._cached_items:
            return
        item: dict[str, object] = {}
        if place is not None:
            running = self._requests.get(place[0])
            known = running.items[place[1]] if running and place[1] < len(running.items) else {}
            item = {"request": self._name(place[0]), **known}
        self._cached_items[key] = item = {**item, "bytes": _bytes_of(cache[key])}
        self.stage_seen("mm_cache_insert", [item])

    def cache_evicts(self, output: Any) -> None:
        """Write which items the runner is about to give up."""
        cache = self._cache
        if cache is None or not output.free_encoder_mm_hashes:
            return
        items = []
        for key in output.free_encoder_mm_hashes:
            known = self._cached_items.pop(key, None)
            if key in cache:
                items.append(known or {"bytes": _bytes_of(cache[key])})
        if items:
            self.stage_seen("mm_cache_evict", items)

    def _hashes_scheduled(self, runner: Any) -> list[tuple[str, dict[str, object]]]:
        found = []
        states = getattr(runner, "requests", None) or {}
        by_request = getattr(getattr(runner, "encoder_cache", None), "mm_features", None) or {}
        for name, inputs in (self._output.scheduled_encoder_inputs or {}).items():
            state = states.get(name) if hasattr(states, "get") else None
            features = getattr(state, "mm_features", None) or by_request.get(name) or ()
            running = self._requests.get(name)
            for at in inputs:
                if at >= len(features):
                    continue
                item = running.items[at] if running and at < len(running.items) else {}
                key = getattr(features[at], "identifier", None)
                if key is not None:
                    found.append((key, {"request": self._name(name), **item}))
        return found

    def moment(self) -> dict[str, object] | None:
        """Return the step under way, for a failed allocation; reads nothing of the device."""
        output = self._output
        if output is None:
            return None
        scheduled = list(output.num_scheduled_tokens.items())[:SAMPLED_REQUESTS]
        opened = self._stages[-1] if self._stages else None
        return {
            "step": self.step,
            "stage": None if opened is None else opened.stage,
            "requests": [[self._name(name), tokens] for name, tokens in scheduled],
            "items": self._scheduled_items()[1] if opened is None else opened.items,
        }

    def close(self) -> None:
        """End what is under way, because the process ends."""
        if self._output is not None and not self._inside:
            self._end_step()
        now = self.read()
        if now is not None:
            for name, running in self._requests.items():
                self._write_request(running, now, finished=name in self._gone)
            self._requests.clear()

    # --- engine core

    def core_stepped(self, scheduler: Any) -> None:
        self.core_step += 1
        self._core_since += 1
        every, now_ns = self.every, time.monotonic_ns()
        due = (
            self._core_since >= every.steps
            if every.steps
            else now_ns - self._core_sampled_ns >= every.ns
        )
        if not due:
            return
        pool = getattr(getattr(scheduler, "kv_cache_manager", None), "block_pool", None)
        total = None if pool is None else pool.num_gpu_blocks - 1
        self.files.sample(
            "kv_sample",
            now_ns,
            self.core_step,
            self._core_since,
            KV_SAMPLE_FIGURES,
            (
                *self._host.read(),
                None if pool is None or total is None else total - pool.get_num_free_blocks(),
                total,
                len(scheduler.running),
                len(scheduler.waiting),
            ),
        )
        self._core_since, self._core_sampled_ns = 0, now_ns

    def request_begins(self, request: Any, config: Any) -> None:
        name = request.request_id
        if name in self._known:  # an override called the method below it
            return
        self._known[name] = written = clean_id(name)
        items = mm_items.describe(getattr(request, "mm_features", None), config)
        self.files.event(
            "request",
            {
                "t_ns": time.monotonic_ns(),
                "edge": "begin",
                "id": written,
                "prompt_tokens": getattr(request, "num_prompt_tokens", None),
                "images": mm_items.images(items),
                "items": items,
            },
        )

    def request_ends(self, request: Any) -> None:
        written = self._known.pop(request.request_id, None)
        if written is None:
            return
        self.files.event(
            "request",
            {
                "t_ns": time.monotonic_ns(),
                "edge": "end",
                "id": written,
                "output_tokens": getattr(request, "num_output_tokens", None),
                "reason": getattr(getattr(request, "status", None), "name", None),
            },
        )
        for call in self.on_core_request_end:
            call(written)


def clean_id(name: str) -> str:
    """Return a request's id without secrets, and not longer than an id is."""
    return redact_text(str(name))[:_ID_LENGTH]


def _cache_of(runner: Any) -> Mapping[str, Any] | None:
    """Return the runner's outputs of the encoder by hash; None where it keeps none."""
    cache = getattr(runner, "encoder_cache", None)
    cache = getattr(cache, "encoder_outputs", cache)  # of the V2 runner
    return cache if isinstance(cache, dict) else None


def _bytes_of(tensor: Any) -> int:
    """Return the bytes of a tensor, or of the tensors of a sequence or an object."""
    count = getattr(tensor, "numel", None)
    if callable(count):
        return int(count()) * int(tensor.element_size())
    if isinstance(tensor, Iterable) and not isinstance(tensor, (str, bytes)):
        return sum(_bytes_of(each) for each in tensor)
    return 0
