"""The document of several instances on one device: each alone, the shares, the starts with them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from vllm_memprof.document import BAD, CODE, GOOD, PLAIN, TOTAL, Document, Line, Section
from vllm_memprof.plans.rows import Try
from vllm_memprof.plans.share import STEP, DeviceShare, InstanceStart, SharingPlan, SoloPlan
from vllm_memprof.record.schema import READY
from vllm_memprof.tables import (
    COUNT,
    GIB,
    GIB4,
    STATUS_WORDS,
    Column,
    modelled,
    number,
    table,
    wide_only,
)
from vllm_memprof.text import Text, join, text
from vllm_memprof.units import one_line

#: From this width on models and reasons have columns of their own.
_WIDE = 100
_REASON = 200


def share_document(share: DeviceShare, width: int) -> Document:
    """Return a table of each alone, one of every way to share with its starts, and the flags."""
    models = ", ".join(f"{each.name} {each.model}" for each in share.instances)
    head = [
        Line(text("instances"), models, TOTAL),
        Line(text("command"), " ".join(share.command), CODE),
    ]
    if share.equation is not None:
        head.append(Line(text("equation"), share.equation))
    for name, size in (
        (text("device"), share.device_total_bytes),
        (text("beside"), share.beside_bytes),
        (text("headroom"), share.headroom_bytes),
    ):
        if size:
            head.append(Line(name, text("{total:gib} GiB", total=size)))
    holding = [way for way in share.ways if way.holds]
    found = text("found and started") if holding else text("none")
    answer = Line(text("answer"), found, GOOD if holding else BAD)
    tail = [answer]
    if share.why_none is not None:
        tail.append(Line(text("why"), share.why_none))
    for way in holding:
        tail.append(Line(text("use"), _title(way), TOTAL))
        tail += [Line("", f"{each.name}: {each.flags}", CODE) for each in way.flags]
    tail += [Line(text("note"), note) for note in share.notes]
    sections = [_alone(share, width >= _WIDE)]
    for way in share.ways:
        sections.append(_way(way))
        if way.starts:
            sections.append(_starts(way.starts))
    return Document(
        kind="share",
        title=models,
        head=head,
        sections=sections,
        verdict="",
        tail=tail,
        badge=answer,
        whole="share.json",
        simulated=True,
    )


def _held(name: str) -> Callable[[SoloPlan], str]:
    return lambda row: modelled(GIB(getattr(row.figures, name, None)), mark=True)


_ALONE = (
    Column("Instance", "name", right=True),
    Column("Model", "model", when=wide_only),
    Column("Subtracted,\nGiB", _held("subtracted_bytes"), right=True),
    Column("Held when\nready, GiB", _held("ready_bytes"), right=True),
    Column("Held at the\npeak, GiB", _held("peak_bytes"), right=True),
    Column("Needs,\nGiB", lambda row: getattr(row.figures, "need_bytes", None), GIB4),
    Column("Status", lambda row: STATUS_WORDS[row.plan.status]),
)


def _alone(share: DeviceShare, wide: bool) -> Section:
    notes: list[str] = [
        text("{name} wants: {wanted}", name=each.name, wanted=join("; ", each.wanted))
        for each in share.instances
        if each.wanted
    ]
    notes += [
        text("subtracted: by the engine's equation, with the device to itself"),
        text("held: beside the KV cache; at the peak with the largest batches served"),
        text("needs: KV cache for a request of max_model_len, and for what is wanted"),
        text("(m): with non-torch memory set by the profile of a simulated device"),
    ]

    def look(row: SoloPlan) -> str:
        return PLAIN if row.plan.ok else BAD

    return table(text("Each alone"), _ALONE, share.instances, notes, wide, look=look)


def _title(way: SharingPlan) -> Text:
    if way.order is not None:
        return text("By utilization, started in the order {order}", order=", ".join(way.order))
    if way.name == "blocks":
        return text("By number of blocks, in any order of starting")
    return text("By utilization, in any order of starting")


def _way(way: SharingPlan) -> Section:
    if not way.flags:
        reason = text("none: {reason}", reason=way.why_none or "-")
        return Section(_title(way), [], [], [reason])
    notes: list[str] = [
        text(
            "{name} with {share:.2f}: {why}",
            name=each.name,
            share=each.gpu_memory_utilization + STEP,
            why=each.more,
        )
        for each in way.flags
    ]
    notes.append(
        text(
            "computed from the plans alone and the engine's equation: the least in the orders of "
            "starting; the starts below are observed"
        )
    )
    columns = (
        Column("Instance", "name", right=True),
        Column("gpu-memory-\nutilization", "gpu_memory_utilization", partial(number, spec=".2f")),
        Column(
            "num-gpu-blocks-\noverride",
            "num_gpu_blocks_override",
            COUNT,
            when=way.name == "blocks",
        ),
        Column("KV, GiB", "kv_cache_bytes", GIB),
        Column("Tokens", "tokens", COUNT),
        Column("0.02 more", lambda row: text("starts") if row.more_starts else text("does not")),
    )
    return table(_title(way), columns, way.flags, notes)


class _StartRow(NamedTuple):
    """An instance in a start."""

    start: InstanceStart
    result: Try


def _before(row: _StartRow) -> str:
    return text("were ready") if row.start.neighbours == READY else text("had served")


_STARTS = (
    Column("Order", lambda row: ", ".join(row.start.order)),
    Column("Those before", _before),
    Column("Instance", "result.value", right=True),
    Column("Status", lambda row: STATUS_WORDS[row.result.plan.status]),
    Column("KV, GiB", "result.plan.kv_cache_bytes", GIB),
    Column("Tokens", "result.plan.tokens", COUNT),
    Column("Least free,\nGiB", "start.least_free_bytes", GIB),
)


def _starts(starts: list[InstanceStart]) -> Section:
    rows = [_StartRow(start, result) for start in starts for result in start.results]
    notes: list[str] = [
        text(
            "{order}: {name}: {reason}",
            order=", ".join(start.order),
            name=result.value,
            reason=one_line("; ".join(miss.text for miss in result.missing), _REASON),
        )
        for start, result in rows
        if result.missing
    ]
    if not notes:
        notes = [text("each start: all came up, and held what serving their largest batches took")]

    def look(row: _StartRow) -> str:
        return PLAIN if row.result.holds else BAD

    return table(text("Starts"), _STARTS, rows, notes, look=look)
