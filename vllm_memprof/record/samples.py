"""What a process wrote while it served: samples, stages and requests, from files of bounded size.

Runs in the launcher or in ``memprof report``. ``load_samples`` reads the folder of one process.
Where several levels tell of the same time, the finest one counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_memprof.record.lines import Event, parse_event
from vllm_memprof.record.schema import (
    DEVICE_SAMPLE_FIGURES,
    KV_SAMPLE_FIGURES,
    SAMPLE_FIGURES,
    SAMPLES_DIR,
    STAGE_FIGURES,
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

    kind: str  # sample | kv_sample | device_sample
    t_ns: int  # time.monotonic_ns() of the last reading
    since_ns: int  # of the first one; the same for a single reading
    folded: int  # readings
    figures: Mapping[str, int | None]  # of the last reading: schema.SAMPLE_FIGURES etc.
    low: Mapping[str, int | None]  # lowest and highest by figure, all readings
    high: Mapping[str, int | None]
    step: int | None = None  # of the last reading; None for a device sample
    steps: int = 0  # of the engine that it covers
    requests: tuple[tuple[str, int, int | None], ...] = ()  # id, scheduled tokens, tokens so far


@dataclass(frozen=True)
class Item:
    """A multimodal item, as the engine has it. Unknown is None."""

    modality: str | None = None
    tokens: int | None = None
    size: tuple[int, int] | None = None  # width, height: pixels after the engine's resizing
    frames: int | None = None
    bytes: int | None = None
    request: str | None = None  # id


@dataclass(frozen=True)
class MediaStage:
    """One passage of a worker through a multimodal stage."""

    stage: str  # of schema.STAGES
    begin_ns: int
    t_ns: int  # its end
    step: int | None
    requests: tuple[str, ...]
    items: tuple[Item, ...]
    figures: Mapping[str, int | None]  # schema.STAGE_FIGURES
    error: str | None = None  # the exception that left it


@dataclass(frozen=True)
class RequestRecord:
    """A request as the engine core knows it."""

    id: str
    prompt_tokens: int | None = None
    output_tokens: int | None = None  # None: it never ended
    items: tuple[Item, ...] = ()
    begin_ns: int | None = None  # the engine core took it in; None: the line is dropped
    end_ns: int | None = None
    reason: str | None = None  # why it ended, as the engine names it


@dataclass(frozen=True)
class RequestMemory:
    """A request as one worker knows it; fields as in schema.REQUEST_FIGURES."""

    id: str
    begin_ns: int | None = None
    end_ns: int | None = None
    first_step: int | None = None
    last_step: int | None = None
    sampled_steps: int | None = None
    others: int | None = None
    allocated_before_bytes: int | None = None
    reserved_before_bytes: int | None = None
    allocated_peak_bytes: int | None = None
    peak_exact: bool = False
    allocated_run_peak_bytes: int | None = None
    peak_stage: str | None = None
    peak_step: int | None = None
    left_allocated_bytes: int | None = None
    left_reserved_bytes: int | None = None
    finished: bool = True
    prompt_tokens: int | None = None
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
    served = Served()
    events: dict[int, list[Event]] = {}
    broken = 0
    for level, path in sample_files(run_dir, process):
        for line in path.read_bytes().split(b"\n"):
            if not line.strip():
                continue
            event = parse_event(line)
            if event is None:
                broken += 1
            else:
                events.setdefault(level, []).append(event)
    if not events:
        return served
    by_kind: dict[str, list[Event]] = {}
    for event in events.get(REQUESTS, []):
        by_kind.setdefault(str(event.get("kind")), []).append(event)
    levels = {
        level: [event for event in found if event.get("kind") in _FIGURES]
        for level, found in events.items()
        if level != REQUESTS
    }
    samples = {kind: _finest(levels, kind) for kind in _FIGURES}
    memory, kept = _memories(by_kind.get("request_memory", []))
    dropped = dropped_of(by_kind.get("dropped", []))
    if "request_memory" in dropped:
        dropped["request_memory"] = max(dropped["request_memory"] - kept, 0)
    return Served(
        samples=samples[SAMPLE],
        kv_samples=samples[KV_SAMPLE],
        device_samples=samples[DEVICE_SAMPLE],
        stages=[_stage(event) for event in by_kind.get("stage", [])],
        requests=_requests(by_kind.get("request", [])),
        request_memory=memory,
        dropped=dropped,
        dropped_lines=broken,
    )


def sample_files(run_dir: Path, process: str) -> list[tuple[int, Path]]:
    """Return (level, file) of one process, each level from its oldest to its newest file.

    The level is ``REQUESTS`` for the files of stages and requests.
    """
    found = []
    folder = Path(run_dir) / SAMPLES_DIR / process
    for path in folder.glob("*-*.jsonl"):
        level, _, number = path.stem.partition("-")
        if number.isdigit() and (level.isdigit() or level == "requests"):
            found.append((int(level) if level.isdigit() else REQUESTS, int(number), path))
    return [(level, path) for level, _, path in sorted(found)]


def _finest(levels: Mapping[int, Iterable[Event]], kind: str) -> list[Sample]:
    """Return the samples of a kind: of each time those of the finest level that still has it.

    A line of a coarser level that reaches into the time of a finer one counts whole, and the finer
    lines of that time do not: otherwise there would be a gap.
    """
    found: list[Sample] = []
    for level in sorted(levels):
        begins = found[0].since_ns if found else None
        coarser = [_sample(event) for event in levels[level] if event.get("kind") == kind]
        older = [each for each in coarser if begins is None or each.since_ns < begins]
        if older:
            found = [*older, *(each for each in found if each.since_ns > older[-1].t_ns)]
    return found


def _sample(event: Event) -> Sample:
    kind = str(event["kind"])
    names = [*_FIGURES[kind], *(name for name in event if name.startswith(RUNTIME))]
    last = {name: _number(name, event.get(name)) for name in names}
    low, high = event.get("low"), event.get("high")
    return Sample(
        kind=kind,
        t_ns=_integer("t_ns", event.get("t_ns")),
        since_ns=_integer("since_ns", event.get("since_ns", event.get("t_ns"))),
        folded=_integer("folded", event.get("folded", 1)),
        figures=last,
        low=last if low is None else {n: _number(n, low.get(n)) for n in names},
        high=last if high is None else {n: _number(n, high.get(n)) for n in names},
        step=_number("step", event.get("step")),
        steps=_integer("steps", event.get("steps", 0)),
        requests=tuple(
            (str(name), _integer("tokens", scheduled), _number("tokens", total))
            for name, scheduled, total in event.get("requests") or ()
        ),
    )


def _stage(event: Event) -> MediaStage:
    return MediaStage(
        stage=str(event.get("stage")),
        begin_ns=_integer("begin_ns", event.get("begin_ns")),
        t_ns=_integer("t_ns", event.get("t_ns")),
        step=_number("step", event.get("step")),
        requests=tuple(str(name) for name in event.get("requests") or ()),
        items=tuple(_item(item) for item in event.get("items") or ()),
        figures={name: _number(name, event.get(name)) for name in STAGE_FIGURES},
        error=event.get("error"),
    )


def _item(data: Mapping[str, Any]) -> Item:
    size = data.get("size")
    return Item(
        modality=data.get("modality"),
        tokens=_number("tokens", data.get("tokens")),
        size=None if size is None else (_integer("size", size[0]), _integer("size", size[1])),
        frames=_number("frames", data.get("frames")),
        bytes=_number("bytes", data.get("bytes")),
        request=data.get("request"),
    )


def _requests(events: Iterable[Event]) -> list[RequestRecord]:
    """Join both edges of each request; an id that comes again is another request."""
    found: list[RequestRecord] = []
    open_at: dict[str, int] = {}
    for event in events:
        name = str(event.get("id"))
        if event.get("edge") == "begin":
            open_at[name] = len(found)
            found.append(
                RequestRecord(
                    id=name,
                    prompt_tokens=_number("prompt_tokens", event.get("prompt_tokens")),
                    items=tuple(_item(item) for item in event.get("items") or ()),
                    begin_ns=_integer("t_ns", event.get("t_ns")),
                )
            )
            continue
        place = open_at.pop(name, None)
        began = RequestRecord(id=name) if place is None else found[place]
        ended = RequestRecord(
            id=name,
            prompt_tokens=began.prompt_tokens,
            output_tokens=_number("output_tokens", event.get("output_tokens")),
            items=began.items,
            begin_ns=began.begin_ns,
            end_ns=_integer("t_ns", event.get("t_ns")),
            reason=event.get("reason"),
        )
        if place is None:
            found.append(ended)
        else:
            found[place] = ended
    return found


def _memories(events: Iterable[Event]) -> tuple[list[RequestMemory], int]:
    """Return the requests in the order of their end, and how many outlived their file.

    The largest are written again when their file goes; an id that comes again is another request.
    """
    once: list[RequestMemory] = []
    again: dict[tuple[str, int | None], RequestMemory] = {}
    for event in events:
        record = _memory(event)
        if event.get("again"):
            again[record.id, record.end_ns] = record
        else:
            once.append(record)
    for record in once:
        again.pop((record.id, record.end_ns), None)
    older = sorted(again.values(), key=lambda each: each.end_ns or 0)
    return [*older, *once], len(older)


def _memory(event: Event) -> RequestMemory:
    known = {name: event[name] for name in RequestMemory.__dataclass_fields__ if name in event}
    for name, value in known.items():
        if name not in ("id", "peak_exact", "peak_stage", "finished", "items"):
            _number(name, value)
    known["items"] = tuple(_item(item) for item in event.get("items") or ())
    return RequestMemory(**known)


def dropped_of(events: Iterable[Event]) -> dict[str, int]:
    """Return the lines by kind that are in no file any more, by the events that say so."""
    total: dict[str, int] = {}
    for event in events:
        for kind, lines in (event.get("kinds") or {}).items():
            total[str(kind)] = max(total.get(str(kind), 0), _integer("lines", lines))
    return total


def _integer(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, not an integer")
    return value


def _number(name: str, value: Any) -> int | None:
    return None if value is None else _integer(name, value)
