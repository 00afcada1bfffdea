"""Steps of one process while it serves: the engine's calls enter, samples and requests leave.

Runs in workers and engine cores, with ``MEMPROF_SAMPLE`` only. In a step only the counters of
torch's allocator are read, which are host memory: nothing is reset, nothing waits for the device.

The allocator keeps one peak, which memprof does not reset. Where that peak rose between two
readings, the most that was allocated in between is known; where it did not, it is between the
readings and the run peak, and is written as null.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from vllm_memprof.capture import items as mm_items
from vllm_memprof.capture.attributes import reach
from vllm_memprof.capture.probe import Probe, SnapshotDict, host_memory
from vllm_memprof.capture.sample_files import SampleFiles
from vllm_memprof.capture.writer import EventWriter
from vllm_memprof.record.schema import LARGEST, SAMPLE_FIGURES, SAMPLED_REQUESTS
from vllm_memprof.redact import redact_text

#: The part of a step outside the multimodal stages.
STEP = "step"
#: Characters of a request's id at most: the client may choose it.
_ID_LENGTH = 80
#: Maxima that are remembered while requests run: more of them is a record of a year.
_MOST_MAXIMA = 4096
#: What makes a request large.
_RANKED_BY = ("allocated_peak_bytes", "left_allocated_bytes", "left_reserved_bytes")
_PEAKS = ("allocated_peak_bytes", "reserved_peak_bytes")

Item = mm_items.Item
#: A stage under way: the reading at its begin, and the fields of its event.
Stage = tuple[SnapshotDict, dict[str, Any]]


@dataclass
class Pace:
    """How often a step is sampled: every ``steps`` steps, or every ``ns`` nanoseconds."""

    steps: int = 0
    ns: int = 0
    step: int = 0  # of this process, from 1
    since: int = 0  # steps since the last sample
    sampled_ns: int = 0

    def count(self) -> None:
        self.step += 1
        self.since += 1

    def is_due(self) -> bool:
        if self.steps:
            return self.since >= self.steps
        return time.monotonic_ns() - self.sampled_ns >= self.ns

    def sampled(self, t_ns: int) -> int:
        """Return the steps that a sample stands for; the next one begins."""
        since, self.since, self.sampled_ns = self.since, 0, t_ns
        return since


def parse_pace(text: str) -> Pace:
    """Return what ``16`` or ``5s`` means.

    Raises:
        ValueError: it is neither, or not above 0.
    """
    pace = Pace(ns=int(float(text[:-1]) * 1e9)) if text.endswith("s") else Pace(int(text))
    if max(pace.steps, pace.ns) <= 0:
        raise ValueError(f"{text!r} is not above 0")
    return pace


class _Maxima:
    """The largest value since any step: a list of falling values, the newest at the end."""

    def __init__(self) -> None:
        #: Step, value, stage.
        self._peaks: deque[tuple[int, int, str]] = deque(maxlen=_MOST_MAXIMA)

    def add(self, step: int, value: int, stage: str) -> None:
        peaks = self._peaks
        while peaks and peaks[-1][1] <= value:
            peaks.pop()
        peaks.append((step, value, stage))

    def since(self, step: int) -> tuple[int, str] | tuple[None, None]:
        at = bisect_left(self._peaks, step, key=lambda peak: peak[0])
        return self._peaks[at][1:] if at < len(self._peaks) else (None, None)


class CoreSteps:
    """The steps of an engine core, and the requests that it takes in."""

    def __init__(self, files: SampleFiles, pace: Pace) -> None:
        self._files, self.pace = files, pace
        self._known: dict[str, str] = {}  # id of a request -> as it is written
        #: Called when this engine core has ended a request.
        self.on_request_end: Callable[[], None] = lambda: None

    def stepped(self, scheduler: Any) -> None:
        self.pace.count()
        if not self.pace.is_due():
            return
        now_ns = time.monotonic_ns()
        resident, shared = host_memory()
        figures = {
            "host_rss_bytes": resident,
            "host_shared_bytes": shared,
            "kv_blocks_used": None,
            "kv_blocks_total": None,
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
        }
        if (pool := reach(scheduler, "kv_cache_manager.block_pool")) is not None:
            total = figures["kv_blocks_total"] = pool.num_gpu_blocks - 1
            figures["kv_blocks_used"] = total - pool.get_num_free_blocks()
        steps = self.pace.sampled(now_ns)
        self._files.sample("kv_sample", now_ns, self.pace.step, steps, figures)

    def request_begins(self, request: Any, config: Any) -> None:
        name = request.request_id
        if name in self._known:  # an override called the method below it
            return
        self._known[name] = clean_id(name)
        items = mm_items.describe(getattr(request, "mm_features", None), config)
        tokens = reach(request, "num_prompt_tokens")
        self._edge("begin", self._known[name], prompt_tokens=tokens, items=items)

    def request_ends(self, request: Any) -> None:
        if (written := self._known.pop(request.request_id, None)) is not None:
            tokens, reason = reach(request, "num_output_tokens"), reach(request, "status.name")
            self._edge("end", written, output_tokens=tokens, reason=reason)
            self.on_request_end()

    def _edge(self, edge: str, written: str, **fields: object) -> None:
        moment = {"t_ns": time.monotonic_ns(), "edge": edge, "id": written}
        self._files.event("request", {**moment, **fields})


class Sampler:
    """The samples of one process: the steps of a worker, and those of an engine core.

    Args:
        run_dir: the run folder.
        probe: of the process.
        pace: how often a step is sampled.
        losses: keeps account of lines that could not be written.
    """

    def __init__(self, run_dir: Path, probe: Probe, pace: Pace, losses: EventWriter) -> None:
        self.files = SampleFiles(run_dir, losses, self._kept)
        self.core = CoreSteps(self.files, Pace(pace.steps, pace.ns))
        #: Called when this worker no longer has a request.
        self.on_request_end: Callable[[], None] = lambda: None
        self._probe, self.pace = probe, Pace(pace.steps, pace.ns)
        self._largest: dict[str, list[dict[str, Any]]] = {name: [] for name in _RANKED_BY}
        self._output: Any = None  # the scheduler's, of the step under way
        self._runner: Any = None
        self._inside = 0  # calls of execute_model under way: an override calls the one below
        self._readings = 0
        self._last: SnapshotDict | None = None
        self._high: dict[str, int] = {}  # peaks that rose since the last sample
        #: Requests that this worker has: fields of their event, as far as they are known.
        self._requests: dict[str, dict[str, Any]] = {}
        self._gone: list[str] = []
        self._peaks, self._together = _Maxima(), _Maxima()
        self._stages: list[Stage] = []
        #: What the encoder's cache has: its items by key; None: there is no cache.
        self._cached: dict[Hashable, Item] | None = None
        self._config: Any = None  # the model's hf_config

    def read(self) -> SnapshotDict:
        """Read the allocator's counters; what rose since the last reading is the open stage's."""
        last, now = self._last, self._probe.counters()
        self._last = now
        self._readings += 1
        most = now["allocated_bytes"]
        if last is not None:
            most = max(most, last["allocated_bytes"])
            for name in _PEAKS:
                if now[name] > last[name]:
                    self._high[name] = max(self._high.get(name, 0), now[name])
            if now[_PEAKS[0]] > last[_PEAKS[0]]:
                most = now[_PEAKS[0]]
        stage = self._stages[-1][1]["stage"] if self._stages else STEP
        self._peaks.add(self.pace.step, most, stage)
        return now

    def fold_peak(self) -> None:
        """Read before the engine resets the peak: the run peak stays, the next rise starts low."""
        if not self._probe.is_ready():
            return
        now = self.read()
        level = {name: now[name.replace("_peak", "")] for name in _PEAKS}
        self._last = {**now, **level}

    # --- steps

    def begin_step(self, output: Any, runner: Any) -> None:
        """Take note of a step before it runs."""
        self._inside += 1
        if self._inside > 1 or (self._last is None and not self._probe.is_ready()):
            return
        if self._output is not None:
            self._end_step()
        if self._config is None:
            self._config = reach(runner, "model_config.hf_config")
        new, finished, now = output.scheduled_new_reqs, output.finished_req_ids, self._last
        if new or finished or now is None:
            now = self.read()
        self._gone += [name for name in finished if name in self._requests]
        if output.total_num_scheduled_tokens:
            self._end_requests(now)  # the step is of others: what it takes is not theirs
        self._output, self._runner = output, runner
        if self._cached is None:
            self.note_cache()  # is there one?
        self.pace.count()
        for request in new:
            tokens = request.prompt_token_ids
            self._requests[request.req_id] = {
                "id": clean_id(request.req_id),
                "begin_ns": now["t_ns"],
                "sampled_steps": -self._readings,
                "first_step": self.pace.step,
                "prompt_tokens": None if tokens is None else len(tokens),
                "items": mm_items.describe(getattr(request, "mm_features", None), self._config),
                "before": now,
            }

    def leave_call(self, ended: bool, error: BaseException | None) -> None:
        """Take note of a call's end; the step ends with the call that has its result."""
        self._inside = max(self._inside - 1, 0)
        if error is not None and not self._inside:
            self.fail()
        elif ended:
            self.end_step()

    def end_step(self) -> None:
        if not self._inside and self._output is not None:
            self._end_step()

    def _end_step(self) -> None:
        output = self._output
        if output.scheduled_encoder_inputs or output.free_encoder_mm_hashes:
            self.note_cache()
        self._output = self._runner = None
        scheduled = output.num_scheduled_tokens
        if scheduled:
            self._together.add(self.pace.step, len(scheduled), STEP)
        if not self._gone and not self.pace.is_due():
            return
        now = self.read()
        self._end_requests(now)
        cached = output.scheduled_cached_reqs
        computed = chain(
            ((each.req_id, each.num_computed_tokens) for each in output.scheduled_new_reqs),
            zip(cached.req_ids, cached.num_computed_tokens, strict=False),
        )
        requests = (  # not all of a large step
            [self._requests[name]["id"], scheduled[name], done + scheduled[name]]
            for name, done in computed
            if name in self._requests and name in scheduled
        )
        figures = {name: now.get(name) for name in SAMPLE_FIGURES} | dict.fromkeys(_PEAKS)
        figures |= self._high
        figures |= {
            "tokens": output.total_num_scheduled_tokens,
            "request_count": len(scheduled),
            "encoder_cache_bytes": self._cache_bytes,
        }
        self.files.sample(
            "sample",
            now["t_ns"],
            self.pace.step,
            self.pace.sampled(now["t_ns"]),
            figures,
            requests=list(islice(requests, SAMPLED_REQUESTS)),
        )
        self._high.clear()

    def fail(self) -> None:
        """Write what is known of all requests, because the step or the process fails."""
        self._output = self._runner = None
        self._inside = 0
        self._stages.clear()
        self._end_all()

    def close(self) -> None:
        """End what is under way, because the process ends."""
        self.end_step()
        self._end_all()

    def _end_all(self) -> None:
        if self._requests:
            now = self.read()
            self._end_requests(now)
            for name in list(self._requests):
                self._end_request(name, now, finished=False)

    def _end_requests(self, now: SnapshotDict) -> None:
        names, self._gone = self._gone, []
        for name in names:
            self._end_request(name, now, finished=True)
            self.on_request_end()

    def _end_request(self, name: str, now: SnapshotDict, finished: bool) -> None:
        known = self._requests.pop(name)
        before, first = known.pop("before"), known.pop("first_step")
        most, _ = self._together.since(first)
        peak, stage = self._peaks.since(first)
        fields = {
            **known,
            "t_ns": now["t_ns"],
            "end_ns": now["t_ns"],
            "sampled_steps": known["sampled_steps"] + self._readings,
            "others": None if most is None else max(most - 1, 0),
            "allocated_before_bytes": before["allocated_bytes"],
            "allocated_peak_bytes": peak,
            "peak_exact": now["allocated_peak_bytes"] > before["allocated_peak_bytes"],
            "allocated_run_peak_bytes": now["allocated_run_peak_bytes"],
            "peak_stage": stage,
            "left_allocated_bytes": now["allocated_bytes"] - before["allocated_bytes"],
            "left_reserved_bytes": now["reserved_bytes"] - before["reserved_bytes"],
            "finished": finished,
        }
        for rank, largest in self._largest.items():
            if fields[rank] is not None:
                largest.append(fields)
                largest.sort(key=lambda each: each[rank], reverse=True)
                del largest[LARGEST:]
        self.files.event("request_memory", fields)

    def _kept(self) -> list[dict[str, Any]]:
        kept = {id(fields): fields for each in self._largest.values() for fields in each}
        return sorted(kept.values(), key=lambda fields: fields["t_ns"])

    # --- multimodal stages

    def begin_stage(
        self, stage: str, inputs: Mapping[str, Sequence[int]] | None = None
    ) -> Stage | None:
        """Open a stage of the step under way; None outside of a step, as in the profile run.

        Args:
            stage: of ``schema.STAGES``.
            inputs: numbers of its items among those of each request; None: those of the step.
        """
        if self._output is None or any(each["stage"] == stage for _, each in self._stages):
            return None
        inputs = self._output.scheduled_encoder_inputs if inputs is None else inputs
        names = self._output.num_scheduled_tokens if stage == "mm_merge" else inputs
        requests = [self._name(name) for name in islice(names or (), SAMPLED_REQUESTS)]
        fields = {"stage": stage, "requests": requests, "items": self._items(inputs)}
        self._stages.append((self.read(), fields))
        return self._stages[-1]

    def end_stage(self, opened: Stage, error: BaseException | None) -> None:
        now = self.read()
        while self._stages and self._stages.pop() is not opened:
            pass
        self._write_stage(opened, now, error)

    def _write_stage(
        self, opened: Stage, now: SnapshotDict, error: BaseException | None = None
    ) -> None:
        before, fields = opened
        # a peak that rose in between is the stage's
        peaks = {name: now[name] if now[name] > before[name] else None for name in _PEAKS}
        self.files.event(
            "stage",
            {
                "t_ns": now["t_ns"],
                "begin_ns": before["t_ns"],
                "step": self.pace.step,
                **fields,
                "allocated_before_bytes": before["allocated_bytes"],
                "allocated_bytes": now["allocated_bytes"],
                "reserved_before_bytes": before["reserved_bytes"],
                "reserved_bytes": now["reserved_bytes"],
                "allocated_total_bytes": now["allocated_total_bytes"]
                - before["allocated_total_bytes"],
                **peaks,
                "encoder_cache_bytes": self._cache_bytes,
                "error": None if error is None else f"{type(error).__name__}: {error}",
            },
        )

    def _name(self, name: str) -> str:
        known = self._requests.get(name)
        return clean_id(name) if known is None else known["id"]

    def _items(self, inputs: Mapping[str, Sequence[int]] | None) -> list[Item]:
        """Return what is known of items, given by their numbers among those of each request."""
        found = []
        for name, numbers in (inputs or {}).items():
            items = self._requests.get(name, {}).get("items", ())
            for at in numbers:
                known = items[at] if at < len(items) else {}
                found.append({"request": self._name(name), **known})
        return found

    @property
    def _cache_bytes(self) -> int | None:
        """Bytes of all outputs that the encoder's cache has; None without a cache."""
        if self._cached is None:
            return None
        return sum(int(item["bytes"]) for item in self._cached.values())

    def note_cache(self) -> None:
        """Write what the runner's cache of encoder outputs has taken and given up."""
        cache = getattr(self._runner, "encoder_cache", None)
        outputs = getattr(cache, "encoder_outputs", cache)  # of the V2 runner
        if self._output is None or not isinstance(outputs, dict):
            return
        states = reach(self._runner, "requests") or {}
        of_cache = getattr(cache, "mm_features", None) or {}
        places: dict[Hashable, tuple[str, int]] = {}
        for name, numbers in (self._output.scheduled_encoder_inputs or {}).items():
            features = reach(states.get(name), "mm_features") or of_cache.get(name) or ()
            for at in numbers:
                if at < len(features):
                    places[getattr(features[at], "identifier", None)] = name, at
        self.cache_changed(outputs, places)

    def cache_changed(
        self, cache: Mapping[Any, Any], places: Mapping[Hashable, tuple[str, int]]
    ) -> None:
        """Write which outputs of the encoder a process keeps since the last call, and which not.

        Args:
            cache: outputs that it keeps, by key.
            places: request, and number of the item among its own, by key, as far as they are known.
        """
        known = self._cached = self._cached or {}
        gone = [known.pop(key) for key in list(known) if key not in cache]
        came = []
        for key in cache:
            if key not in known:
                name, at = places.get(key, ("", 0))
                [item] = self._items({name: [at]}) if name else [{}]
                known[key] = {**item, "bytes": _bytes_of(cache[key])}
                came.append(known[key])
        for stage, items in (("mm_cache_evict", gone), ("mm_cache_insert", came)):
            if items:
                requests = [item["request"] for item in items if "request" in item]
                now, fields = self.read(), {"stage": stage, "requests": requests, "items": items}
                self._write_stage((now, fields), now)

    def moment(self) -> dict[str, object] | None:
        """Return the step under way, for a failed allocation; reads nothing of the device."""
        output = self._output
        if output is None:
            return None
        opened = self._stages[-1][1] if self._stages else {"stage": None}
        scheduled = islice(output.num_scheduled_tokens.items(), SAMPLED_REQUESTS)
        return {
            "step": self.pace.step,
            "stage": opened["stage"],
            "requests": [[self._name(name), tokens] for name, tokens in scheduled],
            "items": opened.get("items", self._items(output.scheduled_encoder_inputs)),
        }


def clean_id(name: str) -> str:
    """Return a request's id without secrets, and not longer than an id is."""
    return redact_text(str(name))[:_ID_LENGTH]


def _bytes_of(tensor: Any) -> int:
    """Return the bytes of a tensor, or of the tensors of a sequence or an object."""
    count = getattr(tensor, "numel", None)
    if callable(count):
        return int(count()) * int(tensor.element_size())
    if isinstance(tensor, Iterable) and not isinstance(tensor, (str, bytes)):
        return sum(map(_bytes_of, tensor))
    return 0
