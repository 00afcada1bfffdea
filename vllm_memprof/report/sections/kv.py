"""The KV cache: tokens, blocks, layers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from vllm_memprof.accounting.budget.kv import is_overridden_by_an_unknown
from vllm_memprof.accounting.model import Kv, RankReport
from vllm_memprof.accounting.titles import TITLES
from vllm_memprof.document import MUTED, PLAIN, TOTAL, Row, Section
from vllm_memprof.report.sections.base import Sheet, failed
from vllm_memprof.tables import COMMAS, COUNT, GIB4, Column, Unit, number
from vllm_memprof.text import join, text

_FIRST = ("tokens", "max_concurrency")
_KV = (Column("", ""), Column("", "", right=True))
_GROUPS = (
    Column("Type", "type"),
    Column("Layers", "layers", COUNT),
    Column("Block, tokens", "block_size", COUNT),
    Column("Page, bytes", "page_size_bytes", COUNT),
    Column("Bytes/token", "bytes_per_token", COMMAS),
    Column("dtype", "dtype", right=True),
)
#: How the figures of ``TITLES["kv"]`` are printed.
_UNITS: dict[str, Unit] = {
    "max_concurrency": partial(number, spec=".2f", suffix="x"),
    "bytes_per_token": COMMAS,
}


def kv_cache(sheet: Sheet, rank: RankReport) -> Iterator[Section]:
    """Return tokens, blocks and concurrency; then the layers by the layout of their blocks."""
    kv = rank.kv
    if kv.blocks is None and kv.tokens is None:
        return
    rows = [
        Row(
            [title, _UNITS.get(name, COUNT)(getattr(kv, name))],
            style=TOTAL if name in _FIRST else PLAIN,
        )
        for name, title in TITLES["kv"].items()
    ]
    rows.append(Row([text("planned, GiB"), GIB4(kv.planned_bytes)]))
    if kv.draft_layers:
        title = text("of which layers of the drafter, GiB")
        rows.append(Row([title, GIB4(kv.draft_bytes)], 1, MUTED))
    yield sheet.table(text("KV cache"), _KV, rows, _notes(kv))
    if kv.groups:
        yield sheet.table(text("KV layers by type"), _GROUPS, kv.groups)


def _notes(kv: Kv) -> Iterator[str]:
    if kv.derived and (kv.blocks is not None or kv.bytes_per_token is not None):
        yield text("blocks and bytes are derived from the printed tokens and size of the KV cache")
    if kv.derived and kv.default_block_size:
        yield text("block size {block_size}: the engine's default, the log does not print it", kv)
    if kv.derived and kv.bytes_per_token_limits is not None:
        low, high = kv.bytes_per_token_limits
        yield text(
            "bytes per token: {low:,} to {high:,} by the rounding of the log", low=low, high=high
        )
        if kv.bytes_per_token is not None:
            only = int(kv.bytes_per_token)
            yield text("{value:,} is the only multiple of 64 among them", value=only)
    if kv.override_blocks is not None or is_overridden_by_an_unknown(kv):
        given = "" if kv.override_blocks is None else f" {kv.override_blocks}"
        parts = [
            text("--num-gpu-blocks-override{given} replaced the number of blocks", given=given)
        ]
        if kv.fitting_blocks is not None:
            parts.append(text("{fitting_blocks:,} blocks fit the budget", kv))
        yield join("; ", parts)
    yield from failed(kv.checks)
    passed, count = sum(check.ok is True for check in kv.checks), len(kv.checks)
    unknown = join("; ", [check.name for check in kv.checks if check.ok is None])
    if passed:
        yield join(
            "; ",
            (
                text("✓ {passed} of {count} cross-checks hold", passed=passed, count=count),
                bool(unknown) and text("unknown: {names}", names=unknown),
            ),
        )
