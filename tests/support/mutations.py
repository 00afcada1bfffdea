"""One mutation at a time of a recorded run: a figure of the engine, or a reading of memprof."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

from vllm_memprof.record.loader import ProcessRecord, Run
from vllm_memprof.record.schema import Snapshot
from vllm_memprof.record.spans import Span, ancestors
from vllm_memprof.units import MIB

Value = int | float
#: Name -> what it makes of a value. The shift is larger than every tolerance.
CHANGES: dict[str, Callable[[Value], Value]] = {
    "halved": lambda value: value // 2 if isinstance(value, int) else value / 2,
    "doubled": lambda value: value * 2,
    "shifted": lambda value: value + 256 * MIB,
}


@dataclass(frozen=True)
class Mutation:
    """What was changed in one rank, and how."""

    what: str  # figure NAME | reading PHASE/PHASE.EDGE.FIELD | plan NAME
    change: str  # of CHANGES
    run: Run


def workers(run: Run) -> list[ProcessRecord]:
    return [process for process in run.processes if process.is_worker]


def figures_of(run: Run) -> Iterator[Mutation]:
    """Yield the run with each figure that the engine of its first worker keeps changed."""
    first = workers(run)[0]
    for name, value in first.figures.items():
        if value is None:
            continue
        for change, make in CHANGES.items():
            if (new := make(value)) != value:
                changed = replace(first, figures={**first.figures, name: new})
                yield Mutation(f"figure {name}", change, _with(run, first, changed))


def with_its_grant(mutation: Mutation, granted: int) -> Mutation:
    """Return the mutation as an engine makes it: its KV cache follows from the wrong figure."""
    first = workers(mutation.run)[0]
    changed = replace(first, figures={**first.figures, "kv_cache_bytes": granted})
    return replace(mutation, run=_with(mutation.run, first, changed))


def readings_of(run: Run) -> Iterator[Mutation]:
    """Yield the run with each field of each snapshot of its first worker changed."""
    first = workers(run)[0]
    for at, span in enumerate(first.phases):
        for edge in span.edges:
            for field in fields(Snapshot):
                value = getattr(edge.snapshot, field.name)
                if not isinstance(value, int) or field.name == "t_ns":
                    continue
                for change, make in CHANGES.items():
                    if (new := make(value)) == value:
                        continue
                    snapshot = replace(edge.snapshot, **{field.name: new})
                    phases = [*first.phases]
                    phases[at] = replace(span, **{edge.side: snapshot})
                    what = f"reading {_path(first.phases, span)}.{edge.side}.{field.name}"
                    yield Mutation(what, change, _with(run, first, replace(first, phases=phases)))


def _path(spans: list[Span], span: Span) -> str:
    """Return ``profile_run/empty_cache#2``: numbered where a phase passes several times there."""
    names = []
    for each in (*reversed([*ancestors(spans, span)]), span):
        alike = [
            other for other in spans if (other.phase, other.parent) == (each.phase, each.parent)
        ]
        number = f"#{alike.index(each) + 1}" if len(alike) > 1 else ""
        names.append(each.phase + number)
    return "/".join(names)


def plans_of(run: Run) -> Iterator[Mutation]:
    """Yield the run with each number of the engine's KV plan changed."""
    core = next(process for process in run.processes if process.kv_plan is not None)
    plan = core.kv_plan or {}
    for name, value in plan.items():
        sizes = value if isinstance(value, list) else [value]
        if name == "t_ns" or not sizes or any(type(size) not in (int, float) for size in sizes):
            continue
        for change, make in CHANGES.items():
            new = [make(size) for size in sizes]
            if new == sizes:
                continue
            changed = {**plan, name: new if isinstance(value, list) else new[0]}
            yield Mutation(f"plan {name}", change, _with(run, core, replace(core, kv_plan=changed)))


def _with(run: Run, old: ProcessRecord, new: ProcessRecord) -> Run:
    processes = [new if process is old else process for process in run.processes]
    return replace(run, processes=processes)
