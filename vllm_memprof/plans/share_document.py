"""The document of several instances on one device: each alone, the shares, the starts with them."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from vllm_memprof.document import (
    BAD,
    CODE,
    GOOD,
    PLAIN,
    TOTAL,
    Document,
    Line,
    Section,
)
from vllm_memprof.plans.share_rows import (
    DeviceShare,
    Flags,
    InstanceStart,
    SharingPlan,
    SoloPlan,
    Started,
)
from vllm_memprof.record.schema import READY
from vllm_memprof.tables import COUNT, GIB, GIB4, Column, modelled, number, table, wide_only
from vllm_memprof.text import Text, join, text
from vllm_memprof.units import one_line

#: From this width on models and reasons have columns of their own.
_WIDE = 100
_REASON = 200
_STATUS = {
    "ok": text("ok"),
    "oom": text("oom"),
    "failed": text("failed"),
    "not started": text("not started"),
}


def share_document(share: DeviceShare, width: int) -> Document:
    """Return a table of each alone, one of every way to share with its starts, and the flags."""
    wide = width >= _WIDE
    models = ", ".join(f"{each.name} {each.model}" for each in share.instances)
    head = [
        Line(text("instances"), models, TOTAL),
        Line(text("command"), " ".join(share.command), CODE),
    ]
    if share.device_total_bytes is not None:
        head.append(Line(text("device"), text("{total:gib} GiB", total=share.device_total_bytes)))
    if share.equation is not None:
        head.append(Line(text("equation"), share.equation))
    if share.beside_bytes:
        head.append(Line(text("beside"), text("{total:gib} GiB", total=share.beside_bytes)))
    if share.headroom_bytes:
        head.append(Line(text("headroom"), text("{total:gib} GiB", total=share.headroom_bytes)))
    holding = [way for way in share.ways if way.holds]
    answer = text("{count} ways, each started", count=len(holding)) if holding else text("none")
    if len(holding) == 1:
        answer = text("found and started")
    tail = [Line(text("answer"), answer, GOOD if holding else BAD)]
    if share.why_none is not None:
        tail.append(Line(text("why"), share.why_none))
    for way in holding:
        tail.append(Line(text("use"), _title(way), TOTAL))
        tail += [Line("", f"{each.name}: {each.flags}", CODE) for each in way.flags]
    tail += [Line(text("note"), note) for note in share.notes]
    sections = [_alone(share, wide)]
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
        badge=Line(text("answer"), text("found") if holding else text("none"), tail[0].style),
        whole="share.json",
        simulated=share.simulated,
    )


def _status(row: SoloPlan | Started) -> str:
    return _STATUS.get(row.status, row.status)


def _alone(share: DeviceShare, wide: bool) -> Section:
    notes: list[str] = []
    for each in share.instances:
        if each.wanted:
            wanted = join("; ", each.wanted)
            notes.append(text("{name} wants: {wanted}", name=each.name, wanted=wanted))
        if each.fixed_utilization is not None:
            notes.append(
                text(
                    "{name}: --gpu-memory-utilization {share:g} as given",
                    name=each.name,
                    share=each.fixed_utilization,
                )
            )
    notes += [
        text("subtracted: by the engine's equation, with the device to itself"),
        text("held: beside the KV cache; at the peak with the largest batches served"),
        text("needs: KV cache for a request of max_model_len, and for what is wanted"),
    ]
    if share.simulated:
        notes.append(text("(m): with non-torch memory set by the profile of a simulated device"))

    def look(row: SoloPlan) -> str:
        return PLAIN if row.status == "ok" else BAD

    def held(size: int | None) -> str:
        return modelled(GIB(size), share.simulated)

    columns = (
        Column("Instance", "name", right=True),
        Column("Model", "model", when=wide_only),
        Column("Subtracted,\nGiB", "subtracted_bytes", held),
        Column("Held when\nready, GiB", "held_ready_bytes", held),
        Column("Held at the\npeak, GiB", "held_peak_bytes", held),
        Column("Needs,\nGiB", "need_bytes", GIB4),
        Column("Status", _status),
    )
    return table(text("Each alone"), columns, share.instances, notes, wide, look=look)


def _title(way: SharingPlan) -> Text:
    if way.order is not None:
        if len(way.order) == 1:
            return text("By utilization")
        return text("By utilization, started in the order {order}", order=", ".join(way.order))
    if way.name == "blocks":
        return text("By number of blocks, in any order of starting")
    return text("By utilization, in any order of starting")


def _way(way: SharingPlan) -> Section:
    if not way.flags:
        reason = text("none: {reason}", reason=way.why_none or "-")
        return Section(_title(way), [], [], [reason])
    more = {each.name: each for each in way.more}
    notes: list[str] = [
        text(
            "{name} with {share:.2f}: {why}",
            name=each.name,
            share=more[each.name].gpu_memory_utilization,
            why=more[each.name].why,
        )
        for each in way.flags
        if each.name in more
    ]
    notes.append(
        text(
            "computed from the plans alone and the engine's equation: the least in the orders of "
            "starting; the starts below are observed"
        )
    )

    def with_more(row: Flags) -> str | None:
        if row.name not in more:
            return None
        return text("starts") if more[row.name].starts else text("does not")

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
        Column("0.02 more", with_more),
    )
    return table(_title(way), columns, way.flags, notes)


class _StartRow(NamedTuple):
    """An instance in a start; what the start has once stands in its first row."""

    start: InstanceStart
    result: Started

    @property
    def first(self) -> bool:
        return self.result is self.start.results[0]


def _before(row: _StartRow) -> str:
    if not row.first:
        return ""
    return text("were ready") if row.start.neighbours == READY else text("had served")


_STARTS = (
    Column("Order", lambda row: ", ".join(row.start.order) if row.first else ""),
    Column("Those before", _before),
    Column("Instance", "result.name", right=True),
    Column("Status", lambda row: _status(row.result)),
    Column("KV, GiB", "result.kv_cache_bytes", GIB),
    Column("Tokens", "result.tokens", COUNT),
    Column(
        "Least free,\nGiB",
        lambda row: GIB(row.start.least_free_bytes) if row.first else "",
        right=True,
    ),
)


def _starts(starts: list[InstanceStart]) -> Section:
    rows = [_StartRow(start, result) for start in starts for result in start.results]
    notes: list[str] = []
    for start, result in rows:
        reasons = [*([result.reason] if result.reason else []), *result.missing]
        if reasons and not result.passes:
            notes.append(
                text(
                    "{order}: {name}: {reason}",
                    order=", ".join(start.order),
                    name=result.name,
                    reason=one_line("; ".join(reasons), _REASON),
                )
            )
    if all(start.passes for start in starts):
        notes.append(
            text("each start: all came up, and held what serving their largest batches took")
        )

    def look(row: _StartRow) -> str:
        return PLAIN if row.result.passes else BAD

    return table(text("Starts"), _STARTS, rows, notes, look=look)
