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
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import nlargest
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from vllm_memprof.capture.attributes import Fields, reach
from vllm_memprof.capture.items import describe
from vllm_memprof.capture.probe import Probe, host_memory
from vllm_memprof.capture.sample_files import SampleFiles
from vllm_memprof.capture.writer import EventWriter
from vllm_memprof.record.schema import LARGEST, RANKED_BY, SAMPLE_FIGURES, SAMPLED_REQUESTS
from vllm_memprof.redact import redact_text

#: The part of a step outside the multimodal stages.
STEP = "step"
#: Characters of a request's id at most: the client may choose it; ids that are known as cleaned.
_ID_LENGTH, _MOST_IDS = 80, 4096
#: Maxima that are remembered while requests run: more of them is a record of a year.
_MOST_MAXIMA = 4096
_PEAKS = ("allocated_peak_bytes", "reserved_peak_bytes")

#: A stage under way: the reading at its begin, and the fields of its event.
Stage = tuple[Fields, Fields]


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

    def due(self, in_any_case: bool = False) -> int:
        """Return the steps that a sample stands for, and begin the next one; 0: it is not due."""
        now_ns = time.monotonic_ns()
        late = self.since >= self.steps if self.steps else now_ns - self.sampled_ns >= self.ns
        if not late and not in_any_case:
            return 0
        since, self.since, self.sampled_ns = self.since, 0, now_ns
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


class _Running(NamedTuple):
    """A request that this worker has, and what was read before its first step."""

    fields: Fields  # of its event, as far as they are known
    before: Fields
    first_step: int
    readings: int  # of this process, before it
    keys: list[Hashable]  # of its items in the encoder's cache


class CoreSteps:
    """The steps of an engine core, and the requests that it takes in."""

    def __init__(self, files: SampleFiles, pace: Pace) -> None:
        self._files, self.pace = files, pace
        self._known: set[str] = set()  # ids of requests
        #: Called when this engine core has ended a request.
        self.on_request_end: Callable[[], None] = lambda: None

    def stepped(self, scheduler: Any) -> None:
        self.pace.count()
        if not (steps := self.pace.due()):
            return
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
        t_ns = time.monotonic_ns()
        self._files.sample("kv_sample", t_ns, self.pace.step, steps, figures)

    def request_begins(self, request: Any, config: Any) -> None:
        name = request.request_id
        if name in self._known:  # an override called the method below it
            return
        self._known.add(name)
        items = [describe(each, config) for each in reach(request, "mm_features") or ()]
        tokens = reach(request, "num_prompt_tokens")
        self._edge("begin", name, prompt_tokens=tokens, items=items)

    def request_ends(self, request: Any) -> None:
        name = request.request_id
        if name in self._known:
            self._known.discard(name)
            tokens, reason = reach(request, "num_output_tokens"), reach(request, "status.name")
            self._edge("end", name, output_tokens=tokens, reason=reason)
            self.on_request_end()

    def _edge(self, edge: str, name: str, **fields: object) -> None:
        moment = {"t_ns": time.monotonic_ns(), "edge": edge, "id": clean_id(name)}
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
        self.files = SampleFiles(run_dir, losses, lambda: self._largest)
        self.core = CoreSteps(self.files, replace(pace))
        #: Called when this worker no longer has a request.
        self.on_request_end: Callable[[], None] = lambda: None
        self._probe, self.pace = probe, replace(pace)
        self._largest: list[Fields] = []  # events of requests
        self._output: Any = None  # the scheduler's, of the step under way
        self._inside = False  # of execute_model
        self._readings = 0
        self._last: Fields | None = None
        self._high: Fields = {}  # peaks that rose since the last sample
        #: Requests that this worker has.
        self._requests: dict[str, _Running] = {}
        self._gone: list[str] = []
        self._peaks, self._together = _Maxima(), _Maxima()
        self._stages: list[Stage] = []
        #: Outputs of the encoder by key, and what is known of their items; None: no such cache.
        self._cache: Mapping[Any, Any] | None = None
        self._cached: dict[Hashable, Fields] = {}
        self._config: Any = None  # the model's hf_config

    def read(self) -> Fields:
        """Read the allocator's counters; what rose since the last reading is the open stage's."""
        now = self._probe.counters()
        last, self._last = self._last or now, now
        self._readings += 1
        risen = _risen(last, now)
        for name, peak in risen.items():
            self._high[name] = max(self._high.get(name, 0), peak)
        level = max(now["allocated_bytes"], last["allocated_bytes"])
        most = risen.get("allocated_peak_bytes", level)
        stage = self._stages[-1][1]["stage"] if self._stages else STEP
        self._peaks.add(self.pace.step, most, stage)
        return now

    def fold_peak(self) -> None:
        """Read before the engine resets the peak: the run peak stays, the next rise starts low."""
        if self._probe.is_ready():
            now = self.read()
            self._last = now | {name: now[name.replace("_peak", "")] for name in _PEAKS}

    # --- steps

    def begin_step(self, output: Any, runner: Any) -> bool:
        """Take note of a step before it runs; False: an override called the one below it."""
        if self._inside or (self._last is None and not self._probe.is_ready()):
            return False
        self._end_step()
        self._inside = True
        if self._cache is None:
            cache = reach(runner, "encoder_cache")
            outputs = getattr(cache, "encoder_outputs", cache)  # of the V2 runner
            self._cache = outputs if isinstance(outputs, dict) else None
            self._config = reach(runner, "model_config.hf_config")
        new, finished, now = output.scheduled_new_reqs, output.finished_req_ids, self._last
        if new or finished or now is None:
            now = self.read()
        self._gone += [name for name in finished if name in self._requests]
        if output.total_num_scheduled_tokens:
            self._end_requests(now)  # the step is of others: what it takes is not theirs
        self._output = output
        self.pace.count()
        for request in new:
            name, tokens = clean_id(request.req_id), request.prompt_token_ids
            features = reach(request, "mm_features") or ()
            fields = {
                "id": name,
                "begin_ns": now["t_ns"],
                "prompt_tokens": None if tokens is None else len(tokens),
                "items": [{"request": name, **describe(each, self._config)}
                          for each in features],
            }  # fmt: skip
            keys = [reach(each, "identifier") for each in features]
            running = _Running(fields, now, self.pace.step, self._readings, keys)
            self._requests[request.req_id] = running
        return True

    def leave_call(self, ended: bool, error: BaseException | None) -> None:
        """Take note of a call's end; the step ends with the call that has its result."""
        self._inside = False
        if error is not None:
            self.fail()
        elif ended:
            self.end_step()

    def end_step(self) -> None:
        if not self._inside:
            self._end_step()

    def _end_step(self) -> None:
        output, step = self._output, self.pace.step
        if output is None:
            return
        if output.scheduled_encoder_inputs or output.free_encoder_mm_hashes:
            self.note_cache()
        self._output = None
        scheduled = output.num_scheduled_tokens
        if scheduled:
            self._together.add(step, len(scheduled), STEP)
        if not (steps := self.pace.due(bool(self._gone))):
            return
        now = self.read()
        self._end_requests(now)
        cached = output.scheduled_cached_reqs
        computed = chain(
            ((each.req_id, each.num_computed_tokens) for each in output.scheduled_new_reqs),
            zip(cached.req_ids, cached.num_computed_tokens, strict=False),
        )
        requests = (  # not all of a large step
            [clean_id(name), scheduled[name], done + scheduled[name]]
            for name, done in computed
            if name in self._requests and name in scheduled
        )
        figures = {
            **{name: now.get(name) for name in SAMPLE_FIGURES},
            **dict.fromkeys(_PEAKS),
            **self._high,
            "tokens": output.total_num_scheduled_tokens,
            "request_count": len(scheduled),
            "encoder_cache_bytes": self._cache_bytes,
        }
        listed = list(islice(requests, SAMPLED_REQUESTS))
        self.files.sample("sample", now["t_ns"], step, steps, figures, requests=listed)
        self._high.clear()

    def fail(self) -> None:
        """Write what is known of all requests, because the step or the process fails."""
        self._output, self._inside = None, False
        self._stages.clear()
        self.close()

    def close(self) -> None:
        """End what is under way, because the process ends."""
        self.end_step()
        if self._requests:
            now = self.read()
            self._end_requests(now)
            for running in self._requests.values():
                self._write_request(running, now, finished=False)
            self._requests.clear()

    def _end_requests(self, now: Fields) -> None:
        names, self._gone = self._gone, []
        for name in names:
            self._write_request(self._requests.pop(name), now, finished=True)
            self.on_request_end()

    def _write_request(self, running: _Running, now: Fields, finished: bool) -> None:
        before = running.before
        most, _ = self._together.since(running.first_step)
        peak, stage = self._peaks.since(running.first_step)
        fields = {
            **running.fields,
            "t_ns": now["t_ns"],
            "end_ns": now["t_ns"],
            "sampled_steps": self._readings - running.readings,
            "others": None if most is None else max(most - 1, 0),
            "allocated_before_bytes": before["allocated_bytes"],
            "allocated_peak_bytes": peak,
            "peak_exact": "allocated_peak_bytes" in _risen(before, now),
            "allocated_run_peak_bytes": now["allocated_run_peak_bytes"],
            "peak_stage": stage,
            "left_allocated_bytes": now["allocated_bytes"] - before["allocated_bytes"],
            "left_reserved_bytes": now["reserved_bytes"] - before["reserved_bytes"],
            "finished": finished,
        }
        kept = [*self._largest, fields]
        largest = {
            id(each)
            for rank in RANKED_BY
            for each in nlargest(LARGEST, kept, key=lambda each: each[rank] or 0)
        }
        self._largest = [each for each in kept if id(each) in largest]
        self.files.event("request_memory", fields)

    # --- multimodal stages

    def begin_stage(
        self, stage: str, inputs: Mapping[str, Sequence[int]] | None = None
    ) -> Stage | None:
        """Open a stage of the step under way; None outside of a step, as in the profile run.

        Args:
            stage: of ``schema.STAGES``.
            inputs: numbers of its items among those of each request; None: those of the step.
        """
        output = self._output
        if output is None or any(each["stage"] == stage for _, each in self._stages):
            return None
        inputs = output.scheduled_encoder_inputs or {} if inputs is None else inputs
        names = output.num_scheduled_tokens if stage == "mm_merge" else inputs
        requests = [clean_id(name) for name in islice(names, SAMPLED_REQUESTS)]
        fields = {"stage": stage, "requests": requests, "items": self._items(inputs)}
        self._stages.append((self.read(), fields))
        return self._stages[-1]

    def end_stage(self, opened: Stage, error: BaseException | None) -> None:
        now = self.read()
        while self._stages and self._stages.pop() is not opened:
            pass
        self._write_stage(opened, now, error)

    def _write_stage(self, opened: Stage, now: Fields, error: BaseException | None = None) -> None:
        before, fields = opened
        total = now["allocated_total_bytes"] - before["allocated_total_bytes"]
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
                "allocated_total_bytes": total,
                **_risen(before, now),  # which is the stage's
                "encoder_cache_bytes": self._cache_bytes,
                "error": None if error is None else f"{type(error).__name__}: {error}",
            },
        )

    def _items(self, inputs: Mapping[str, Sequence[int]]) -> list[Fields]:
        """Return what is known of items, given by their numbers among those of each request."""
        known = [(self._requests[name].fields["items"], inputs[name])
                 for name in inputs if name in self._requests]  # fmt: skip
        return [items[at] for items, numbers in known for at in numbers if at < len(items)]

    @property
    def _cache_bytes(self) -> int | None:
        """Bytes of all outputs that the encoder's cache has; None without a cache."""
        sizes = (int(item["bytes"]) for item in self._cached.values())
        return None if self._cache is None else sum(sizes)

    def note_cache(self, cache: Mapping[Any, Any] | None = None) -> None:
        """Write which outputs of the encoder a process keeps since the last call, and which not.

        Args:
            cache: outputs that it keeps, by key; None: the runner's, in a step.
        """
        self._cache = cache = self._cache if cache is None else cache
        if cache is None or self._output is None:
            return
        known = self._cached
        gone = [known.pop(key) for key in list(known) if key not in cache]
        described = {
            key: item
            for running in self._requests.values()
            for key, item in zip(running.keys, running.fields["items"], strict=True)
        }
        came = {key: {**described.get(key, {}), "bytes": _bytes_of(cache[key])}
                for key in cache if key not in known}  # fmt: skip
        known |= came
        for stage, items in (("mm_cache_evict", gone), ("mm_cache_insert", [*came.values()])):
            if items:
                requests = [item["request"] for item in items if "request" in item]
                now, fields = self.read(), {"stage": stage, "requests": requests, "items": items}
                self._write_stage((now, fields), now)

    def moment(self) -> Fields | None:
        """Return the step under way, for a failed allocation; reads nothing of the device."""
        output = self._output
        if output is None:
            return None
        items = self._items(output.scheduled_encoder_inputs or {})
        opened = self._stages[-1][1] if self._stages else {"stage": None, "items": items}
        scheduled = islice(output.num_scheduled_tokens.items(), SAMPLED_REQUESTS)
        return {
            "step": self.pace.step,
            "stage": opened["stage"],
            "requests": [[clean_id(name), tokens] for name, tokens in scheduled],
            "items": opened["items"],
        }


@lru_cache(_MOST_IDS)
def clean_id(name: str) -> str:
    """Return a request's id without secrets, and not longer than an id is."""
    return redact_text(str(name))[:_ID_LENGTH]


def _risen(before: Fields, now: Fields) -> Fields:
    """Return the peaks that rose in between."""
    return {name: now[name] for name in _PEAKS if now[name] > before[name]}


def _bytes_of(tensor: Any) -> int:
    """Return the bytes of a tensor, or of the tensors of a sequence or an object."""
    count = reach(tensor, "numel")
    if callable(count):
        return int(count()) * int(tensor.element_size())
    nested = isinstance(tensor, Iterable) and not isinstance(tensor, (str, bytes))
    return sum(map(_bytes_of, tensor)) if nested else 0
