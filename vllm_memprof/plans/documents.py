"""The documents of a sweep and of a search: a row per plan, then what was found; a sweep as csv."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import partial

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
from vllm_memprof.plans.calibrated import Calibrated
from vllm_memprof.plans.calibrated_document import calibrated_document
from vllm_memprof.plans.curves import curves
from vllm_memprof.plans.rows import READY, Fit, Sweep, Try
from vllm_memprof.plans.share import DeviceShare
from vllm_memprof.plans.share_document import share_document
from vllm_memprof.plans.wants import misses
from vllm_memprof.record.spans import MODELLED
from vllm_memprof.tables import (
    COUNT,
    GIB,
    STATUS_WORDS,
    Column,
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
_GOALS = {"smallest": text("smallest"), "largest": text("largest")}

#: Columns of the csv behind one for each option that was varied, which bear the options' own
#: names. Bytes are integers, an empty cell is unknown. ``docs/concepts/plans.md`` explains each.
CSV_COLUMNS = (
    "status",
    "reason",
    "devices",
    "kv_cache_bytes",
    "tokens",
    "max_concurrency",
    "max_model_len",
    "fits_request_bytes",
    "fits_request_tokens",
    "fits_device_bytes",
    "fits_device_tokens",
    "headroom_bytes",
    "headroom_how",
    "device_total_bytes",
    "gpu_memory_utilization",
    "requested_bytes",
    "weights_bytes",
    "peak_activation_bytes",
    "non_torch_bytes",
    "equation",
    "balanced",
    "simulated",
    "seconds",
    "cached",
    "run",
    "run_id",
)


def answer_document(found: Fit | DeviceShare | Calibrated, width: int) -> Document:
    """Return the document of what a command that makes its plans one after the other found."""
    if isinstance(found, DeviceShare):
        return share_document(found, width)
    if isinstance(found, Calibrated):
        return calibrated_document(found, width)
    return fit_document(found, width)


def sweep_document(sweep: Sweep, width: int) -> Document:
    """Return a row per plan; the reasons of those that failed below it."""
    rows = sweep.rows
    plans = _plans(
        text("Plans of {model}", model=sweep.model),
        [knob.name for knob in sweep.knobs],
        [Try("", row, misses(row, [])) for row in rows],
        Column("Status", lambda each: STATUS_WORDS[each.plan.status]),
        sweep.notes,
        width,
        lambda each: PLAIN if each.holds else BAD,
    )
    total = next((row.device_total_bytes for row in rows if row.device_total_bytes), None)
    count = sum(row.ok for row in rows)
    came_up = Line(
        text("status"),
        text("{count} of {all_of} came up", count=count, all_of=len(rows)),
        GOOD if count == len(rows) else BAD,
    )
    head = [
        Line(text("model"), sweep.model, TOTAL),
        Line(text("command"), " ".join(sweep.command), CODE),
        *(Line(knob.name, ", ".join(knob.values)) for knob in sweep.knobs),
        *([Line(text("device"), text("{total:gib} GiB", total=total))] if total else []),
        came_up,
    ]
    verdict = ""
    if known := [row for row in rows if row.ok and row.tokens is not None]:
        best = max(known, key=lambda row: row.tokens or 0)
        verdict = text(
            "most KV tokens: {tokens:,} ({size:gib} GiB) with {values}",
            tokens=best.tokens,
            size=best.kv_cache_bytes,
            values=best.title,
        )
    return Document(
        kind="sweep",
        title=sweep.model,
        head=head,
        sections=[plans],
        verdict=verdict,
        badge=came_up,
        whole="sweep.json",
        simulated=any(row.simulated for row in rows),
        curves=curves(sweep),
    )


def fit_document(fit: Fit, width: int) -> Document:
    """Return a row per plan, in the order in which they were tried; the answer below them."""
    title = text(
        "{goal} {knob} of {model}, tried from {low} to {high}",
        goal=_GOALS[fit.goal],
        knob=fit.knob,
        model=fit.model,
        low=fit.low,
        high=fit.high,
    )

    def look(each: Try) -> str:
        if each.value == fit.answer:
            return GOOD
        return PLAIN if each.holds else MUTED

    plans = _plans(
        title,
        [fit.knob],
        fit.tries,
        Column("Passes", lambda each: text("yes") if each.holds else text("no")),
        [text("wanted: {wanted}", wanted=join("; ", fit.wanted))],
        width,
        look,
    )
    cached = sum(each.plan.cached for each in fit.tries)
    tried = text(
        "plans: {count}, {made} made and {cached} from the cache, in {seconds:.0f} s",
        count=len(fit.tries),
        made=len(fit.tries) - cached,
        cached=cached,
        seconds=fit.seconds or 0,
    )
    answer = text("none")
    if fit.answer is not None:
        answer = text(
            "{goal} {knob} {value} ({step})",
            goal=_GOALS[fit.goal],
            knob=fit.knob,
            value=fit.answer,
            step=fit.step,
        )
    tail = [Line(text("tried"), tried), Line(text("answer"), answer, TOTAL)]
    if fit.flag is not None:
        tail.append(Line(text("use"), fit.flag, CODE))
    if fit.beyond is not None:
        why = modelled(fit.beyond.text, fit.beyond.modelled)
        failing = text("{value}: {why}", value=fit.beyond.value, why=why)
        tail.append(Line(text("fails at"), failing))
        grown = [
            text(
                "{title} {growth} GiB to {size:gib4}",
                title=modelled(row.title, row.how == MODELLED),
                growth=f"{row.difference_bytes / GIB_BYTES:+,.4f}",
                size=row.beyond_bytes,
            )
            for row in fit.beyond.owners[:_GROWN]
            if row.difference_bytes > 0
        ]
        if grown:
            tail.append(Line(text("grew most"), join("; ", grown)))
    tail += [Line(text("note"), note) for note in fit.notes]
    return Document(
        kind="fit",
        title=title,
        head=[],
        sections=[plans],
        verdict="",
        tail=tail,
        whole="fit.json",
        simulated=any(each.plan.simulated for each in fit.tries),
    )


def _plans(
    title: str,
    options: Iterable[str],
    tries: Sequence[Try],
    verdict: Column,
    said: Iterable[str],
    width: int,
    look: Callable[[Try], str],
) -> Section:
    """Return the table of plans: their options, figures, and the verdict on each."""

    def of_option(name: str) -> Column:
        head = name
        if width < _PAGE:  # broken behind its dashes
            head = "\n".join(textwrap.wrap(name, _NARROW_COLUMN, break_long_words=False))
        return Column(head, lambda each: each.plan.values.get(name), right=True)

    rows = [each.plan for each in tries]
    lengths = [length for row in rows for length in row.concurrency_at]
    length = text("{tokens:,} tokens", tokens=lengths[0]) if lengths else "max_model_len"
    notes: list[str] = [
        text(
            "requests: number of requests of {length} that the KV cache holds at once",
            length=length,
        ),
        text(
            "headroom: device total less all that is held at the serving peak, with the granted KV "
            "cache in use"
        ),
    ]
    if all(row.until != READY for row in rows):
        notes.append(text("captured graphs and all else after the KV plan is not in the headroom"))
    if any(row.simulated for row in rows):
        notes.append(text("(m): with non-torch memory set by the profile of a simulated device"))
    alike: dict[str, list[Try]] = {}  # what is missing -> the plans that lack it
    for each in tries:
        alike.setdefault(join("; ", [miss.text for miss in each.missing]), []).append(each)
    for reason, plans in alike.items():
        named: str = plans[0].plan.title
        if len(plans) > 1:
            named = text("{plan} and {count} more", plan=named, count=len(plans) - 1)
        if reason:
            reason = one_line(reason, _REASON) if len(reason) > _REASON else reason
            notes.append(text("{plan}: {reason}", plan=named, reason=reason))
    columns = [*map(of_option, options), *_FIGURES, verdict]
    return table(title, columns, tries, [*notes, *said], width >= _WIDE, look=look)


def _marked(name: str) -> Callable[[Try], str]:
    """Return what shows a size, marked where the profile of a simulated device has a part in it."""
    return lambda each: modelled(GIB(getattr(each.plan, name)), each.plan.headroom_how == MODELLED)


_FIGURES = (
    Column("KV, GiB", "plan.kv_cache_bytes", GIB),
    Column("Tokens", "plan.tokens", COUNT),
    Column(
        "Requests",
        lambda each: next(iter(each.plan.concurrency_at.values()), each.plan.max_concurrency),
        partial(number, spec=",.2f"),
    ),
    Column("Fits request,\nGiB", "plan.fits_request_bytes", GIB, wide_only),
    Column("Fits device,\nGiB", _marked("fits_device_bytes"), when=wide_only, right=True),
    Column("Headroom,\nGiB", _marked("headroom_bytes"), right=True),
)


def render_sweep_csv(sweep: Sweep) -> str:
    """Return one row per plan, in the order of the combinations."""
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow([*(knob.name for knob in sweep.knobs), *CSV_COLUMNS])
    for row in sweep.rows:
        figures = vars(row) | {f"{name}_bytes": size for name, size in row.terms.items()}
        cells = [row.values.get(knob.name) for knob in sweep.knobs]
        cells += [figures.get(name) for name in CSV_COLUMNS]
        writer.writerow([str(cell).lower() if isinstance(cell, bool) else cell for cell in cells])
    return written.getvalue()
