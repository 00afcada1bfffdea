"""The KV cache: tokens, blocks, layers."""

from __future__ import annotations

from collections.abc import Hashable

from vllm_memprof.accounting.kv import is_overridden_by_an_unknown
from vllm_memprof.accounting.model import Kv, RankReport, Report
from vllm_memprof.accounting.quantities import KV_TITLES
from vllm_memprof.report.document import MUTED, PLAIN, TOTAL, Column, Row, Section
from vllm_memprof.report.sections.base import (
    SHOWN_GROUPS,
    failed,
    group_ranks,
    labels_of,
    number,
)
from vllm_memprof.text import join, text
from vllm_memprof.units import format_bytes, format_gib

_FIRST = ("tokens", "max_concurrency")


def kv_sections(report: Report) -> list[Section]:
    """Return tokens, blocks and concurrency; then the layers by the layout of their blocks."""

    def shown(rank: RankReport) -> Hashable:
        kv = rank.kv  # budgets that differ without changing the plan do not matter here
        checks = [(check.name, check.ok) for check in kv.checks]
        return repr((kv.tokens, kv.blocks, kv.planned_bytes, kv.groups, checks))

    known = [
        rank for rank in report.ranks if rank.kv.blocks is not None or rank.kv.tokens is not None
    ]
    found = []
    for members in group_ranks(known, shown)[:SHOWN_GROUPS]:
        kv = members[0].kv
        concurrency = "-" if kv.max_concurrency is None else f"{kv.max_concurrency:.2f}x"
        figures = {name: format_bytes(getattr(kv, name)) for name in KV_TITLES}
        figures["max_concurrency"] = concurrency
        figures["bytes_per_token"] = number(kv.bytes_per_token, ",")
        rows = [
            *(
                Row([title, figures[name]], style=TOTAL if name in _FIRST else PLAIN)
                for name, title in KV_TITLES.items()
            ),
            Row([text("planned, GiB"), format_gib(kv.planned_bytes, 4)]),
            *_of_drafter(kv),
        ]
        title = text("KV cache, {labels}", labels=labels_of(members))
        columns = [Column("", right=False), Column("")]
        found.append(Section(title, columns, rows, _notes(kv)))
        if kv.groups:
            found.append(_kv_groups(kv))
    return found


def _of_drafter(kv: Kv) -> list[Row]:
    """Return the drafter's share of the plan, where it has layers of its own."""
    if not kv.draft_layers:
        return []
    title = text("of which layers of the drafter, GiB")
    return [Row([title, format_gib(kv.draft_bytes, 4)], indent=1, style=MUTED)]


def _notes(kv: Kv) -> list[str]:
    notes: list[str] = []
    if kv.derived:
        if kv.blocks is not None or kv.bytes_per_token is not None:
            notes.append(
                text(
                    "blocks and bytes are derived from the printed tokens and size of the KV cache"
                )
            )
        if kv.default_block_size:
            notes.append(
                text(
                    "block size {size}: the engine's default, the log does not print it",
                    size=kv.block_size,
                )
            )
        notes += _bytes_per_token(kv)
    if kv.override_blocks is not None or is_overridden_by_an_unknown(kv):
        given = "" if kv.override_blocks is None else f" {kv.override_blocks}"
        replaced = text(
            "--num-gpu-blocks-override{given} replaced the number of blocks", given=given
        )
        if kv.fitting_blocks is not None:
            fits = text("{count:,} blocks fit the budget", count=kv.fitting_blocks)
            replaced = join("; ", [replaced, fits])
        notes.append(replaced)
    notes += [failed(c.name, c.expected, c.found) for c in kv.checks if c.ok is False]
    passed = sum(1 for check in kv.checks if check.ok)
    if passed:
        parts = [
            text("✓ {passed} of {count} cross-checks hold", passed=passed, count=len(kv.checks))
        ]
        unknown = [check.name for check in kv.checks if check.ok is None]
        if unknown:
            parts.append(text("unknown: {names}", names=join("; ", unknown)))
        notes.append(join("; ", parts))
    return notes


def _bytes_per_token(kv: Kv) -> list[str]:
    """Return what the rounding of a log leaves open."""
    if kv.bytes_per_token_limits is None:
        return []
    low, high = kv.bytes_per_token_limits
    between = text(
        "bytes per token: {low:,} to {high:,} by the rounding of the log", low=low, high=high
    )
    if kv.bytes_per_token is None:
        return [between]
    single = text("{value:,} is the only multiple of 64 among them", value=int(kv.bytes_per_token))
    return [join("; ", [between, single])]


def _kv_groups(kv: Kv) -> Section:
    columns = [
        Column(text("Type"), right=False),
        Column(text("Layers")),
        Column(text("Block, tokens")),
        Column(text("Page, bytes")),
        Column(text("Bytes/token")),
        Column(text("dtype")),
    ]
    rows = [
        Row(
            [
                group.type,
                format_bytes(group.layers),
                format_bytes(group.block_size),
                format_bytes(group.page_size_bytes),
                number(group.bytes_per_token, ","),
                group.dtype or "-",
            ]
        )
        for group in kv.groups
    ]
    return Section(text("KV layers by type"), columns, rows)
