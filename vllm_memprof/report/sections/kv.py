"""The KV cache: tokens, blocks, layers."""

from __future__ import annotations

from vllm_memprof.accounting.kv import is_overridden_by_an_unknown
from vllm_memprof.accounting.model import Kv, Report
from vllm_memprof.report.sections.base import (
    SHOWN_GROUPS,
    TOTAL,
    Column,
    Row,
    Section,
    failed,
    group_ranks,
    labels_of,
    number,
)
from vllm_memprof.units import format_bytes, format_gib


def kv_sections(report: Report) -> list[Section]:
    """Tokens, blocks, concurrency; then the layers by the layout of their blocks."""
    known = [
        rank for rank in report.ranks if rank.kv.blocks is not None or rank.kv.tokens is not None
    ]
    found = []
    for members in group_ranks(known, lambda rank: repr(_shown(rank.kv)))[:SHOWN_GROUPS]:
        kv = members[0].kv
        rows = [
            Row(["KV cache tokens", format_bytes(kv.tokens)], style=TOTAL),
            Row(["max concurrency at max_model_len", _concurrency(kv)], style=TOTAL),
            Row(["max_model_len, tokens", format_bytes(kv.max_model_len)]),
            Row(["blocks", format_bytes(kv.blocks)]),
            Row(["block size, tokens", format_bytes(kv.block_size)]),
            Row(["bytes per token", number(kv.bytes_per_token, ",")]),
            Row(["bytes per block", format_bytes(kv.bytes_per_block)]),
            Row(["planned, GiB", format_gib(kv.planned_bytes, 4)]),
        ]
        notes = (
            ["inferred from the printed tokens and size of the KV cache: blocks and bytes"]
            if kv.inferred
            else []
        )
        notes += _override(kv)
        notes += [failed(c.name, c.expected, c.found) for c in kv.checks if c.ok is False]
        passed = [c.name for c in kv.checks if c.ok]
        if passed:
            notes.append(f"✓ {len(passed)} of {len(kv.checks)} cross-checks hold" + _unchecked(kv))
        columns = [Column("", right=False), Column("")]
        found.append(Section(f"KV cache, {labels_of(members)}", columns, rows, notes))
        if kv.groups:
            found.append(_kv_groups(kv))
    return found


def _shown(kv: Kv) -> tuple[object, ...]:
    """What the tables say of a rank; budgets that differ without changing the plan do not matter here."""
    return (
        kv.tokens,
        kv.blocks,
        kv.planned_bytes,
        kv.groups,
        [(check.name, check.ok) for check in kv.checks],
    )


def _unchecked(kv: Kv) -> str:
    unknown = [check.name for check in kv.checks if check.ok is None]
    return f"; unknown: {'; '.join(unknown)}" if unknown else ""


def _override(kv: Kv) -> list[str]:
    if kv.override_blocks is None and not is_overridden_by_an_unknown(kv):
        return []
    given = "" if kv.override_blocks is None else f" {kv.override_blocks}"
    text = f"--num-gpu-blocks-override{given} replaced the number of blocks"
    return [
        text
        + (
            f"; the budget holds {format_bytes(kv.fitting_blocks)}"
            if kv.fitting_blocks is not None
            else ""
        )
    ]


def _concurrency(kv: Kv) -> str:
    return "-" if kv.max_concurrency is None else f"{kv.max_concurrency:.2f}x"


def _kv_groups(kv: Kv) -> Section:
    titles = ["Layers", "Block, tokens", "Page, bytes", "Bytes/token", "dtype"]
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
    return Section(
        "KV layers by type", [Column("Type", right=False), *(Column(t) for t in titles)], rows
    )
