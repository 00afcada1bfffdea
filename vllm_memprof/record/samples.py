"""What a process wrote while it served: samples, stages and requests, from files of bounded size.

Runs in the launcher or in ``memprof report``. ``load_samples`` reads the folder of one process.
Where several levels tell of the same time, the finest one counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vllm_memprof.files import listed, read_file
from vllm_memprof.record.codec import from_json
from vllm_memprof.record.failures import Item
from vllm_memprof.record.lines import Event, parse_events
from vllm_memprof.record.schema import (
    DEVICE_SAMPLE_FIGURES,
    KV_SAMPLE_FIGURES,
    SAMPLE_FIGURES,
    SAMPLES_DIR,
    STAGE_FIGURES,
    Count,
)

SAMPLE, KV_SAMPLE, DEVICE_SAMPLE = "sample", "kv_sample", "device_sample"
#: In place of a level: the files of stages and requests.
REQUESTS = -1
#: Of a device sample: ``runtime.<module>`` is a counter of the runtime.
RUNTIME = "runtime."
_FIGURES = {
    SAMPLE: SAMPLE_FIGURES,
    KV_SAMPLE: KV_SAMPLE_FIGURES,
    DEVICE_SAMPLE: DEVICE_SAMPLE_FIGURES,
}


@dataclass(frozen=True)
class Sample:
    """One line of samples: a single reading, or several that were thinned to min and max."""

    t_ns: int  # time.monotonic_ns() of the last reading
    since_ns: int  # of the first one; the same for a single reading
    folded: int  # readings
    figures: Mapping[str, int | None]  # of the last reading: schema.SAMPLE_FIGURES etc.
    low: Mapping[str, int | None]  # lowest and highest by figure, all readings
    high: Mapping[str, int | None]
    step: Count = None  # of the last reading; None for a device sample
    steps: int = 0  # of the engine that it covers


@dataclass(frozen=True)
class MediaStage:
    """One passage of a worker through a multimodal stage."""

    stage: str  # of schema.STAGES
    requests: tuple[str, ...] = ()
    items: tuple[Item, ...] = ()
    figures: Mapping[str, int | None] = field(default_factory=dict)  # schema.STAGE_FIGURES
    error: str | None = None  # the exception that left it


@dataclass(frozen=True)
class RequestRecord:
    """A request as the engine core knows it."""

    id: str
    prompt_tokens: Count = None
    output_tokens: Count = None  # None: it never ended
    items: tuple[Item, ...] = ()
    begin_ns: Count = None  # the engine core took it in; None: the line is dropped
    end_ns: Count = None
    reason: str | None = None  # why it ended, as the engine names it


@dataclass(frozen=True)
class RequestFigures:
    """What a worker read of a request. Bytes unless the name says otherwise; unknown is None."""

    id: str
    prompt_tokens: Count = None
    sampled_steps: Count = None  # steps that had it and were read
    #: Most other requests that were in a step with it; the memory is that of all of them.
    others: Count = None
    allocated_before_bytes: Count = None
    allocated_peak_bytes: Count = None  # highest that is known of the steps that had it
    #: Whether the allocator's peak rose in them; else it is the highest reading.
    peak_exact: bool = False
    #: mm_encoder, mm_merge, mm_cache_insert, mm_cache_evict, or step for the rest of a step; None
    #: where no reading was.
    peak_stage: str | None = None
    #: Allocated after it less before it; of all that happened meanwhile.
    left_allocated_bytes: Count = None
    left_reserved_bytes: Count = None


@dataclass(frozen=True)
class RequestMemory(RequestFigures):
    """A request as one worker knows it."""

    begin_ns: Count = None  # before the first step that had it
    end_ns: Count = None  # of the first reading without it
    allocated_run_peak_bytes: Count = None  # by the end: no step of it was above
    finished: bool = True  # False: the process failed or ended with it
    items: tuple[Item, ...] = ()


@dataclass(frozen=True)
class Served:
    """All that one process wrote while it served, each list in the order of time."""

    samples: list[Sample] = field(default_factory=list)
    kv_samples: list[Sample] = field(default_factory=list)
    device_samples: list[Sample] = field(default_factory=list)
    stages: list[MediaStage] = field(default_factory=list)
    requests: list[RequestRecord] = field(default_factory=list)
    request_memory: list[RequestMemory] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)  # kind -> lines that are in no file
    dropped_lines: int = 0  # that were not a whole JSON object
    wrong: list[str] = field(default_factory=list)  # figures that cannot be, with file and line

    @property
    def thinned(self) -> bool:
        """Whether older samples are lowest and highest values of several."""
        return any(
            sample.folded > 1
            for samples in (self.samples, self.kv_samples, self.device_samples)
            for sample in samples
        )


def load_samples(run_dir: Path, process: str) -> Served:
    """Read what one process wrote while it served; empty where it was not sampled.

    Args:
        run_dir: the run folder.
        process: ``<host>-<pid>``.

    Raises:
        TypeError, ValueError: a line is none of memprof's.
        OSError: a file cannot be read.
    """
    found: defaultdict[str, defaultdict[int, list[Event]]]
    found = defaultdict(lambda: defaultdict(list))  # kind -> level -> events
    broken, wrong = 0, list[str]()
    for level, path in sample_files(run_dir, process):
        said: list[str] = []
        events, torn = parse_events(read_file(path, run_dir), said)
        wrong += [f"{path.name}, {each}" for each in said]
        broken += torn
        for event in events:
            found[str(event.get("kind"))][level].append(event)
    requests: list[Event] = []  # both edges joined; an id that comes again is another request
    open_at: dict[object, Event] = {}
    for event in found["request"][REQUESTS]:
        known = open_at.pop(event.get("id"), None)
        if event.get("edge") == "begin":
            known = open_at[event.get("id")] = {}
            requests.append(known)
        elif known is None:
            requests.append(known := {})
        known |= {**event, f"{event.get('edge')}_ns": event.get("t_ns")}
    memory, kept = _memories(found["request_memory"][REQUESTS])
    dropped = dropped_of(found["dropped"][REQUESTS])
    if "request_memory" in dropped:
        dropped["request_memory"] = max(dropped["request_memory"] - kept, 0)
    return Served(
        samples=_finest(found, SAMPLE),
        kv_samples=_finest(found, KV_SAMPLE),
        device_samples=_finest(found, DEVICE_SAMPLE),
        stages=[
            from_json(MediaStage, {**event, "figures": _values(event, STAGE_FIGURES)})
            for event in found["stage"][REQUESTS]
        ],
        requests=[from_json(RequestRecord, each) for each in requests],
        request_memory=memory,
        dropped=dropped,
        dropped_lines=broken,
        wrong=wrong,
    )


def sample_files(run_dir: Path, process: str) -> list[tuple[int, Path]]:
    """Return (level, file) of one process, each level from its oldest to its newest file.

    The level is ``REQUESTS`` for the files of stages and requests.
    """
    found = []
    for path in listed(run_dir / SAMPLES_DIR / process, "*-*.jsonl"):
        level, _, number = path.stem.partition("-")
        level = str(REQUESTS) if level == "requests" else level
        found.append((int(level), int(number), path))
    return [(level, path) for level, _, path in sorted(found)]


def _values(event: Event, names: Iterable[str]) -> dict[str, object]:
    return {name: event.get(name) for name in names}


def _finest(events: Mapping[str, Mapping[int, Iterable[Event]]], kind: str) -> list[Sample]:
    """Return the samples of a kind: of each time those of the finest level that still has it.

    A line of a coarser level that reaches into the time of a finer one counts whole, and the finer
    lines of that time do not: otherwise there would be a gap.
    """
    found: list[Sample] = []
    for _, level in sorted(events[kind].items()):
        coarser = []
        for event in level:
            runtime = (name for name in event if name.startswith(RUNTIME))
            figures = _values(event, (*_FIGURES[kind], *runtime))
            single = {"since_ns": event.get("t_ns"), "folded": 1, "low": figures, "high": figures}
            coarser.append(from_json(Sample, {**single, **event, "figures": figures}))
        older = [each for each in coarser if not found or each.since_ns < found[0].since_ns]
        if older:
            found = [*older, *(each for each in found if each.since_ns > older[-1].t_ns)]
    return found


def _memories(events: Iterable[Event]) -> tuple[list[RequestMemory], int]:
    """Return the requests in the order of their end, and how many outlived their file.

    The largest are written again when their file goes; an id that comes again is another request.
    """
    once: list[RequestMemory] = []
    again: dict[tuple[str, int | None], RequestMemory] = {}
    for event in events:
        record = from_json(RequestMemory, event)
        if event.get("again"):
            again[record.id, record.end_ns] = record
        else:
            once.append(record)
    for record in once:
        again.pop((record.id, record.end_ns), None)
    older = sorted(again.values(), key=lambda each: each.end_ns or 0)
    return [*older, *once], len(older)


def dropped_of(events: Iterable[Event]) -> dict[str, int]:
    """Return the lines by kind that are in no file any more, by the events that say so."""
    total: dict[str, int] = {}
    for event in events:
        for kind, lines in from_json(dict[str, int], event.get("kinds")).items():
            total[kind] = max(total.get(kind, 0), lines)
    return total
