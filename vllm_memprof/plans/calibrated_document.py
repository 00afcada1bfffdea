"""The document of a calibrated plan: each correction, then the answer with and without it."""

from __future__ import annotations

from typing import NamedTuple

from vllm_memprof.accounting.summary import engine_name
from vllm_memprof.document import (
    BAD,
    CODE,
    GOOD,
    MUTED,
    PLAIN,
    TOTAL,
    Document,
    Line,
    Section,
)
from vllm_memprof.plans.calibrated_rows import (
    ATB,
    COMMUNICATORS,
    CONTEXT,
    GRAPH,
    KERNELS,
    NON_TORCH,
    WORKSPACE,
    Calibrated,
    ProfileCorrection,
)
from vllm_memprof.plans.rows import PlanRow
from vllm_memprof.record.spans import MODELLED
from vllm_memprof.tables import COUNT, GIB4, UNKNOWN, Column, modelled, number, table, wide_only
from vllm_memprof.text import Text, join, text
from vllm_memprof.units import format_gib, minus

_WIDE = 100
_OWNERS = {
    CONTEXT: text("context"),
    NON_TORCH: text("non-torch as one"),
    WORKSPACE: text("operator workspace"),
    COMMUNICATORS: text("communicators"),
    KERNELS: text("kernels and the runtime"),
    ATB: text("ATB's pool"),
    GRAPH: text("captured graphs"),
}
_HOW = {"measured": text("measured"), "derived": text("derived")}


def calibrated_document(found: Calibrated, width: int) -> Document:
    """Return the corrections with both of their sides, and both answers."""
    source = found.source
    said = [source.model, engine_name(source), source.device or text("device not named")]
    if source.devices is not None:
        said.append(text("devices: {count}", count=source.devices))
    if source.rank:
        said.append(source.rank)
    head = [
        Line(text("model"), found.model, TOTAL),
        Line(text("command"), " ".join(found.command), CODE),
        Line(text("hardware"), join(", ", [source.name, *said])),
    ]
    if found.own is not None:
        planned = text("its command, planned on {stack}", stack=found.stack)
        if not found.own.ok:
            planned = text("its command, failed on {stack}", stack=found.stack)
        head.append(Line(text("simulated"), planned, PLAIN if found.own.ok else BAD))
    up = found.without.ok and found.corrected.ok
    return Document(
        kind="calibrated",
        title=text("{model}, calibrated with hardware", model=found.model),
        head=head,
        sections=[_corrections(found, width >= _WIDE), _answer(found)],
        verdict=_verdict(found),
        tail=[
            *(Line(text("note"), note) for note in found.notes),
            Line(text("profile"), found.profile),
        ],
        badge=Line(text("status"), text("ok") if up else text("failed"), GOOD if up else BAD),
        whole="calibrated.json",
        simulated=True,
    )


def _corrections(found: Calibrated, wide: bool) -> Section:
    notes: list[str] = []
    for each in found.corrections:
        owner = _OWNERS.get(each.owner, each.owner)
        if each.constants:
            changed = join(
                ", ",
                [
                    text(
                        "{key} {before:bytes} -> {after:bytes}",
                        key=constant.key,
                        before=constant.before,
                        after=constant.after,
                    )
                    for constant in each.constants
                ],
            )
            notes.append(
                text("{owner}: {changed}, per {what}", owner=owner, changed=changed,
                     what=each.scales_with or UNKNOWN)
            )  # fmt: skip
        if each.reason:
            notes.append(text("{owner}: {reason}", owner=owner, reason=each.reason))
    notes.append(
        text("GiB; hardware and simulated are of the hardware run's own command; differences are "
             "hardware less simulated")
    )  # fmt: skip

    def look(each: ProfileCorrection) -> str:
        return PLAIN if each.applied_bytes else MUTED

    title = text("Corrections of modelled memory")
    return table(title, _CORRECTIONS, found.corrections, notes, wide, look=look)


def _told(each: ProfileCorrection) -> Text | None:
    if each.source is None:
        return None
    how = _HOW.get(each.hardware_how or "", UNKNOWN)
    if each.half_unit_bytes:
        return text("{source}; {how}, from the log", source=each.source, how=how)
    return text("{source}; {how}", source=each.source, how=how)


def _rounded(each: ProfileCorrection) -> str:
    shown = format_gib(each.hardware_bytes, 4)
    if each.hardware_bytes is None or not each.half_unit_bytes:
        return shown
    return f"{shown} ±{format_gib(each.half_unit_bytes, 4)}"


def _signed(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**30:+.4f}"


_CORRECTIONS = (
    Column("Owner", lambda each: _OWNERS.get(each.owner, each.owner)),
    Column("Hardware", _rounded, right=True),
    Column(
        "Simulated",
        lambda each: modelled(GIB4(each.simulated_bytes), each.simulated_bytes is not None),
        right=True,
    ),
    Column("Difference", "difference_bytes", _signed),
    Column("Corrected by", lambda each: each.applied_bytes or None, _signed),
    Column("Hardware's figure", _told, when=wide_only),
)


class _AnswerRow(NamedTuple):
    """What both plans answer, as it is printed."""

    title: str
    without: str
    corrected: str
    change: str = ""
    style: str = PLAIN


_ANSWER = (
    Column("Answer", "title"),
    Column("Without", "without", right=True),
    Column("With, estimated", "corrected", right=True),
    Column("Change", "change", right=True),
)


def _answer(found: Calibrated) -> Section:
    without, corrected = found.without, found.corrected

    def sized(title: str, name: str) -> _AnswerRow:
        sizes = getattr(without, name), getattr(corrected, name)
        cells = [
            modelled(GIB4(size), name != "kv_cache_bytes" and side.headroom_how == MODELLED)
            for size, side in zip(sizes, (without, corrected), strict=True)
        ]
        return _AnswerRow(title, cells[0], cells[1], _signed(minus(sizes[1], sizes[0])))

    rows = [
        sized(text("KV cache, GiB"), "kv_cache_bytes"),
        _AnswerRow(
            text("KV tokens"),
            COUNT(without.tokens),
            COUNT(corrected.tokens),
            number(minus(corrected.tokens, without.tokens), "+,"),
        ),
        sized(text("KV cache that fits the device, GiB"), "fits_device_bytes"),
        sized(text("Headroom, GiB"), "headroom_bytes"),
        _AnswerRow(text("fits the device"), _fits(without), _fits(corrected)),
    ]
    for side, title in ((without, text("without")), (corrected, text("with"))):
        if not side.ok:
            rows.append(_AnswerRow(title, text("failed"), side.reason or side.status, style=BAD))
    notes = [text("(m): with non-torch memory set by the profile of a simulated device")]
    return table(text("Answer with and without the corrections"), _ANSWER, rows, notes)


def _fits(row: PlanRow) -> Text | str:
    if row.headroom_bytes is None:
        return "-"
    return text("yes") if row.headroom_bytes >= 0 else text("no")


def _verdict(found: Calibrated) -> str:
    if found.corrected.kv_cache_bytes is None or found.without.kv_cache_bytes is None:
        return ""
    return text(
        "KV cache {size:gib} GiB with the corrections, {without:gib} GiB without",
        size=found.corrected.kv_cache_bytes,
        without=found.without.kv_cache_bytes,
    )
