"""The KV cache: tokens, blocks, layers."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from vllm_memprof.accounting.budget.kv import is_overridden_by_an_unknown
from vllm_memprof.accounting.model import Kv, RankReport, Report
from vllm_memprof.accounting.readings.quantities import KV_TITLES
from vllm_memprof.document import MUTED, PLAIN, TOTAL, Section
from vllm_memprof.tables import COMMAS, COUNT, GIB4, Column, Unit, alike, failed, table
from vllm_memprof.text import join, text

_FIRST = ("tokens", "max_concurrency")


_GROUPS = (
    Column("Type", "type"),
    Column("Layers", "layers", COUNT),
    Column("Block, tokens", "block_size", COUNT),
    Column("Page, bytes", "page_size_bytes", COUNT),
    Column("Bytes/token", "bytes_per_token", COMMAS),
    Column("dtype", "dtype", right=True),
)
#: How the figures of ``KV_TITLES`` are printed.
_UNITS: dict[str, Unit] = {
    "max_concurrency": lambda value: "-" if value is None else f"{value:.2f}x",
    "bytes_per_token": COMMAS,
}


class _KvRow(NamedTuple):
    title: str
    value: str
    style: str = PLAIN
    mark: str = ""
    indent: int = 0


_KV = (Column("", "title"), Column("", "value", right=True))


def kv_sections(report: Report) -> list[Section]:
    """Return tokens, blocks and concurrency; then the layers by the layout of their blocks."""

    def shown(rank: RankReport) -> Hashable:
        kv = rank.kv  # budgets that differ without changing the plan do not matter here
        checks = [(check.name, check.ok) for check in kv.checks]
        return repr((kv.tokens, kv.blocks, kv.planned_bytes, kv.groups, checks))

    def draw(rank: RankReport, labels: str) -> list[Section]:
        kv = rank.kv
        rows = [
            _KvRow(
                title,
                _UNITS.get(name, COUNT)(getattr(kv, name)),
                TOTAL if name in _FIRST else PLAIN,
            )
            for name, title in KV_TITLES.items()
        ]
        rows.append(_KvRow(text("planned, GiB"), GIB4(kv.planned_bytes)))
        if kv.draft_layers:
            title = text("of which layers of the drafter, GiB")
            rows.append(_KvRow(title, GIB4(kv.draft_bytes), MUTED, indent=1))
        found = [table(text("KV cache, {labels}", labels=labels), _KV, rows, _notes(kv))]
        if kv.groups:
            found.append(table(text("KV layers by type"), _GROUPS, kv.groups))
        return found

    known = [
        rank for rank in report.ranks if rank.kv.blocks is not None or rank.kv.tokens is not None
    ]
    return alike(known, draw, shown)


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
