"""The budget equation with every term, and the KV cache that fits the request beside it."""

from __future__ import annotations

from packaging.version import Version

from vllm_memprof.accounting.budget.equations import (
    EQUATIONS,
    STARTUP_PLAN,
    divisor_of,
    form_of,
    ignoring_fixed_size,
)
from vllm_memprof.accounting.evidence import EVIDENCE
from vllm_memprof.accounting.findings.advice import device_total
from vllm_memprof.accounting.model import (
    DERIVED,
    MODELLED,
    Budget,
    MemoryItem,
    RankReport,
    Report,
    TermRow,
)
from vllm_memprof.accounting.readings.quantities import is_device_wide, title_of
from vllm_memprof.accounting.summary import engine_name
from vllm_memprof.document import BAD, GOOD, MUTED, NOT_MEASURED, PLAIN, TOTAL, Row, Section
from vllm_memprof.report.sections.audit import recomputed_from
from vllm_memprof.tables import (
    COUNT,
    GIB,
    GIB4,
    SIZES,
    UNKNOWN,
    Column,
    Size,
    alike,
    failed,
    modelled,
    number,
    signed,
    table,
)
from vllm_memprof.text import Text, join, text, titled
from vllm_memprof.units import minus


def budget_sections(report: Report) -> list[Section]:
    """Return the tables of each group of ranks that agree to the byte."""
    known = [
        rank
        for rank in report.ranks
        if rank.budget.engine_kv_cache_bytes is not None
        or any(term.bytes is not None for term in rank.budget.terms)
        # it may end with what was asked for
        or (EVIDENCE[report.run.source].partial and rank.budget.requested is not None)
    ]
    known.sort(
        key=lambda rank: (
            rank.budget.engine_kv_cache_bytes is None,
            rank.budget.engine_kv_cache_bytes,
        )
    )

    def draw(rank: RankReport, labels: str) -> list[Section]:
        budget = rank.budget
        found = [_equation_section(report, rank, labels)]
        if budget.kv_cache_bytes is not None and _anything_not_subtracted(report, budget):
            found.append(_fits_request_section(report, budget, labels))
        if budget.held_at_peak:
            found.append(_fits_device_section(rank, labels))
        others = (budget.fits_request_bytes, budget.fits_device_bytes, *budget.suggested_bytes)
        if budget.engine_kv_cache_bytes is not None and any(size is not None for size in others):
            found.append(_budgets_section(rank, labels))
        return found

    return alike(known, draw, lambda rank: repr((rank.budget, rank.kv.bytes_per_block)))


def term_title(report: Report, term: TermRow) -> str:
    """Return a term's title, marked where a simulated device's profile has a part in it."""
    return modelled(title_of(term.name), report.run.simulated and is_device_wide(term.name))


def _marked(title: str, budget: Budget, name: str) -> str:
    """Return the title of a figure of the budget, marked where it depends on a modelled one."""
    return modelled(title, budget.how.get(name) == MODELLED)


def _anything_not_subtracted(report: Report, budget: Budget) -> bool:
    """Return False for a log that prints none of the items: a note of the equation says so."""
    return any(
        item.bytes is not None or not EVIDENCE[report.run.source].partial
        for item in budget.not_subtracted
    )


def _device_total(rank: RankReport) -> Row | Size:
    if rank.device_total_bytes is None and (derived := device_total(rank)) is not None:
        return Row([text("device total, derived"), GIB(derived), "-"])
    return Size(text("device total"), rank.device_total_bytes)


def _requested(rank: RankReport) -> list[Row | Size]:
    """Return what the request is a share of, and the share."""
    form = form_of(rank.budget.equation)
    if form is None or form.base == "device_total_bytes":
        utilization = number(rank.budget.gpu_memory_utilization)
        return [_device_total(rank), Row(["gpu_memory_utilization", utilization, ""], mark="×")]
    base = rank.figures.get(form.base)
    return [
        Size(titled(form.base_title) or form.base, None if base is None else int(base)),
        Row([form.share, number(rank.figures.get(form.share)), ""], mark="×"),
    ]


def _equation_section(report: Report, rank: RankReport, labels: str) -> Section:
    budget = rank.budget
    rows = [*_requested(rank), Size(text("requested"), budget.requested_bytes, TOTAL, "=")]
    for term in [] if budget.override else budget.terms:
        if term.subtracted:
            rows.append(Size(term_title(report, term), term.bytes, mark="-"))
            rows += [
                Size(text("of which {name}", name=part.title), part.bytes, MUTED, indent=1)
                for part in term.parts
            ]
    recomputed = _marked(text("KV cache, recomputed"), budget, "kv_cache_bytes")
    granted = _marked(text("KV cache granted by the engine"), budget, "engine_kv_cache_bytes")
    rows += [
        Size(recomputed, budget.kv_cache_bytes, TOTAL, "="),
        Size(granted, budget.engine_kv_cache_bytes),
    ]
    size = signed(budget.residual_bytes)
    size += f" ±{budget.tolerance_bytes:,}" if budget.tolerance_bytes else ""
    if budget.residual_bytes is None:
        rows.append(Row([text("granted - recomputed"), "-", "-"], style=MUTED))
    elif budget.balanced:
        rows.append(Row([text("granted - recomputed: equal"), "", size], style=GOOD, mark="✓"))
    else:
        rows.append(Row([text("granted - recomputed: differs"), "", size], style=BAD, mark="✗"))
    estimated = any(term.name == "graph_estimate" and term.subtracted for term in budget.terms)
    for term in budget.terms:
        if not term.subtracted and term.bytes is not None:
            title = (
                text("{term}, estimated above", term=term_title(report, term))
                if term.name == "graph" and estimated
                else text("{term}, not subtracted", term=term_title(report, term))
            )
            rows.append(Size(title, term.bytes, MUTED))
    heading = text(
        "KV cache budget, equation {equation}, {labels}",
        equation=budget.equation or UNKNOWN,
        labels=labels,
    )
    notes = _equation_notes(report, rank) + recomputed_from(report, rank)
    return table(heading, SIZES, rows, notes)


def _releases(equation_id: str) -> dict[str, str]:
    """Return the first release that has an equation, and the one that ends its rows."""
    limits = [one for row in EQUATIONS if row.id == equation_id for one in row.versions.split(",")]
    low = min((Version(one[2:]) for one in limits if one.startswith(">=")), default=None)
    high = max((Version(one[1:]) for one in limits if one.startswith("<")), default=None)
    return {"low": str(low), "high": str(high)}


def _not_known_of_the_device(rank: RankReport) -> Text:
    """Return why nothing is said of the device, where an engine asks for a share of what is free.

    What it then held is not in the log: neither the device total, nor a step of full size.
    """
    free = rank.figures.get("free_ready_bytes")
    if free is None:
        return text(
            "KV cache that fits the device: NOT MEASURED (the log has neither the device total nor "
            "what a step takes)"
        )
    return text(
        "KV cache that fits the device: NOT MEASURED (the log has neither the device total nor "
        "what a step takes); {size:gib} GiB were free at the end of the start-up, for steps, "
        "communicators and workspace",
        size=int(free),
    )


def _equation_notes(report: Report, rank: RankReport) -> list[str]:
    budget, evidence = rank.budget, EVIDENCE[report.run.source]
    if budget.equation is None:
        if evidence.no_equation is not None and report.run.engine_version is None:
            return [evidence.no_equation]
        return [
            text(
                "no equation is known for {release}: its figures are shown as they are",
                release=engine_name(report.run) or text("this engine"),
            )
        ]
    notes: list[str] = [
        f"{budget.equation}: {budget.formula}",
        text("source: {cite}", cite=budget.cite),
    ]
    if report.run.engine_version is None or evidence.partial:
        notes.append(text("chosen by {reason}", reason=budget.chosen_by))
    row = form_of(budget.equation)
    if row is not None and row.base != "device_total_bytes":
        if report.run.engine_version is None:
            notes.append(
                text(
                    "the release is not known: the arithmetic is that of every release from {low} "
                    "to before {high}",
                    **_releases(row.id),
                )
            )
        if evidence.partial:
            notes.append(_not_known_of_the_device(rank))
    if report.run.engine_version is None and budget.takes_fixed_size:
        releases = ignoring_fixed_size(budget.equation)
        if releases:
            notes.append(
                text(
                    "the release is not known: {releases} ignores --kv-cache-memory-bytes",
                    releases=releases,
                )
            )
    if budget.override == STARTUP_PLAN:
        absent = [
            title_of(term.name) for term in budget.terms if term.subtracted and term.bytes is None
        ]
        notes.append(
            text(
                "the size is that of a start-up plan, kept by the engine from an earlier start: "
                "profiling was skipped; NOT MEASURED: {titles}",
                titles=join(", ", absent),
            )
        )
    elif budget.override:
        option = f"--{budget.override.replace('_', '-')}"
        notes.append(text("a fixed size replaced the equation: {option}", option=option))
    elif budget.kv_cache_bytes is None:
        missing = [term.name for term in budget.terms if term.subtracted and term.bytes is None]
        missing = (["requested"] if budget.requested is None else []) + missing
        notes.append(text("not recomputed, unknown: {names}", names=", ".join(missing)))
        implied_term = budget.implied_term(divisor_of(budget.equation))
        if implied_term is not None:
            name, size = implied_term
            notes.append(
                text("the granted KV cache leaves {size:gib} GiB for {name}", size=size, name=name)
            )
        if budget.implied_requested_bytes is not None:
            notes.append(
                text(
                    "the terms and the granted KV cache add up to a request of {size:gib} "
                    "+-{slack:gib} GiB",
                    size=budget.implied_requested_bytes,
                    slack=budget.tolerance_bytes,
                )
            )
    if (
        budget.kv_cache_bytes is not None
        and budget.not_subtracted
        and not _anything_not_subtracted(report, budget)
    ):
        items = join("; ", [item.title for item in budget.not_subtracted])
        notes.append(
            text("not subtracted by the equation, and not in the log: {items}", items=items)
        )
    return notes + [
        failed(check.name, check.expected, check.found)
        for check in budget.checks
        if check.ok is False
    ]


def _not_measured(item: MemoryItem) -> Text:
    """Return the note of an item that is not known."""
    return text(
        "{title}: {not_measured} ({reason})",
        title=item.title,
        not_measured=NOT_MEASURED,
        reason=item.reason,
    )


def _fits_device_section(rank: RankReport, labels: str) -> Section:
    """Return the table from the device to the KV cache that fits it."""
    budget = rank.budget
    notes: list[str] = [_not_measured(each) for each in budget.held_at_peak if each.bytes is None]
    if notes:
        notes.append(text("estimated: what was not measured is not subtracted"))
    rows = [
        _device_total(rank),
        *(
            Size(modelled(each.title, each.how == MODELLED), each.bytes, mark="-")
            for each in budget.held_at_peak
            if each.bytes is not None
        ),
        Size(
            _marked(text("KV cache that fits the device"), budget, "fits_device_bytes"),
            budget.fits_device_bytes,
            TOTAL,
            "=",
        ),
    ]
    title = text(
        "KV cache that fits the device: held memory at the serving peak, {labels}", labels=labels
    )
    return table(title, SIZES, rows, notes)


_SUGGESTED = {
    "request": text("the engine's suggestion for the request"),
    "device": text("the engine's suggestion for the device"),
}
_TOKENS = Column("KV tokens", "tokens", COUNT)


def _budgets_section(rank: RankReport, labels: str) -> Section:
    """Return the KV caches beside each other: granted, fitting, suggested; and the headroom."""
    budget = rank.budget
    fits = budget.fits_device_bytes

    def sized(title: str, name: str, tokens: int | None) -> Size:
        return Size(_marked(title, budget, name), getattr(budget, name), tokens=tokens)

    def leaves(row: Size) -> str:
        return (
            "" if None in (fits, row.bytes) or row.bytes == fits else GIB4(minus(fits, row.bytes))
        )

    headroom = budget.headroom_bytes
    title = _marked(text("headroom at the serving peak"), budget, "headroom_bytes")
    style = {"fits": GOOD, "exceeds": BAD}.get(budget.device_verdict or "", PLAIN)
    rows = [
        sized(text("KV cache granted by the engine"), "engine_kv_cache_bytes", rank.kv.tokens),
        sized(
            text("KV cache that fits the request"), "fits_request_bytes", budget.fits_request_tokens
        ),
        sized(
            text("KV cache that fits the device"), "fits_device_bytes", budget.fits_device_tokens
        ),
        *(
            Size(
                _marked(_SUGGESTED[each.limit], budget, "suggested_bytes"),
                each.bytes,
                tokens=each.kv_tokens,
            )
            for each in budget.suggestions
        ),
        Row([title, GIB4(headroom), COUNT(headroom), "", ""], style=style),
    ]
    notes: list[str] = []
    if fits is not None:
        notes.append(
            text("leaves: what each size leaves of the device at the serving peak; negative: over")
        )
    if budget.device_verdict == "exceeds":
        notes.append(
            text(
                "even if the allocator releases all that it can, {size:gib4} GiB are missing",
                size=-(budget.released_headroom_bytes or 0),
            )
        )
    columns = (*SIZES, _TOKENS, Column("Leaves, GiB", leaves, right=True))
    return table(text("KV cache budgets, {labels}", labels=labels), columns, rows, notes)


def _fits_request_section(report: Report, budget: Budget, labels: str) -> Section:
    """Return the table from the KV cache of the equation to the one that fits the request."""
    recomputed = _marked(text("KV cache, recomputed"), budget, "kv_cache_bytes")
    rows: list[Row | Size] = [Size(recomputed, budget.kv_cache_bytes, tokens=budget.kv_tokens)]
    notes: list[str] = []
    missing = [item for item in budget.not_subtracted if item.bytes is None]
    if EVIDENCE[report.run.source].partial:
        for reason in dict.fromkeys(item.reason for item in missing):
            titles = join("; ", [item.title for item in missing if item.reason == reason])
            notes.append(text("NOT MEASURED: {what} ({reason})", what=titles, reason=reason))
    else:
        notes += map(_not_measured, missing)
    known = [item for item in budget.not_subtracted if item.bytes is not None]
    for item in known:
        title = modelled(item.title, item.how == MODELLED)
        rows.append(Size(title, item.bytes, mark="-", tokens=item.kv_tokens))
        for part in item.parts:
            name = modelled(text("of which {name}", name=part.title), part.how == MODELLED)
            rows.append(Row([name, GIB4(part.bytes), COUNT(part.bytes), ""], 1, MUTED))
    fits, tokens = budget.fits_request_bytes, budget.fits_request_tokens
    left_out = sum(item.bytes or 0 for item in known)
    half = left_out - left_out // divisor_of(budget.equation)
    if half:  # of what it would subtract, too
        rows.append(Size(title_of("halved"), half, mark="+"))
    title = _marked(text("KV cache that fits the request"), budget, "fits_request_bytes")
    rows.append(Size(title, fits, TOTAL, "=", tokens))
    if fits is not None and budget.kv_cache_bytes is not None:
        fewer = minus(tokens, budget.kv_tokens)
        rows.append(Size(text("difference"), fits - budget.kv_cache_bytes, tokens=fewer))
    for other in budget.corrections:
        rows.append(Size(other.title, other.bytes, MUTED, tokens=other.kv_tokens))
        notes.append(text("{title}: {formula}", title=other.title, formula=other.formula))
        items = [item for item in known if item.name in other.parts]
        if budget.kv_cache_bytes is not None and items:
            less = budget.kv_cache_bytes - other.bytes
            total = sum(item.bytes or 0 for item in items)
            if abs(less - total) <= budget.tolerance_bytes:
                parts = join(
                    " + ",
                    [
                        text("{size:gib} {title}", size=item.bytes, title=item.title)
                        for item in items
                    ],
                )
                notes.append(
                    text(
                        "{size:gib} GiB less = {parts}, each to its printed digits",
                        size=less,
                        parts=parts,
                    )
                )
    if derived := [item.title for item in known if item.how == DERIVED]:
        notes.append(text("derived: {titles}", titles=join("; ", derived)))
    least = [rank.budget.fits_request_bytes for rank in report.ranks]
    if (
        fits is not None
        and budget.kv_cache_bytes is not None
        and budget.takes_fixed_size
        and 0 < fits < budget.kv_cache_bytes
        and all(other is not None and other >= fits for other in least)
    ):
        notes.append(text("--kv-cache-memory-bytes {size} grants exactly this", size=fits))
    title = text(
        "KV cache that fits the request: held memory that the equation does not subtract, {labels}",
        labels=labels,
    )
    return table(title, (*SIZES, _TOKENS), rows, notes)
