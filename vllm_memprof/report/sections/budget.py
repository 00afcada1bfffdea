"""The budget equation with every term, and the KV caches that fit the request and the device."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_memprof.accounting.budget.equations import (
    STARTUP_PLAN,
    divisor_of,
    form_of,
    ignoring_fixed_size,
)
from vllm_memprof.accounting.findings.advice import device_total
from vllm_memprof.accounting.model import Budget, ItemPart, RankReport, Reading, Report
from vllm_memprof.accounting.readings.quantities import is_device_wide, title_of
from vllm_memprof.accounting.summary import engine_name
from vllm_memprof.accounting.titles import TITLES
from vllm_memprof.document import BAD, GOOD, MUTED, PLAIN, TOTAL, Row, Section
from vllm_memprof.record.spans import DERIVED, MODELLED
from vllm_memprof.report.sections.audit import recomputed_from
from vllm_memprof.report.sections.base import Sheet, draw, failed
from vllm_memprof.tables import (
    COUNT,
    GIB,
    GIB4,
    UNKNOWN,
    Size,
    modelled,
    number,
    signed,
)
from vllm_memprof.text import join, text, titled
from vllm_memprof.units import minus

#: Figures of a budget -> their titles.
BUDGET_TITLES = TITLES["budget"]
#: Whether the equation gives what was granted -> how the row says so.
_RECOMPUTED = {
    None: (text("engine - recomputed"), MUTED, ""),
    True: (text("engine - recomputed: equal"), GOOD, "✓"),
    False: (text("engine - recomputed: differs"), BAD, "✗"),
}


def term_title(report: Report, name: str) -> str:
    """Return a term's title, marked where a simulated device's profile has a part in it."""
    return modelled(title_of(name), report.run.simulated and is_device_wide(name))


def budget_tokens(rank: RankReport) -> dict[str, int | None]:
    """Return the tokens that the KV caches of a rank's budget hold, by their figures."""
    return {
        "kv_cache_bytes": rank.budget.kv_tokens,
        "engine_kv_cache_bytes": rank.kv.tokens,
        "fits_request_bytes": rank.budget.fits_request_tokens,
        "fits_device_bytes": rank.budget.fits_device_tokens,
    }


def _figure(rank: RankReport, name: str, style: str = PLAIN, mark: str = "") -> Size:
    """Return a figure of the budget, marked where it depends on a modelled one."""
    title = modelled(BUDGET_TITLES[name], rank.budget.how.get(name) == MODELLED)
    size: int | None = getattr(rank.budget, name)
    return Size(title, size, style, mark, budget_tokens(rank).get(name))


def _items(items: list[Reading]) -> Iterator[Size]:
    """Return what is subtracted, each with its parts."""
    for item in items:
        title = modelled(item.title, item.how == MODELLED)
        yield Size(title, item.bytes, mark="-", tokens=item.kv_tokens)
        yield from _parts(item.parts)


def _parts(parts: tuple[ItemPart, ...]) -> Iterator[Size]:
    for part in parts:
        title = modelled(text("of which {name}", name=part.title), part.how == MODELLED)
        yield Size(title, part.bytes, MUTED, indent=1)


def _device_total(rank: RankReport) -> Row | Size:
    if rank.device_total_bytes is None and (derived := device_total(rank)) is not None:
        return Row([text("device total, derived"), GIB(derived), "-"])
    return Size(text("device total"), rank.device_total_bytes)


def _not_measured(items: list[Reading]) -> Iterator[str]:
    """Yield the items that are not known, each reason once."""
    missing = [item for item in items if item.bytes is None]
    for reason in dict.fromkeys(item.reason for item in missing):
        titles = join("; ", [item.title for item in missing if item.reason == reason])
        yield text("NOT MEASURED: {what} ({reason})", what=titles, reason=reason)


def equation(sheet: Sheet, rank: RankReport) -> Iterator[Section]:
    """Return what was requested, every term, and what the engine granted."""
    budget = rank.budget
    known = [budget.engine_kv_cache_bytes, *(term.bytes for term in budget.terms)]
    if sheet.evidence.partial:  # it may end with what was asked for
        known.append(budget.requested_bytes)
    if known.count(None) == len(known):
        return
    rows: list[Row | Size] = [_device_total(rank)]
    form = form_of(budget.equation)
    if form is None or form.base == "device_total_bytes":
        utilization = number(budget.gpu_memory_utilization)
        rows.append(Row(["gpu_memory_utilization", utilization, ""], mark="×"))
    else:
        base = rank.figures.get(form.base)
        share = number(rank.figures.get(form.share))
        rows = [
            Size(titled(form.base_title) or form.base, None if base is None else int(base)),
            Row([form.share, share, ""], mark="×"),
        ]
    as_read = form or budget.requested == rank.figures.get("requested_bytes")
    title = text("requested") if as_read else text("requested, derived")
    rows.append(Size(title, budget.requested_bytes, TOTAL, "="))
    for term in [] if budget.override else budget.terms:
        if term.subtracted:
            rows.append(Size(term_title(sheet.report, term.name), term.bytes, mark="-"))
            rows += _parts(term.parts)
    title, style, mark = _RECOMPUTED[budget.balanced]
    size = signed(budget.residual_bytes)
    if budget.tolerance_bytes and budget.balanced is not None:
        size += f" ±{budget.tolerance_bytes:,}"
    rows += [
        _figure(rank, "kv_cache_bytes", TOTAL, "="),
        _figure(rank, "engine_kv_cache_bytes"),
        Row([title, "", size], style=style, mark=mark),
    ]
    for term in budget.terms:
        if not term.subtracted and term.bytes is not None:
            name = term_title(sheet.report, term.name)
            rows.append(Size(text("{term}, not subtracted", term=name), term.bytes, MUTED))
    figures = _equation_figures(sheet, rank)
    notes = [*failed(budget.checks), *recomputed_from(sheet, rank)]
    yield draw(sheet, "equation", rows, figures, notes)


def _equation_figures(sheet: Sheet, rank: RankReport) -> dict[str, object]:
    """Return what the notes below an equation name."""
    budget, evidence, run = rank.budget, sheet.evidence, sheet.report.run
    if budget.equation is None:
        unnamed = evidence.no_equation if run.engine_version is None else None
        release = engine_name(run) or text("this engine")
        return {"equation": UNKNOWN, "no_equation": unnamed, "release": release}
    form = form_of(budget.equation)
    missing = [name for name, size in budget.subtracted.items() if size is None]
    unknown = (["requested"] if budget.requested is None else []) + missing
    option = None if budget.override is None else f"--{budget.override.replace('_', '-')}"
    skipped = join(", ", map(title_of, missing)) if budget.override == STARTUP_PLAN else None
    computed = budget.kv_cache_bytes is not None
    unsized = not computed and option is None
    implied = budget.implied_term(divisor_of(budget.equation)) if unsized else None
    beside = join("; ", [item.title for item in budget.not_subtracted])
    return {
        **vars(budget),
        "implied_requested_bytes": budget.implied_requested_bytes if unsized else None,
        "chosen": run.engine_version is None or evidence.partial,
        "shared": form is not None and form.base != "device_total_bytes" and evidence.partial,
        "free_ready_bytes": rank.figures.get("free_ready_bytes"),
        "ignoring": run.engine_version is None
        and budget.takes_fixed_size
        and ignoring_fixed_size(budget.equation),
        "skipped": skipped,
        "option": option,
        "unknown": unsized and ", ".join(unknown),
        "missing": implied and implied[0],
        "left": implied and implied[1],
        "beside": computed and not _fits_request_is_known(sheet, budget) and beside,
    }


def _fits_request_is_known(sheet: Sheet, budget: Budget) -> bool:
    """Return False for a log that prints none of the items."""
    printed = any(item.bytes is not None for item in budget.not_subtracted)
    return bool(budget.not_subtracted) and (printed or not sheet.evidence.partial)


def fits_request(sheet: Sheet, rank: RankReport) -> Iterator[Section]:
    """Return the table from the KV cache of the equation to the one that fits the request."""
    budget = rank.budget
    computed, fits = budget.kv_cache_bytes, budget.fits_request_bytes
    if computed is None or not _fits_request_is_known(sheet, budget):
        return
    known = [item for item in budget.not_subtracted if item.bytes is not None]
    rows = [_figure(rank, "kv_cache_bytes"), *_items(known)]
    left_out = sum(item.bytes or 0 for item in known)
    if half := left_out - left_out // divisor_of(budget.equation):
        rows.append(Size(title_of("halved"), half, mark="+"))  # of what it would subtract, too
    rows.append(_figure(rank, "fits_request_bytes", TOTAL, "="))
    if fits is not None:
        fewer = minus(budget.fits_request_tokens, budget.kv_tokens)
        rows.append(Size(text("difference"), fits - computed, tokens=fewer))
    rows += [
        Size(each.title, each.bytes, MUTED, tokens=each.kv_tokens) for each in budget.corrections
    ]

    def explained() -> Iterator[str]:
        """Yield what each correction is, and the items that make its difference."""
        for other in budget.corrections:
            yield text("{title}: {formula}", other)
            less, total = computed - (other.bytes or 0), sum(part.bytes for part in other.parts)
            if other.parts and abs(less - total) <= budget.tolerance_bytes:
                parts = join(" + ", [text("{bytes:gib} {title}", part) for part in other.parts])
                yield text(
                    "{size:gib} GiB less = {parts}, each to its printed digits",
                    size=less,
                    parts=parts,
                )

    others = [other.budget.fits_request_bytes for other in sheet.report.ranks]
    exact = (
        fits is not None
        and budget.takes_fixed_size
        and 0 < fits < computed
        and all(other is not None and other >= fits for other in others)
    )
    derived = join("; ", [item.title for item in known if item.how == DERIVED])
    figures = {"derived": derived, "granting": fits if exact else None}
    notes = [*_not_measured(budget.not_subtracted), *explained()]
    yield draw(sheet, "fits_request", rows, figures, notes)


def fits_device(sheet: Sheet, rank: RankReport) -> Iterator[Section]:
    """Return the table from the device to the KV cache that fits it."""
    held = rank.budget.held_at_peak
    if not held:
        return
    notes = list(_not_measured(held))
    rows = [
        _device_total(rank),
        *_items([item for item in held if item.bytes is not None]),
        _figure(rank, "fits_device_bytes", TOTAL, "="),
    ]
    yield draw(sheet, "fits_device", rows, {"estimated": notes}, notes)


def budgets(sheet: Sheet, rank: RankReport) -> Iterator[Section]:
    """Return the KV caches beside each other: granted, fitting, suggested; and the headroom."""
    budget = rank.budget
    fits, headroom = budget.fits_device_bytes, _figure(rank, "headroom_bytes")
    others = (budget.fits_request_bytes, fits, *budget.suggested_bytes)
    if budget.engine_kv_cache_bytes is None or not any(size is not None for size in others):
        return

    def leaves(row: Size) -> str:
        left = minus(fits, row.bytes)
        return GIB4(left) if left else ""

    marked = budget.how.get("suggested_bytes") == MODELLED
    suggested = TITLES["suggested"]
    rows = [
        *(_figure(rank, name) for name in list(BUDGET_TITLES)[1:4]),
        *(
            Size(modelled(suggested[each.limit], marked), each.bytes, tokens=each.kv_tokens)
            for each in budget.suggestions
        ),
        Row(
            [headroom.title, GIB4(headroom.bytes), COUNT(headroom.bytes), "", ""],
            style={"fits": GOOD, "exceeds": BAD}.get(budget.device_verdict or "", PLAIN),
        ),
    ]
    over = minus(0, budget.released_headroom_bytes) if budget.device_verdict == "exceeds" else None
    yield draw(sheet, "budgets", rows, {"fits": fits, "over": over}, leaves=leaves)
