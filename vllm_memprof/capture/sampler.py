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
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from vllm_memprof.capture import items as mm_items
from vllm_memprof.capture.attributes import reach
from vllm_memprof.capture.probe import Backend, HostMemory, Probe
from vllm_memprof.capture.sample_files import SampleFiles
from vllm_memprof.capture.writer import EventWriter
from vllm_memprof.record.schema import (
    KV_SAMPLE_FIGURES,
    LARGEST,
    SAMPLE_FIGURES,
    SAMPLED_REQUESTS,
)
from vllm_memprof.redact import redact_text
from vllm_memprof.units import minus

#: The part of a step outside the multimodal stages.
STEP = "step"
#: Characters of a request's id at most: the client may choose it.
_ID_LENGTH = 80
#: Maxima that are remembered while requests run: more of them is a record of a year.
_MOST_MAXIMA = 4096
#: What makes a request large.
_RANKED_BY = ("allocated_peak_bytes", "left_allocated_bytes", "left_reserved_bytes")


class Every(NamedTuple):
    """How often a step is sampled: every ``steps`` steps, or every ``ns`` nanoseconds."""

    steps: int = 0
    ns: int = 0

    def is_due(self, steps: int, sampled_ns: int) -> bool:
        """Return whether so many steps, or the time since the last sample, are enough."""
        return steps >= self.steps if self.steps else time.monotonic_ns() - sampled_ns >= self.ns


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


#: Counters that could not be read.
_UNREAD: Any = AllocatorCounters(*[None] * 6)  # type: ignore[arg-type]


class _Maxima:
    """The largest value since any step: a list of falling values, the newest at the end."""

    def __init__(self) -> None:
        self._peaks: list[tuple[int, int, str]] = []  # step, value, stage

    def add(self, step: int, value: int, stage: str) -> None:
        peaks = self._peaks
        while peaks and peaks[-1][1] <= value:
            peaks.pop()
        peaks.append((step, value, stage))
        if len(peaks) > _MOST_MAXIMA:
            del peaks[: _MOST_MAXIMA // 2]

    def since(self, step: int) -> tuple[int, int, str] | tuple[None, None, None]:
        at = bisect_left(self._peaks, step, key=lambda peak: peak[0])
        return self._peaks[at] if at < len(self._peaks) else (None, None, None)


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
    requests: list[str]
    items: list[dict[str, object]]
    opened_ns: int = field(default_factory=time.monotonic_ns)


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
    losses: EventWriter | None = None  # keeps account of lines that could not be written
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
            rose = now.allocated_peak > before.allocated_peak
            most = now.allocated_peak if rose else max(most, before.allocated)
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
            cache = getattr(runner, "encoder_cache", None)
            cache = getattr(cache, "encoder_outputs", cache)  # of the V2 runner
            self._cache = cache if isinstance(cache, dict) else None
            self.config = reach(runner, "model_config.hf_config")
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
        if not self._gone and not self.every.is_due(self._since, self._sampled_ns):
            return
        before = self._last
        now = self.read()
        if now is None:
            return
        if self._requests:
            self._remember(STEP, now, before)
        if self._gone:
            self._forget(now)
        cache, size = self._cache, None
        if cache is not None:
            size = self._cache_size
            changed = output.scheduled_encoder_inputs or output.free_encoder_mm_hashes
            if size is None or changed or len(cache) != size[1]:
                size = self._cache_size = _bytes_of(list(cache.values())), len(cache)
        # not all requests of a large step
        new, cached = output.scheduled_new_reqs, output.scheduled_cached_reqs
        pairs: Iterable[tuple[str, int]]
        pairs = zip(cached.req_ids, cached.num_computed_tokens, strict=False)
        if new:
            pairs = chain([(each.req_id, each.num_computed_tokens) for each in new], pairs)
        parts: list[str] = []
        for name, done in pairs:
            running = self._requests.get(name)
            if running is not None and name in scheduled:
                tokens = scheduled[name]
                parts.append(f"[{running.quoted},{tokens},{done + tokens}]")
                if len(parts) == SAMPLED_REQUESTS:
                    break
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
                *(size or (None, None)),
                self._allocated_high,
                self._reserved_high,
                *self._run_peaks,
            ),
            f',"requests":[{",".join(parts)}]' if parts else "",
        )
        self._since, self._sampled_ns = 0, now.t_ns
        self._allocated_high = self._reserved_high = None

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
        before = running.before or _UNREAD
        _, most, _ = self._together.since(running.step)
        step, peak, stage = self._peaks.since(running.step)
        if self._readings == running.readings:
            step = peak = stage = None
        fields: dict[str, object] = {
            "t_ns": now.t_ns,
            "id": running.id,
            "begin_ns": before.t_ns,
            "end_ns": now.t_ns,
            "first_step": running.step,
            "last_step": self.step,
            "sampled_steps": self._readings - running.readings,
            "others": None if most is None else max(most - 1, 0),
            "allocated_before_bytes": before.allocated,
            "reserved_before_bytes": before.reserved,
            "allocated_peak_bytes": peak,
            "peak_exact": before is not _UNREAD and now.allocated_peak > before.allocated_peak,
            "allocated_run_peak_bytes": self._run_peaks[0],
            "peak_stage": stage,
            "peak_step": step,
            "left_allocated_bytes": minus(now.allocated, before.allocated),
            "left_reserved_bytes": minus(now.reserved, before.reserved),
            "finished": finished,
            "prompt_tokens": running.prompt_tokens,
            "items": running.items,
        }
        self._count += 1
        for name in _RANKED_BY:
            value = fields[name]
            if isinstance(value, int):
                entries = [*self._largest.get(name, ()), (value, self._count, fields)]
                self._largest[name] = heapq.nlargest(LARGEST, entries)
        self.files.event("request_memory", fields)

    def _kept(self) -> list[dict[str, object]]:
        kept = {count: fields for each in self._largest.values() for _, count, fields in each}
        return [kept[count] for count in sorted(kept)]

    # --- multimodal stages of a worker

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
        opened = _Stage(stage, now, requests[:SAMPLED_REQUESTS], items)
        self._stages.append(opened)
        return opened

    def end_stage(self, opened: _Stage, error: BaseException | None) -> None:
        while self._stages and self._stages.pop() is not opened:
            pass
        now = self.read()
        if now is not None and self._requests:
            self._remember(opened.stage, now, opened.begin)
        self._write_stage(opened, now, error)

    def stage_seen(self, stage: str, items: list[dict[str, object]]) -> None:
        """Write a stage that is a moment: what the encoder cache takes or gives up."""
        now = self.read()
        requests = [str(name) for item in items if (name := item.get("request")) is not None]
        self._write_stage(_Stage(stage, now, requests, items), now)

    def _write_stage(
        self, opened: _Stage, now: AllocatorCounters | None, error: BaseException | None = None
    ) -> None:
        before, after = opened.begin or _UNREAD, now or _UNREAD
        peaks: dict[str, int | None] = {}
        for kind in ("allocated_peak", "reserved_peak"):
            high, old = getattr(after, kind), getattr(before, kind)
            # one that rose in between is the stage's
            peaks[f"{kind}_bytes"] = high if (minus(high, old) or 0) > 0 else None
        cache = self._cache
        self.files.event(
            "stage",
            {
                "t_ns": after.t_ns or time.monotonic_ns(),
                "stage": opened.stage,
                "begin_ns": before.t_ns or opened.opened_ns,
                "step": self.step,
                "requests": opened.requests,
                "items": opened.items,
                "allocated_before_bytes": before.allocated,
                "allocated_bytes": after.allocated,
                "reserved_before_bytes": before.reserved,
                "reserved_bytes": after.reserved,
                "allocated_total_bytes": minus(after.total, before.total),
                **peaks,
                "encoder_cache_bytes": None if cache is None else _bytes_of(list(cache.values())),
                "error": None if error is None else f"{type(error).__name__}: {error}",
            },
        )

    def _scheduled_items(
        self, inputs: Mapping[str, Sequence[int]] | None = None
    ) -> tuple[list[str], list[dict[str, object]]]:
        """Return the requests and the items that the encoder is to run in this step."""
        found = self._output.scheduled_encoder_inputs if inputs is None else inputs
        names = [self._name(name) for name in found or ()]
        return names, [self._item(name, at) for name in found or () for at in found[name]]

    def _name(self, name: str) -> str:
        running = self._requests.get(name)
        return clean_id(name) if running is None else running.id

    def _item(self, name: str, at: int) -> dict[str, object]:
        """Return what is known of an item of a request."""
        running = self._requests.get(name)
        known = running.items[at] if running and at < len(running.items) else {}
        return {"request": self._name(name), **known}

    def cache_inserted(self) -> None:
        """Write which items the runner keeps since the step began."""
        cache = self._cache
        if cache is None or self._output is None:
            return
        states = reach(self._runner, "requests") or {}
        of_cache = reach(self._runner, "encoder_cache.mm_features") or {}
        items = []
        for name, inputs in (self._output.scheduled_encoder_inputs or {}).items():
            state = states.get(name) if hasattr(states, "get") else None
            features = getattr(state, "mm_features", None) or of_cache.get(name) or ()
            for at in inputs:
                key = getattr(features[at], "identifier", None) if at < len(features) else None
                if key is not None and key in cache and key not in self._cached_items:
                    known = {**self._item(name, at), "bytes": _bytes_of(cache[key])}
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
        known = {} if place is None else self._item(*place)
        self._cached_items[key] = item = {**known, "bytes": _bytes_of(cache[key])}
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
        if not self.every.is_due(self._core_since, self._core_sampled_ns):
            return
        now_ns = time.monotonic_ns()
        pool = reach(scheduler, "kv_cache_manager.block_pool")
        used = total = None
        if pool is not None:
            total = pool.num_gpu_blocks - 1
            used = total - pool.get_num_free_blocks()
        self.files.sample(
            "kv_sample",
            now_ns,
            self.core_step,
            self._core_since,
            KV_SAMPLE_FIGURES,
            (
                *self._host.read(),
                used,
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
        self._edge(
            "begin",
            written,
            prompt_tokens=reach(request, "num_prompt_tokens"),
            images=[item["size"] for item in items if item["modality"] == "image"],
            items=items,
        )

    def _edge(self, edge: str, written: str, **fields: object) -> None:
        moment = {"t_ns": time.monotonic_ns(), "edge": edge, "id": written}
        self.files.event("request", {**moment, **fields})

    def request_ends(self, request: Any) -> None:
        written = self._known.pop(request.request_id, None)
        if written is None:
            return
        tokens, reason = reach(request, "num_output_tokens"), reach(request, "status.name")
        self._edge("end", written, output_tokens=tokens, reason=reason)
        for call in self.on_core_request_end:
            call(written)


def clean_id(name: str) -> str:
    """Return a request's id without secrets, and not longer than an id is."""
    return redact_text(str(name))[:_ID_LENGTH]


def _bytes_of(tensor: Any) -> int:
    """Return the bytes of a tensor, or of the tensors of a sequence or an object."""
    count = getattr(tensor, "numel", None)
    if callable(count):
        return int(count()) * int(tensor.element_size())
    if isinstance(tensor, Iterable) and not isinstance(tensor, (str, bytes)):
        return sum(_bytes_of(each) for each in tensor)
    return 0
