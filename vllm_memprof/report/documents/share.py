"""The document of several instances on one device: each alone, the shares, the starts with them."""

from __future__ import annotations

from vllm_memprof.document import (
    BAD,
    CODE,
    GOOD,
    PLAIN,
    TOTAL,
    Document,
    Head,
    Line,
    Row,
    Section,
)
from vllm_memprof.plans.share_rows import DeviceShare, Flags, InstanceStart, SharingPlan
from vllm_memprof.record.schema import READY
from vllm_memprof.tables import modelled
from vllm_memprof.text import Text, join, text
from vllm_memprof.units import format_bytes, format_gib, one_line

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
        sections.append(_way(way, wide))
        if way.starts:
            sections.append(_starts(way.starts, wide))
    return Document(
        kind="share",
        title=models,
        head=head,
        sections=sections,
        verdict="",
        tail=tail,
        badge=Line(text("answer"), text("found") if holding else text("none"), tail[0].style),
        whole="share.json",
    )


def _alone(share: DeviceShare, wide: bool) -> Section:
    columns = [
        Head(text("Instance")),
        *([Head(text("Model"), right=False)] if wide else []),
        Head(text("Subtracted,\nGiB")),
        Head(text("Held when\nready, GiB")),
        Head(text("Held at the\npeak, GiB")),
        Head(text("Needs,\nGiB")),
        Head(text("Status"), right=False),
    ]
    rows, notes = [], list[str]()
    for each in share.instances:
        sizes = (each.held_ready_bytes, each.held_peak_bytes)
        rows.append(
            Row(
                [
                    each.name,
                    *([each.model] if wide else []),
                    modelled(format_gib(each.subtracted_bytes), share.simulated),
                    *(modelled(format_gib(size), share.simulated) for size in sizes),
                    format_gib(each.need_bytes, 4),
                    _STATUS.get(each.status, each.status),
                ],
                style=PLAIN if each.status == "ok" else BAD,
            )
        )
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
    return Section(text("Each alone"), columns, rows, notes)


def _title(way: SharingPlan) -> Text:
    if way.order is not None:
        if len(way.order) == 1:
            return text("By utilization")
        return text("By utilization, started in the order {order}", order=", ".join(way.order))
    if way.name == "blocks":
        return text("By number of blocks, in any order of starting")
    return text("By utilization, in any order of starting")


def _way(way: SharingPlan, wide: bool) -> Section:
    if not way.flags:
        reason = text("none: {reason}", reason=way.why_none or "-")
        return Section(_title(way), [], [], [reason])
    blocks = way.name == "blocks"
    columns = [
        Head(text("Instance")),
        Head("gpu-memory-\nutilization"),
        *([Head("num-gpu-blocks-\noverride")] if blocks else []),
        Head(text("KV, GiB")),
        Head(text("Tokens")),
        Head(text("0.02 more"), right=False),
    ]
    more = {each.name: each for each in way.more}
    rows, notes = [], list[str]()
    for each in way.flags:
        step = more.get(each.name)
        said = "-"
        if step is not None:
            said = text("starts") if step.starts else text("does not")
            notes.append(
                text(
                    "{name} with {share:.2f}: {why}",
                    name=each.name,
                    share=step.gpu_memory_utilization,
                    why=step.why,
                )
            )
        rows.append(Row([*_flags(each, blocks), said]))
    notes.append(
        text(
            "computed from the plans alone and the engine's equation: the least in the orders of "
            "starting; the starts below are observed"
        )
    )
    return Section(_title(way), columns, rows, notes)


def _flags(each: Flags, blocks: bool) -> list[str]:
    return [
        each.name,
        f"{each.gpu_memory_utilization:.2f}",
        *([format_bytes(each.num_gpu_blocks_override)] if blocks else []),
        format_gib(each.kv_cache_bytes),
        format_bytes(each.tokens),
    ]


def _starts(starts: list[InstanceStart], wide: bool) -> Section:
    columns = [
        Head(text("Order"), right=False),
        Head(text("Those before"), right=False),
        Head(text("Instance")),
        Head(text("Status"), right=False),
        Head(text("KV, GiB")),
        Head(text("Tokens")),
        Head(text("Least free,\nGiB")),
    ]
    rows, notes = [], list[str]()
    for start in starts:
        order = ", ".join(start.order)
        before = text("were ready") if start.neighbours == READY else text("had served")
        for place, result in enumerate(start.results):
            first = place == 0
            rows.append(
                Row(
                    [
                        order if first else "",
                        before if first else "",
                        result.name,
                        _STATUS.get(result.status, result.status),
                        format_gib(result.kv_cache_bytes),
                        format_bytes(result.tokens),
                        format_gib(start.least_free_bytes) if first else "",
                    ],
                    style=PLAIN if result.passes else BAD,
                )
            )
            reasons = [*([result.reason] if result.reason else []), *result.missing]
            if reasons and not result.passes:
                reason = one_line("; ".join(reasons), _REASON)
                where = text("{order}: {name}: {reason}", order=order, name=result.name,
                             reason=reason)  # fmt: skip
                notes.append(where)
    if all(start.passes for start in starts):
        notes.append(
            text("each start: all came up, and held what serving their largest batches took")
        )
    return Section(text("Starts"), columns, rows, notes)
