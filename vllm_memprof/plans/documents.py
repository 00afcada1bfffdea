"""The documents of a sweep, a search, a division and a calibrated plan; a sweep as csv."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import NamedTuple

from vllm_memprof.accounting.summary import engine_name
from vllm_memprof.accounting.titles import TITLES
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
    note_lines,
)
from vllm_memprof.plans.calibrated import Calibrated
from vllm_memprof.plans.corrections import OWNERS, ProfileCorrection
from vllm_memprof.plans.curves import curves
from vllm_memprof.plans.model import DOCUMENTS, READY, Fit, PlanRow, Sweep, Try
from vllm_memprof.plans.share import DeviceShare, InstanceStart, SharingPlan, SoloPlan
from vllm_memprof.plans.wants import misses
from vllm_memprof.record.spans import MODELLED
from vllm_memprof.tables import (
    GIB4,
    Column,
    Figures,
    Paper,
    group_ranks,
    modelled,
)
from vllm_memprof.text import Text, csv_cell, join, text, titled
from vllm_memprof.units import format_signed_gib, one_line

#: From these widths on the tables have all their columns, and all names in one line.
_WIDE, _PAGE = 100, 200
#: Characters of an option's name in a narrower table, and of a reason below any table.
_NARROW_COLUMN, _REASON = 11, 200
#: Owners that grew which are shown below a search.
_GROWN = 3
_MODELLED = text("(m): with non-torch memory set by the profile of a simulated device")

#: Columns of the csv behind one for each option that was varied, which bear the options' own
#: names. Bytes are integers, an empty cell is unknown. ``docs/concepts/plans.md`` explains each.
_NOT_IN_CSV = ("values", "final", "concurrency_at", "until", "step")
CSV_COLUMNS = tuple(each.name for each in fields(PlanRow) if each.name not in _NOT_IN_CSV)


def sweep_document(sweep: Sweep, width: int) -> Document:
    """Return a row per plan; the reasons of those that failed below it."""
    rows = sweep.rows
    total = next((row.device_total_bytes for row in rows if row.device_total_bytes), None)
    known = [row for row in rows if row.ok and row.tokens is not None]
    up = text("{count} of {all_of} came up", count=sum(row.ok for row in rows), all_of=len(rows))
    came_up = Line(text("status"), up, GOOD if all(row.ok for row in rows) else BAD)
    return Document(
        kind="sweep",
        title=sweep.model,
        head=[
            Line(text("model"), sweep.model, TOTAL),
            Line(text("command"), " ".join(sweep.command), CODE),
            *(Line(knob.name, ", ".join(knob.values)) for knob in sweep.knobs),
            Line(text("device"), text("{total:gib} GiB", total=total)),
            came_up,
        ],
        sections=[_rows(sweep.model, [knob.name for knob in sweep.knobs], rows, width)],
        verdict=text(
            "most KV tokens: {tokens:,} ({kv_cache_bytes:gib} GiB) with {title}",
            max(known, key=lambda row: row.tokens or 0),
        )
        if known
        else "",
        tail=note_lines(sweep.notes),
        badge=came_up,
        whole="sweep.json",
        simulated=any(row.simulated for row in rows),
        curves=curves(sweep),
    )


def fit_document(fit: Fit, width: int) -> Document:
    """Return a row per plan, in the order in which they were tried; the answer below them."""

    def look(each: Try) -> str:
        if each.value == fit.answer:
            return GOOD
        return PLAIN if each.holds else MUTED

    cached, count = sum(each.plan.cached for each in fit.tries), len(fit.tries)
    tried = text(
        "plans: {count}, {made} made and {cached} from the cache, in {seconds:.0f} s",
        count=count,
        made=count - cached,
        cached=cached,
        seconds=fit.seconds or 0,
    )
    answer = DOCUMENTS.say("answer", vars(fit))
    tail = [Line(text("tried"), tried), Line(text("answer"), answer, TOTAL)]
    if fit.flag is not None:
        tail.append(Line(text("use"), fit.flag, CODE))
    if fit.beyond is not None:
        why = modelled(fit.beyond.text, fit.beyond.modelled)
        tail.append(Line(text("fails at"), text("{value}: {why}", fit.beyond, why=why)))
        grown = [
            text(
                "{title} {growth} GiB to {beyond_bytes:gib4}",
                row,
                title=modelled(row.title, row.how == MODELLED),
                growth=format_signed_gib(row.difference_bytes),
            )
            for row in fit.beyond.owners[:_GROWN]
            if row.difference_bytes > 0
        ]
        if grown:
            tail.append(Line(text("grew most"), join("; ", grown)))
    holds = Column("Passes", lambda each: text("yes") if each.holds else text("no"))
    plans = _plans(vars(fit), [fit.knob], fit.tries, holds, width, look)
    return Document(
        kind="fit",
        title=plans.title,
        head=[Line(text("wanted"), join("; ", fit.wanted))],
        sections=[plans],
        tail=[*tail, *note_lines(fit.notes)],
        whole="fit.json",
        simulated=any(each.plan.simulated for each in fit.tries),
    )


def _rows(model: str, options: Iterable[str], rows: Iterable[PlanRow], width: int) -> Section:
    """Return the table of plans that nothing is wanted of."""
    tries = [Try("", row, misses(row, [])) for row in rows]
    status, figures = Column("Status", _status), {"model": model}
    return _plans(figures, options, tries, status, width, lambda each: PLAIN if each.holds else BAD)


def _status(each: Try | SoloPlan) -> str:
    return TITLES["statuses"][each.plan.status]


def _plans(
    figures: Figures,
    options: Iterable[str],
    tries: Sequence[Try],
    verdict: Column,
    width: int,
    look: Callable[[Try], str],
) -> Section:
    """Return the table of plans: their options, figures, and the verdict on each."""

    def of_option(name: str) -> Column:
        head = name
        if width < _PAGE:  # broken behind its dashes
            head = "\n".join(textwrap.wrap(name, _NARROW_COLUMN, break_long_words=False))
        return Column(head, lambda each: each.plan.values.get(name), right=True)

    def named(alike: Sequence[Try]) -> str:
        plan, count = alike[0].plan.title, len(alike) - 1
        return text("{plan} and {count} more", plan=plan, count=count) if count else plan

    lengths = [length for each in tries for length in each.plan.concurrency_at]
    length = text("{tokens:,} tokens", tokens=lengths[0]) if lengths else "max_model_len"
    paper = Paper(width >= _WIDE, any(each.plan.simulated for each in tries))
    planned = all(each.plan.until != READY for each in tries)
    return DOCUMENTS.draw(
        paper,
        "plans",
        tries,
        {**figures, "length": length, "planned": planned},
        [
            text("{plan}: {reason}", plan=named(alike), reason=_lacking(alike[0]))
            for alike in group_ranks(tries, _lacking)
            if alike[0].missing
        ],
        look,
        columns=[verdict],
        before=map(of_option, options),
        requests=lambda each: next(
            iter(each.plan.concurrency_at.values()), each.plan.max_concurrency
        ),
    )


def _lacking(each: Try) -> str:
    """Return what a plan lacks, in at most ``_REASON`` characters."""
    said = join("; ", [miss.text for miss in each.missing])
    return said if len(said) <= _REASON else one_line(said, _REASON)


def render_sweep_csv(sweep: Sweep) -> str:
    """Return one row per plan, in the order of the combinations."""
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow([*(knob.name for knob in sweep.knobs), *CSV_COLUMNS])
    for row in sweep.rows:
        cells = [row.values.get(knob.name) for knob in sweep.knobs]
        cells += [getattr(row, name) for name in CSV_COLUMNS]
        writer.writerow(
            [str(cell).lower() if isinstance(cell, bool) else csv_cell(cell) for cell in cells]
        )
    return written.getvalue()


def share_document(share: DeviceShare, width: int) -> Document:
    """Return a table of each alone, one of every way to share with its starts, and the flags."""
    holding = [way for way in share.ways if way.holds]
    found = text("found and started") if holding else text("none")
    answer = Line(text("answer"), found, GOOD if holding else BAD)
    tail = [answer]
    if share.why_none is not None:
        tail.append(Line(text("why"), share.why_none))
    for way in holding:
        tail.append(Line(text("use"), _title(way), TOTAL))
        tail += [Line("", f"{each.name}: {each.flags}", CODE) for each in way.flags]
    notes = [
        *(
            text("{name} wants: {wants}", each, wants=join("; ", each.wanted))
            for each in share.instances
            if each.wanted
        ),
        text("subtracted: by the engine's equation, with the device to itself"),
        text("in use: except the KV cache; at the peak with the largest batches served"),
        text("needs: KV cache for a request of max_model_len, and for what is wanted"),
        _MODELLED,
    ]
    sections = [
        DOCUMENTS.draw(
            Paper(width >= _WIDE, True),
            "alone",
            share.instances,
            notes=notes,
            look=lambda each: PLAIN if each.plan.ok else BAD,
            status=_status,
        )
    ]
    for way in share.ways:
        sections += _of_way(way)
    models = ", ".join(f"{each.name} {each.model}" for each in share.instances)
    return Document(
        kind="share",
        title=models,
        head=[
            Line(text("instances"), models, TOTAL),
            Line(text("command"), " ".join(share.command), CODE),
            Line(text("equation"), share.equation or "-"),
            Line(text("device"), text("{device_total_bytes:gib} GiB", share)),
            Line(text("beside"), text("{beside_bytes:gib} GiB", share)),
            Line(text("headroom"), text("{headroom_bytes:gib} GiB", share)),
        ],
        sections=sections,
        tail=[*tail, *note_lines(share.notes)],
        badge=answer,
        whole="share.json",
        simulated=True,
    )


def _title(way: SharingPlan) -> Text:
    names = None if way.order is None else ", ".join(way.order)
    return DOCUMENTS.say("way", {"names": names, way.name: True})


class _StartRow(NamedTuple):
    """An instance in a start."""

    start: InstanceStart
    result: Try


def _of_way(way: SharingPlan) -> list[Section]:
    """Return the table of the flags of a way to share, and that of its starts, if there are any."""
    sections = [DOCUMENTS.draw(Paper(), "way", way.flags, vars(way) | {"title": _title(way)})]
    if not way.starts:
        return sections
    rows = [_StartRow(start, result) for start in way.starts for result in start.results]
    notes = [
        text(
            "{order}: {value}: {reason}",
            result,
            order=", ".join(start.order),
            reason=_lacking(result),
        )
        for start, result in rows
        if result.missing
    ]
    started = DOCUMENTS.draw(
        Paper(),
        "starts",
        rows,
        {"passed": not notes},
        notes,
        lambda row: PLAIN if row.result.holds else BAD,
        order=lambda row: ", ".join(row.start.order),
        neighbours=lambda row: (
            text("were ready") if row.start.neighbours == READY else text("had served")
        ),
        status=lambda row: _status(row.result),
    )
    return [*sections, started]


def calibrated_document(found: Calibrated, width: int) -> Document:
    """Return the corrections with both of their sides, and the plans without and with them."""
    source, plans = found.source, [found.without, found.corrected]
    up = all(plan.ok for plan in plans)
    hardware = [source.name, source.model, engine_name(source)]
    hardware += [source.device or text("device not named"), source.rank]
    notes: list[str] = []
    for each in found.corrections:  # the constants that it changes, and why no more
        changed = [text("{key} {before:bytes} -> {after:bytes}", one) for one in each.constants]
        scales = each.scales_with is not None and text("per {scales_with}", each)
        if said := join("; ", [*changed, scales, each.reason]):
            notes.append(text("{owner}: {said}", owner=_owner(each), said=said))
    notes.append(
        text(
            "GiB; hardware and simulated are of the hardware run's own command; differences are "
            "hardware - simulated"
        )
    )
    if found.own is not None:
        plans.insert(0, found.own)
    change = text(
        "KV cache {kv} GiB, headroom {headroom} GiB",
        kv=format_signed_gib(found.kv_cache_change_bytes),
        headroom=format_signed_gib(found.headroom_change_bytes),
    )
    return Document(
        kind="calibrated",
        title=text("{model}, calibrated with hardware", found),
        head=[
            Line(text("model"), found.model, TOTAL),
            Line(text("command"), " ".join(found.command), CODE),
            Line(text("hardware"), join(", ", hardware)),
            Line(text("simulated"), found.stack or "-"),
        ],
        sections=[
            DOCUMENTS.draw(
                Paper(width >= _WIDE, True),
                "corrections",
                found.corrections,
                notes=notes,
                look=lambda each: PLAIN if each.applied_bytes else MUTED,
                owner=_owner,
                hardware=_hardware,
                corrected=lambda each: each.applied_bytes or None,
                figure=_figure,
            ),
            _rows(found.model, ["plan"], plans, width),
        ],
        tail=[
            Line(text("change"), change, TOTAL),
            *note_lines(found.notes),
            Line(text("profile"), found.profile),
        ],
        badge=Line(text("status"), text("ok") if up else text("failed"), GOOD if up else BAD),
        whole="calibrated.json",
        simulated=True,
    )


def _owner(each: ProfileCorrection) -> str:
    return titled(OWNERS[each.owner].title)


def _hardware(each: ProfileCorrection) -> str:
    figure = each.hardware
    if figure is None or not figure.half_unit_bytes:
        return GIB4(None if figure is None else figure.bytes)
    return f"{GIB4(figure.bytes)} ±{GIB4(figure.half_unit_bytes)}"


def _figure(each: ProfileCorrection) -> Text | None:
    figure = each.hardware
    if figure is None:
        return None
    return text("{source}; {known}", figure, known=TITLES["how"][figure.how])
