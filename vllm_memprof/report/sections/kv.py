"""The KV cache: tokens, blocks, layers; what of it requests can hold, and the largest step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from vllm_memprof.accounting.budget.kv import is_overridden
from vllm_memprof.accounting.model import RankReport
from vllm_memprof.accounting.titles import TITLES
from vllm_memprof.document import MUTED, PLAIN, TOTAL, Row, Section
from vllm_memprof.report.sections.base import Sheet, draw, failed
from vllm_memprof.tables import COUNT, GIB4, Unit, number
from vllm_memprof.text import join, text

_FIRST = ("tokens", "max_concurrency")
#: How the figures of ``TITLES["kv"]`` are printed.
_UNITS: dict[str, Unit] = {
    "max_concurrency": partial(number, spec=".2f", suffix="x"),
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
    derived = kv.derived and (kv.blocks is not None or kv.bytes_per_token is not None)
    low, high = (kv.derived and kv.bytes_per_token_limits) or (None, None)
    figures = {
        **vars(kv),
        "follows": derived,
        "default_block_size": kv.derived and kv.default_block_size,
        "low": low,
        "high": high,
        "value": None if kv.bytes_per_token is None else int(kv.bytes_per_token),
        "replaced": is_overridden(kv),
        "passed": sum(check.ok is True for check in kv.checks) or None,
        "count": len(kv.checks),
        "unknown": join("; ", [check.name for check in kv.checks if check.ok is None]),
    }
    yield draw(sheet, "kv_cache", rows, figures, failed(kv.checks))
    if kv.groups:
        yield draw(sheet, "kv_layers", kv.groups)


def usable(sheet: Sheet, rank: RankReport) -> Iterator[Section]:
    """Return what was available, planned, allocated and is usable; the rules; the largest steps."""
    kv = rank.kv
    if kv.usable_tokens is not None:
        sizes = {
            text("available (engine)"): (kv.available_bytes, None),
            text("planned"): (kv.planned_bytes, kv.tokens),
            text("storages of the tensors"): (kv.storage_bytes, None),
            text("allocated"): (kv.allocated_bytes, None),
            text("usable"): (None, kv.usable_tokens),
            text("out of reach"): (kv.out_of_reach_bytes, kv.out_of_reach_tokens),
        }
        rows = [Row([title, GIB4(size), COUNT(tokens)]) for title, (size, tokens) in sizes.items()]
        yield draw(sheet, "kv_usable", rows, vars(kv))
        yield draw(
            sheet,
            "kv_limits",
            kv.limits,
            look=lambda each: TOTAL if each.title == kv.usable_why else PLAIN,
        )
    if kv.steps:
        yield draw(sheet, "kv_steps", kv.steps)
