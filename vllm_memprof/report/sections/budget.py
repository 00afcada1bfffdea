"""The budget equation with every term, and the KV cache that fits the request beside it."""

from __future__ import annotations

from dataclasses import replace

from packaging.version import Version

from vllm_memprof.accounting.equations import (
    EQUATIONS,
    STARTUP_PLAN,
    divisor_of,
    form_of,
    ignoring_fixed_size,
)
from vllm_memprof.accounting.findings.advice import device_total
from vllm_memprof.accounting.model import (
    DERIVED,
    MODELLED,
    Budget,
    NotSubtracted,
    PeakItem,
    RankReport,
    Report,
    TermRow,
)
from vllm_memprof.accounting.quantities import is_device_wide, title_of
from vllm_memprof.report.document import (
    BAD,
    GOOD,
    MUTED,
    NOT_MEASURED,
    PLAIN,
    TOTAL,
    Column,
    Row,
    Section,
)
from vllm_memprof.report.sections.audit import recomputed_from
from vllm_memprof.report.sections.base import (
    BYTES,
    GIB,
    SHOWN_GROUPS,
    UNKNOWN,
    amount,
    failed,
    group_ranks,
    labels_of,
    modelled,
    more_groups,
    number,
)
from vllm_memprof.text import Text, join, text
from vllm_memprof.units import format_bytes, format_gib


def budget_sections(report: Report) -> list[Section]:
    """Return the tables of each group of ranks that agree to the byte."""
    log = report.run.source == "log"  # may end with what was asked for
    known = [
        rank
        for rank in report.ranks
        if rank.budget.engine_kv_cache_bytes is not None
        or any(term.bytes is not None for term in rank.budget.terms)
        or (log and rank.budget.requested is not None)
    ]
    groups = group_ranks(known, lambda rank: repr((rank.budget, rank.kv.bytes_per_block)))
    groups.sort(key=lambda members: _granted(members[0]))
    found = []
    for members in groups[:SHOWN_GROUPS]:
        budget = members[0].budget
        found.append(_equation_section(report, members))
        if budget.kv_cache_bytes is not None and _anything_not_subtracted(report, budget):
            found.append(_fits_request_section(report, members))
        if budget.held_at_peak:
            found.append(_fits_device_section(members))
        if budget.engine_kv_cache_bytes is not None and _any_other(budget):
            found.append(_budgets_section(members))
    if found:
        found[-1].notes.extend(more_groups(groups, "report.json"))
    return found


def term_title(report: Report, term: TermRow) -> str:
    """Return a term's title, marked where a simulated device's profile has a part in it."""
    return modelled(title_of(term.name), report.run.simulated and is_device_wide(term.name))


def _marked(title: str, budget: Budget, name: str) -> str:
    """Return the title of a figure of the budget, marked where it depends on a modelled one."""
    return modelled(title, budget.how.get(name) == MODELLED)


def _anything_not_subtracted(report: Report, budget: Budget) -> bool:
    """Return False for a log that prints none of the items: a note of the equation says so."""
    return any(
        report.run.source != "log" or item.bytes is not None for item in budget.not_subtracted
    )


def _granted(rank: RankReport) -> int:
    granted = rank.budget.engine_kv_cache_bytes
    return 1 << 62 if granted is None else granted


def _device_total(rank: RankReport) -> Row:
    if rank.device_total_bytes is None and (derived := device_total(rank)) is not None:
        return Row([text("device total, derived"), format_gib(derived), "-"])
    return amount(text("device total"), rank.device_total_bytes)


def _request(rank: RankReport) -> list[Row]:
    """Return what the request is a share of, and the share."""
    row = form_of(rank.budget.equation)
    if row is None or row.base == "device_total_bytes":
        utilization = rank.budget.gpu_memory_utilization
        return [
            _device_total(rank),
            Row(["gpu_memory_utilization", number(utilization), ""], mark="×"),
        ]
    base = rank.figures.get(row.base)
    return [
        amount(row.base_title or row.base, None if base is None else int(base)),
        Row([row.share, number(rank.figures.get(row.share)), ""], mark="×"),
    ]


def _equation_section(report: Report, members: list[RankReport]) -> Section:
    rank, budget = members[0], members[0].budget
    rows = [
        *_request(rank),
        amount(text("requested"), budget.requested_bytes, TOTAL, "="),
    ]
    if not budget.override:
        for term in budget.terms:
            if term.subtracted:
                rows.append(amount(term_title(report, term), term.bytes, mark="-"))
                for part in term.parts:
                    title = text("of which {name}", name=part.title)
                    rows.append(replace(amount(title, part.bytes, MUTED), indent=1))
    rows += [
        amount(
            _marked(text("KV cache, recomputed"), budget, "kv_cache_bytes"),
            budget.kv_cache_bytes,
            TOTAL,
            "=",
        ),
        amount(
            _marked(text("KV cache granted by the engine"), budget, "engine_kv_cache_bytes"),
            budget.engine_kv_cache_bytes,
        ),
    ]
    if budget.residual_bytes is None:
        rows.append(Row([text("granted - recomputed"), "-", "-"], style=MUTED))
    else:
        size = f"{budget.residual_bytes:+,}" if budget.residual_bytes else "0"
        size += f" ±{budget.tolerance_bytes:,}" if budget.tolerance_bytes else ""
        rows.append(
            Row([text("granted - recomputed: equal"), "", size], style=GOOD, mark="✓")
            if budget.balanced
            else Row([text("granted - recomputed: differs"), "", size], style=BAD, mark="✗")
        )
    estimated = any(term.name == "graph_estimate" and term.subtracted for term in budget.terms)
    for term in budget.terms:
        if term.subtracted or term.bytes is None:
            continue
        name = term_title(report, term)
        title = (
            text("{term}, estimated above", term=name)
            if term.name == "graph" and estimated
            else text("{term}, not subtracted", term=name)
        )
        rows.append(amount(title, term.bytes, MUTED))
    heading = text(
        "KV cache budget, equation {equation}, {labels}",
        equation=budget.equation or UNKNOWN,
        labels=labels_of(members),
    )
    columns = [Column("", right=False), Column(GIB), Column(BYTES)]
    notes = _equation_notes(report, rank) + recomputed_from(report, rank)
    return Section(heading, columns, rows, notes)


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
    budget = rank.budget
    if budget.equation is None:
        if report.run.source == "log" and report.run.engine_version is None:
            return [
                text(
                    "the log names neither the release nor an equation: its figures are shown as "
                    "they are"
                )
            ]
        release = " ".join(part for part in (report.run.engine, report.run.engine_version) if part)
        return [
            text(
                "no equation is known for {release}: its figures are shown as they are",
                release=release or text("this engine"),
            )
        ]
    notes: list[str] = [
        f"{budget.equation}: {budget.formula}",
        text("source: {cite}", cite=budget.cite),
    ]
    if report.run.engine_version is None or report.run.source == "log":
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
        if report.run.source == "log":
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


def _not_measured(item: PeakItem | NotSubtracted) -> Text:
    """Return the note of an item that is not known."""
    return text(
        "{title}: {not_measured} ({reason})",
        title=item.title,
        not_measured=NOT_MEASURED,
        reason=item.reason,
    )


def _any_other(budget: Budget) -> bool:
    sizes = (budget.fits_request_bytes, budget.fits_device_bytes, *budget.suggested_bytes)
    return any(size is not None for size in sizes)


def _fits_device_section(members: list[RankReport]) -> Section:
    """Return the table from the device to the KV cache that fits it."""
    rank, budget = members[0], members[0].budget
    rows = [_device_total(rank)]
    notes: list[str] = []
    for item in budget.held_at_peak:
        if item.bytes is None:
            notes.append(_not_measured(item))
        else:
            rows.append(amount(modelled(item.title, item.how == MODELLED), item.bytes, mark="-"))
    fits = _marked(text("KV cache that fits the device"), budget, "fits_device_bytes")
    rows.append(amount(fits, budget.fits_device_bytes, TOTAL, "="))
    if notes:
        notes.append(text("estimated: what was not measured is not subtracted"))
    title = text(
        "KV cache that fits the device: held memory at the serving peak, {labels}",
        labels=labels_of(members),
    )
    return Section(title, [Column("", right=False), Column(GIB), Column(BYTES)], rows, notes)


_SUGGESTED = {
    "request": text("the engine's suggestion for the request"),
    "device": text("the engine's suggestion for the device"),
}


def _budgets_section(members: list[RankReport]) -> Section:
    """Return the KV caches beside each other: granted, fitting, suggested; and what is spare."""
    rank, budget = members[0], members[0].budget
    fits = budget.fits_device_bytes

    def row(title: str, name: str, size: int | None, tokens: int | None, style: str = PLAIN) -> Row:
        cells = [
            _marked(title, budget, name),
            format_gib(size, 4),
            format_bytes(size),
            format_bytes(tokens),
            "" if fits is None or size is None or size == fits else format_gib(fits - size, 4),
        ]
        return Row(cells, style=style)

    granted = budget.engine_kv_cache_bytes
    tokens = rank.kv.tokens
    rows = [
        row(text("KV cache granted by the engine"), "engine_kv_cache_bytes", granted, tokens),
        row(
            text("KV cache that fits the request"),
            "fits_request_bytes",
            budget.fits_request_bytes,
            budget.fits_request_tokens,
        ),
        row(
            text("KV cache that fits the device"),
            "fits_device_bytes",
            fits,
            budget.fits_device_tokens,
        ),
        *(
            row(_SUGGESTED[each.limit], "suggested_bytes", each.bytes, each.kv_tokens)
            for each in budget.suggestions
        ),
    ]
    spare = budget.spare_bytes
    title = _marked(text("spare at the serving peak"), budget, "spare_bytes")
    style = {"fits": GOOD, "exceeds": BAD}.get(budget.device_verdict or "", PLAIN)
    rows.append(Row([title, format_gib(spare, 4), format_bytes(spare), "", ""], style=style))
    columns = [
        Column("", right=False),
        Column(GIB),
        Column(BYTES),
        Column(text("KV tokens")),
        Column(text("Leaves, GiB")),
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
                size=-(budget.released_spare_bytes or 0),
            )
        )
    return Section(
        text("KV cache budgets, {labels}", labels=labels_of(members)), columns, rows, notes
    )


def _fits_request_section(report: Report, members: list[RankReport]) -> Section:
    """Return the table from the KV cache of the equation to the one that fits the request."""
    budget = members[0].budget

    def row(
        title: str, size: int | None, tokens: int | None, style: str = PLAIN, mark: str = ""
    ) -> Row:
        cells = [title, format_gib(size, 4), format_bytes(size), format_bytes(tokens)]
        return Row(cells, style=style, mark=mark)

    recomputed = _marked(text("KV cache, recomputed"), budget, "kv_cache_bytes")
    rows = [row(recomputed, budget.kv_cache_bytes, budget.kv_tokens)]
    notes: list[str] = []
    missing = [item for item in budget.not_subtracted if item.bytes is None]
    if report.run.source == "log" and missing:
        for reason in dict.fromkeys(item.reason for item in missing):
            titles = join("; ", [item.title for item in missing if item.reason == reason])
            notes.append(text("NOT MEASURED: {what} ({reason})", what=titles, reason=reason))
    for item in budget.not_subtracted:
        if item.bytes is None and report.run.source == "log":
            continue
        if item.bytes is None:
            notes.append(_not_measured(item))
        else:
            title = modelled(item.title, item.how == MODELLED)
            rows.append(row(title, item.bytes, item.kv_tokens, mark="-"))
            for part in item.parts:
                title = text("of which {name}", name=part.title)
                cells = [modelled(title, part.how == MODELLED)]
                cells += [format_gib(part.bytes, 4), format_bytes(part.bytes), ""]
                rows.append(Row(cells, 1, MUTED))
    fits, tokens = budget.fits_request_bytes, budget.fits_request_tokens
    left_out = sum(item.bytes or 0 for item in budget.not_subtracted)
    half = left_out - left_out // divisor_of(budget.equation)
    if half:  # of what it would subtract, too
        rows.append(row(title_of("halved"), half, None, mark="+"))
    title = _marked(text("KV cache that fits the request"), budget, "fits_request_bytes")
    rows.append(row(title, fits, tokens, TOTAL, "="))
    if fits is not None and budget.kv_cache_bytes is not None:
        fewer = (
            None if None in (tokens, budget.kv_tokens) else (tokens or 0) - (budget.kv_tokens or 0)
        )
        rows.append(row(text("difference"), fits - budget.kv_cache_bytes, fewer))
    for other in budget.corrections:
        rows.append(row(other.title, other.bytes, other.kv_tokens, MUTED))
        notes.append(text("{title}: {formula}", title=other.title, formula=other.formula))
        items = [
            item
            for item in budget.not_subtracted
            if item.name in other.parts and item.bytes is not None
        ]
        if budget.kv_cache_bytes is not None and items:
            less = budget.kv_cache_bytes - other.bytes
            total = sum(item.bytes for item in items if item.bytes is not None)
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
    derived = [
        item.title
        for item in budget.not_subtracted
        if item.how == DERIVED and item.bytes is not None
    ]
    if derived:
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
    columns = [Column("", right=False), Column(GIB), Column(BYTES), Column(text("KV tokens"))]
    title = text(
        "KV cache that fits the request: held memory that the equation does not subtract, {labels}",
        labels=labels_of(members),
    )
    return Section(title, columns, rows, notes)
