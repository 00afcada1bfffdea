"""The budget equation with every term, and the honest budget beside it."""

from __future__ import annotations

from vllm_memprof.accounting.equations import divisor_of
from vllm_memprof.accounting.findings import device_total
from vllm_memprof.accounting.model import (
    INFERRED,
    MODELLED,
    Budget,
    Correction,
    RankReport,
    Report,
    TermRow,
)
from vllm_memprof.accounting.quantities import is_device_wide, title_of
from vllm_memprof.report.sections.base import (
    BAD,
    GOOD,
    MODELLED_MARK,
    MUTED,
    NOT_MEASURED,
    SHOWN_GROUPS,
    TOTAL,
    Column,
    Row,
    Section,
    amount,
    failed,
    group_ranks,
    labels_of,
    number,
    priced,
)
from vllm_memprof.units import format_gib


def budget_sections(report: Report) -> list[Section]:
    """The equation with every term, and the honest budget; ranks that agree to the byte share a table."""
    log = report.run.source == "log"  # may end with what was asked for
    known = [
        rank
        for rank in report.ranks
        if _has_budget(rank.budget) or (log and rank.budget.requested is not None)
    ]
    groups = group_ranks(known, lambda rank: repr((rank.budget, rank.kv.bytes_per_block)))
    groups.sort(key=lambda members: _granted(members[0]))
    found = []
    for members in groups[:SHOWN_GROUPS]:
        found.append(_equation_section(report, members))
        if members[0].budget.kv_cache_bytes is not None and _anything_not_subtracted(
            report, members[0].budget
        ):
            found.append(_honest_section(report, members))
    if len(groups) > SHOWN_GROUPS and found:
        found[-1].notes.append(
            f"{len(groups) - SHOWN_GROUPS} more groups of ranks are in report.json"
        )
    return found


def _anything_not_subtracted(report: Report, budget: Budget) -> bool:
    """A log may print none of the items; then a note of the equation says so."""
    return any(
        report.run.source != "log" or item.bytes is not None for item in budget.not_subtracted
    )


def _granted(rank: RankReport) -> int:
    granted = rank.budget.engine_kv_cache_bytes
    return 1 << 62 if granted is None else granted


def _has_budget(budget: Budget) -> bool:
    """Whether there is more to show than what was asked for."""
    figures = [budget.engine_kv_cache_bytes, *(term.bytes for term in budget.terms)]
    return any(figure is not None for figure in figures)


def _equation_section(report: Report, members: list[RankReport]) -> Section:
    budget = members[0].budget
    charged = [term for term in budget.terms if term.subtracted]
    rows = [
        _device_total(members[0]),
        Row(["× gpu_memory_utilization", number(budget.gpu_memory_utilization), ""]),
        amount("= requested", budget.requested_bytes, TOTAL),
        *(amount(f"- {term_title(report, term)}", term.bytes) for term in charged),
        amount("= KV cache, recomputed", budget.kv_cache_bytes, TOTAL),
        amount("  KV cache, the engine's figure", budget.engine_kv_cache_bytes),
        _residual(budget),
    ]
    reported = [term for term in budget.terms if not term.subtracted and term.bytes is not None]
    rows += [
        amount(f"  {term_title(report, term)}, not charged", term.bytes, MUTED) for term in reported
    ]
    if budget.override:
        rows = [rows[0], rows[1], rows[2], *rows[-3 - len(reported) :]]
    title = f"KV budget, equation {budget.equation or 'unknown'}"
    return Section(
        f"{title}, {labels_of(members)}",
        [Column("", right=False), Column("GiB"), Column("bytes")],
        rows,
        _equation_notes(report, budget),
    )


def _device_total(rank: RankReport) -> Row:
    """As it was read; else what the request is a share of, as far as its digits go."""
    if rank.device_total_bytes is None and (total := device_total(rank)) is not None:
        return Row(["  device total, inferred", format_gib(total), "-"])
    return amount("  device total", rank.device_total_bytes)


def _equation_notes(report: Report, budget: Budget) -> list[str]:
    if budget.equation is None:
        release = " ".join(part for part in (report.run.engine, report.run.engine_version) if part)
        if report.run.source == "log" and report.run.engine_version is None:
            return [
                "the log tells neither the release nor an equation: its figures are shown as they are"
            ]
        return [
            f"no equation is known for {release or 'this engine'}: its figures are shown as they are"
        ]
    notes = [f"{budget.equation}: {budget.formula}", f"source: {budget.cite}"]
    if report.run.engine_version is None or report.run.source == "log":
        notes.append(f"chosen by {budget.chosen_by}")
    if budget.override:
        notes.append(f"a fixed size replaced the equation: --{budget.override.replace('_', '-')}")
    elif budget.kv_cache_bytes is None:
        missing = [term.name for term in budget.terms if term.subtracted and term.bytes is None]
        missing = (["requested"] if budget.requested is None else []) + missing
        notes.append(f"not recomputed, unknown: {', '.join(missing)}")
        implied = budget.implied_requested_bytes
        implied_term = budget.implied_term(divisor_of(budget.equation))
        if implied_term is not None:
            name, size = implied_term
            notes.append(f"the engine's figure leaves {format_gib(size)} GiB for {name}")
        if implied is not None:
            notes.append(
                f"the terms and the engine's figure together: {format_gib(implied)} GiB were requested"
            )
    if (
        budget.kv_cache_bytes is not None
        and budget.not_subtracted
        and not _anything_not_subtracted(report, budget)
    ):
        notes.append(
            f"charged by no term, and not in the log: {'; '.join(item.title for item in budget.not_subtracted)}"
        )
    notes += [
        failed(check.name, check.expected, check.found)
        for check in budget.checks
        if not check.ok and check.ok is not None
    ]
    return notes


def _residual(budget: Budget) -> Row:
    if budget.residual_bytes is None:
        return Row(["  residual", "-", "-"], style=MUTED)
    verdict = "✓" if budget.balanced else "✗"
    size = f"{budget.residual_bytes:+,}" if budget.residual_bytes else "0"
    size += f" ±{budget.tolerance_bytes:,}" if budget.tolerance_bytes else ""
    return Row([f"  residual {verdict}", "", size], style=GOOD if budget.balanced else BAD)


def _honest_section(report: Report, members: list[RankReport]) -> Section:
    budget = members[0].budget
    rows = [priced("  KV cache, recomputed", budget.kv_cache_bytes, budget.kv_tokens)]
    notes = []
    for item in budget.not_subtracted:
        mark = f" {MODELLED_MARK}" if item.how == MODELLED else ""
        if item.bytes is None:
            notes.append(f"{item.title}: {NOT_MEASURED} ({item.reason})")
        else:
            rows.append(priced(f"- {item.title}{mark}", item.bytes, item.kv_tokens))
    rows.append(
        priced(
            "= honest KV cache",
            budget.fits_request_kv_cache_bytes,
            budget.fits_request_kv_tokens,
            TOTAL,
        )
    )
    honest = budget.fits_request_kv_cache_bytes
    if honest is not None and budget.kv_cache_bytes is not None:
        fewer = None
        if budget.kv_tokens is not None and budget.fits_request_kv_tokens is not None:
            fewer = budget.fits_request_kv_tokens - budget.kv_tokens
        rows.append(priced("  difference", honest - budget.kv_cache_bytes, fewer))
    for row in budget.corrections:
        rows.append(priced(f"  {row.title}", row.bytes, row.kv_tokens, MUTED))
        notes.append(f"{row.title}: {row.formula}")
        notes += _difference(budget, row)
    inferred = [
        item.title
        for item in budget.not_subtracted
        if item.how == INFERRED and item.bytes is not None
    ]
    if inferred:
        notes.append(f"inferred: {'; '.join(inferred)}")
    if honest is not None and budget.kv_cache_bytes is not None:
        least = [rank.budget.fits_request_kv_cache_bytes for rank in report.ranks]
        takes = budget.takes_fixed_size
        if (
            takes
            and 0 < honest < budget.kv_cache_bytes
            and all(other is not None and other >= honest for other in least)
        ):
            notes.append(f"--kv-cache-memory-bytes {honest} makes the engine keep to it")
    columns = [Column("", right=False), Column("GiB"), Column("bytes"), Column("KV tokens")]
    return Section(
        f"Honest budget: what {labels_of(members)} held and no term charges", columns, rows, notes
    )


def _difference(budget: Budget, row: Correction) -> list[str]:
    """What the other reading charges and this one does not, as a sum, within the printed digits."""
    items = [
        item for item in budget.not_subtracted if item.name in row.parts and item.bytes is not None
    ]
    if budget.kv_cache_bytes is None or not items:
        return []
    less = budget.kv_cache_bytes - row.bytes
    total = sum(item.bytes for item in items if item.bytes is not None)
    if abs(less - total) > budget.tolerance_bytes:
        return []
    parts = " + ".join(f"{format_gib(item.bytes)} {item.title}" for item in items)
    return [f"{format_gib(less)} GiB less = {parts}, each to its printed digits"]


def term_title(report: Report, term: TermRow) -> str:
    """As the tables name it, marked where a simulated device's profile has a part in it."""
    mark = f" {MODELLED_MARK}" if report.run.simulated and is_device_wide(term.name) else ""
    return title_of(term.name) + mark
