"""The documents of a sweep and of a search: a row per plan, then what was found; a sweep as csv."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from functools import partial

from vllm_memprof.document import BAD, CODE, GOOD, MUTED, PLAIN, TOTAL, Document, Line, Section
from vllm_memprof.plans.curves import curves
from vllm_memprof.plans.rows import READY, Fit, PlanRow, Sweep, Try
from vllm_memprof.plans.wants import misses
from vllm_memprof.tables import (
    COUNT,
    GIB,
    STATUS_WORDS,
    Column,
    group_ranks,
    modelled,
    number,
    table,
    wide_only,
)
from vllm_memprof.text import join, text
from vllm_memprof.units import GIB as GIB_BYTES
from vllm_memprof.units import one_line

#: From these widths on the tables have all their columns, and all names in one line.
_WIDE, _PAGE = 100, 200
#: Characters of an option's name in a narrower table, and of a reason below any table.
_NARROW_COLUMN, _REASON = 11, 200
#: Owners that grew which are shown below a search.
_GROWN = 3

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
        sections=[
            _plans(
                text("Plans of {model}", sweep),
                [knob.name for knob in sweep.knobs],
                [Try("", row, misses(row, [])) for row in rows],
                Column("Status", lambda each: STATUS_WORDS[each.plan.status]),
                width,
                lambda each: PLAIN if each.holds else BAD,
            )
        ],
        verdict=text(
            "most KV tokens: {tokens:,} ({kv_cache_bytes:gib} GiB) with {title}",
            max(known, key=lambda row: row.tokens or 0),
        )
        if known
        else "",
        tail=[Line(text("note"), note) for note in sweep.notes],
        badge=came_up,
        whole="sweep.json",
        simulated=any(row.simulated for row in rows),
        curves=curves(sweep),
    )


def fit_document(fit: Fit, width: int) -> Document:
    """Return a row per plan, in the order in which they were tried; the answer below them."""
    title = text("{goal} {knob} of {model}, tried from {low} to {high}", fit)

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
    answer = text("none")
    if fit.answer is not None:
        answer = text("{goal} {knob} {answer} ({step})", fit)
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
                growth=f"{row.difference_bytes / GIB_BYTES:+,.4f}",
            )
            for row in fit.beyond.owners[:_GROWN]
            if row.difference_bytes > 0
        ]
        if grown:
            tail.append(Line(text("grew most"), join("; ", grown)))
    return Document(
        kind="fit",
        title=title,
        head=[Line(text("wanted"), join("; ", fit.wanted))],
        sections=[
            _plans(
                title,
                [fit.knob],
                fit.tries,
                Column("Passes", lambda each: text("yes") if each.holds else text("no")),
                width,
                look,
            )
        ],
        verdict="",
        tail=[*tail, *(Line(text("note"), note) for note in fit.notes)],
        whole="fit.json",
        simulated=any(each.plan.simulated for each in fit.tries),
    )


def _plans(
    title: str,
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

    def missing(each: Try) -> str:
        said = join("; ", [miss.text for miss in each.missing])
        return said if len(said) <= _REASON else one_line(said, _REASON)

    def named(alike: Sequence[Try]) -> str:
        plan, count = alike[0].plan.title, len(alike) - 1
        return text("{plan} and {count} more", plan=plan, count=count) if count else plan

    lengths = [length for each in tries for length in each.plan.concurrency_at]
    length = text("{tokens:,} tokens", tokens=lengths[0]) if lengths else "max_model_len"
    simulated = any(each.plan.simulated for each in tries)
    notes = [
        text(
            "requests: number of requests of {length} that the KV cache holds at once",
            length=length,
        ),
        text(
            "headroom: device total less all that is held at the serving peak, with the granted KV "
            "cache in use"
        ),
        all(each.plan.until != READY for each in tries)
        and text("captured graphs and all else after the KV plan is not in the headroom"),
        simulated and text("(m): with non-torch memory set by the profile of a simulated device"),
        *(
            text("{plan}: {reason}", plan=named(alike), reason=missing(alike[0]))
            for alike in group_ranks(tries, missing)
            if alike[0].missing
        ),
    ]
    columns = [*map(of_option, options), *_FIGURES, verdict]
    return table(title, columns, tries, notes, width >= _WIDE, simulated, look)


_FIGURES = (
    Column("KV, GiB", "plan.kv_cache_bytes", GIB),
    Column("Tokens", "plan.tokens", COUNT),
    Column(
        "Requests",
        lambda each: next(iter(each.plan.concurrency_at.values()), each.plan.max_concurrency),
        partial(number, spec=",.2f"),
    ),
    Column("Fits request,\nGiB", "plan.fits_request_bytes", GIB, wide_only),
    Column("Fits device,\nGiB", "plan.fits_device_bytes", GIB, wide_only, marked=True),
    Column("Headroom,\nGiB", "plan.headroom_bytes", GIB, marked=True),
)


def render_sweep_csv(sweep: Sweep) -> str:
    """Return one row per plan, in the order of the combinations."""
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow([*(knob.name for knob in sweep.knobs), *CSV_COLUMNS])
    for row in sweep.rows:
        cells = [row.values.get(knob.name) for knob in sweep.knobs]
        cells += [getattr(row, name) for name in CSV_COLUMNS]
        writer.writerow([str(cell).lower() if isinstance(cell, bool) else cell for cell in cells])
    return written.getvalue()
