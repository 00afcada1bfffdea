"""The document of a calibrated plan: each correction, then the answer with and without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from vllm_memprof.accounting.summary import engine_name
from vllm_memprof.accounting.titles import TITLES
from vllm_memprof.document import BAD, CODE, GOOD, MUTED, PLAIN, TOTAL, Document, Line, Section
from vllm_memprof.plans.calibrated import Calibrated
from vllm_memprof.plans.corrections import OWNERS, ProfileCorrection
from vllm_memprof.plans.rows import PlanRow
from vllm_memprof.record.spans import MODELLED
from vllm_memprof.tables import COUNT, GIB4, Column, modelled, signed, table, wide_only
from vllm_memprof.text import join, text
from vllm_memprof.units import format_gib, minus

_WIDE = 100
_TITLES = (
    text("context"),
    text("non-torch as one"),
    text("operator workspace"),
    text("communicators"),
    text("kernels and the runtime"),
    text("ATB's pool"),
    text("captured graphs"),
)
_OWNERS = dict(zip(OWNERS, _TITLES, strict=True))


def calibrated_document(found: Calibrated, width: int) -> Document:
    """Return the corrections with both of their sides, and both answers."""
    source, own = found.source, found.own
    said = [source.name, source.model, engine_name(source)]
    said.append(source.device or text("device not named"))
    if source.devices is not None:
        said.append(text("devices: {count}", count=source.devices))
    head = [
        Line(text("model"), found.model, TOTAL),
        Line(text("command"), " ".join(found.command), CODE),
        Line(text("hardware"), join(", ", [*said, source.rank])),
    ]
    if own is not None:
        planned = text("its command, planned on {stack}", stack=found.stack)
        if not own.ok:
            planned = text("its command, failed on {stack}", stack=found.stack)
        head.append(Line(text("simulated"), planned, PLAIN if own.ok else BAD))
    verdict, sizes = "", (found.corrected.kv_cache_bytes, found.without.kv_cache_bytes)
    if None not in sizes:
        verdict = text(
            "KV cache {size:gib} GiB with the corrections, {without:gib} GiB without",
            size=sizes[0],
            without=sizes[1],
        )
    up = found.without.ok and found.corrected.ok
    return Document(
        kind="calibrated",
        title=text("{model}, calibrated with hardware", model=found.model),
        head=head,
        sections=[_corrections(found, width >= _WIDE), _answer(found)],
        verdict=verdict,
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
        owner, parts = _OWNERS[each.owner], list[str]()
        for constant in each.constants:
            changed = text("{key} {before:bytes} -> {after:bytes}", **vars(constant))
            parts.append(changed)
        if parts:
            parts.append(text("per {what}", what=each.scales_with))
        parts += [each.reason] if each.reason else []
        if parts:
            notes.append(text("{owner}: {reason}", owner=owner, reason=join("; ", parts)))
    notes.append(
        text(
            "GiB; hardware and simulated are of the hardware run's own command; differences are "
            "hardware less simulated"
        )
    )

    def look(each: ProfileCorrection) -> str:
        return PLAIN if each.applied_bytes else MUTED

    title = text("Corrections of modelled memory")
    return table(title, _CORRECTIONS, found.corrections, notes, wide, look=look)


def _hardware(each: ProfileCorrection) -> str:
    figure = each.hardware
    shown = format_gib(None if figure is None else figure.bytes, 4)
    if figure is None or not figure.half_unit_bytes:
        return shown
    return f"{shown} ±{format_gib(figure.half_unit_bytes, 4)}"


def _simulated(each: ProfileCorrection) -> str:
    return "-" if each.simulated is None else modelled(GIB4(each.simulated.bytes), mark=True)


def _source(each: ProfileCorrection) -> str | None:
    figure = each.hardware
    if figure is None:
        return None
    return text("{source}; {how}", source=figure.source, how=TITLES["how"][figure.how])


def _signed(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**30:+.4f}"


_CORRECTIONS = (
    Column("Owner", lambda each: _OWNERS[each.owner]),
    Column("Hardware", _hardware, right=True),
    Column("Simulated", _simulated, right=True),
    Column("Difference", "difference_bytes", _signed),
    Column("Corrected by", lambda each: each.applied_bytes or None, _signed),
    Column("Hardware's figure", _source, when=wide_only),
)


class _Figure(NamedTuple):
    """A figure that both plans answer."""

    title: str
    name: str  # of ``PlanRow``
    unit: Callable[[int | None], str] = GIB4
    change: Callable[[int | None], str] = _signed
    of_device: bool = False  # the profile has a part in it


_FIGURES = (
    _Figure(text("KV cache, GiB"), "kv_cache_bytes"),
    _Figure(text("KV tokens"), "tokens", COUNT, signed),
    _Figure(text("KV cache that fits the device, GiB"), "fits_device_bytes", of_device=True),
    _Figure(text("Headroom, GiB"), "headroom_bytes", of_device=True),
)


def _answer(found: Calibrated) -> Section:
    plans = found.without, found.corrected

    def of(plan: PlanRow) -> Callable[[_Figure], str]:
        marked = plan.headroom_how == MODELLED
        return lambda row: modelled(row.unit(getattr(plan, row.name)), marked and row.of_device)

    def change(row: _Figure) -> str:
        without, corrected = (getattr(plan, row.name) for plan in plans)
        return row.change(minus(corrected, without))

    columns = (
        Column("Answer", "title"),
        Column("Without", of(found.without), right=True),
        Column("With, estimated", of(found.corrected), right=True),
        Column("Change", change, right=True),
    )
    notes: list[str] = [
        text("{plan}: {reason}", plan=plan.title, reason=plan.reason or plan.status)
        for plan in plans
        if not plan.ok
    ]
    notes.append(text("(m): with non-torch memory set by the profile of a simulated device"))
    return table(text("Answer with and without the corrections"), columns, _FIGURES, notes)
