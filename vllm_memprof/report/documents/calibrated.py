"""The document of a calibrated plan: each correction, then the answer with and without it."""

from __future__ import annotations

from vllm_memprof.document import (
    BAD,
    CODE,
    GOOD,
    MUTED,
    PLAIN,
    TOTAL,
    Document,
    Head,
    Line,
    Row,
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
from vllm_memprof.tables import UNKNOWN, modelled
from vllm_memprof.text import Text, join, text
from vllm_memprof.units import format_bytes, format_gib, minus

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
    engine = " ".join(part for part in (source.engine, source.engine_version) if part)
    said = [source.model, engine, source.device or text("device not named")]
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
    )


def _corrections(found: Calibrated, wide: bool) -> Section:
    columns = [
        Head(text("Owner"), right=False),
        Head(text("Hardware")),
        Head(text("Simulated")),
        Head(text("Difference")),
        Head(text("Corrected by")),
        *([Head(text("Hardware's figure"), right=False)] if wide else []),
    ]
    rows: list[Row] = []
    notes: list[str] = []
    for each in found.corrections:
        owner = _OWNERS.get(each.owner, each.owner)
        cells = [
            owner,
            _rounded(each),
            modelled(format_gib(each.simulated_bytes, 4), each.simulated_bytes is not None),
            _signed(each.difference_bytes),
            _signed(each.applied_bytes) if each.applied_bytes else "-",
            *([_told(each)] if wide else []),
        ]
        rows.append(Row(cells, style=PLAIN if each.applied_bytes else MUTED))
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
    return Section(text("Corrections of modelled memory"), columns, rows, notes)


def _told(each: ProfileCorrection) -> Text | str:
    if each.source is None:
        return "-"
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


def _answer(found: Calibrated) -> Section:
    columns = [
        Head(text("Answer"), right=False),
        Head(text("Without")),
        Head(text("With, estimated")),
        Head(text("Change")),
    ]
    sides = (found.without, found.corrected)
    rows = []
    for title, name in (
        (text("KV cache, GiB"), "kv_cache_bytes"),
        (text("KV cache that fits the device, GiB"), "fits_device_bytes"),
        (text("Spare, GiB"), "spare_bytes"),
    ):
        sizes = [getattr(side, name) for side in sides]
        marked = name != "kv_cache_bytes"
        cells = [
            modelled(format_gib(size, 4), marked and side.spare_how == MODELLED)
            for size, side in zip(sizes, sides, strict=True)
        ]
        rows.append(Row([title, *cells, _signed(minus(sizes[1], sizes[0]))]))
    tokens = [side.tokens for side in sides]
    change = minus(tokens[1], tokens[0])
    cells = [format_bytes(each) for each in tokens]
    rows.insert(1, Row([text("KV tokens"), *cells, "-" if change is None else f"{change:+,}"]))
    rows.append(Row([text("fits the device"), *(_fits(side) for side in sides), ""]))
    for side, title in zip(sides, (text("without"), text("with")), strict=True):
        if not side.ok:
            reason = side.reason or side.status
            rows.append(Row([title, text("failed"), reason, ""], style=BAD))
    notes = [text("(m): with non-torch memory set by the profile of a simulated device")]
    return Section(text("Answer with and without the corrections"), columns, rows, [*notes])


def _fits(row: PlanRow) -> Text | str:
    if row.spare_bytes is None:
        return "-"
    return text("yes") if row.spare_bytes >= 0 else text("no")


def _verdict(found: Calibrated) -> str:
    if found.corrected.kv_cache_bytes is None or found.without.kv_cache_bytes is None:
        return ""
    return text(
        "KV cache {size:gib} GiB with the corrections, {without:gib} GiB without",
        size=found.corrected.kv_cache_bytes,
        without=found.without.kv_cache_bytes,
    )
