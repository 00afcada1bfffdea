"""Weights: a rank's share of the checkpoint and what it holds, by class of tensor."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_memprof.accounting.model import RankReport, WeightRow
from vllm_memprof.accounting.titles import TITLES
from vllm_memprof.document import MUTED, PLAIN, TOTAL, Row, Section
from vllm_memprof.report.sections.base import Sheet, draw
from vllm_memprof.tables import GIB4, bar_of, signed
from vllm_memprof.text import text
from vllm_memprof.units import minus

_CELLS = 16  # of the longest bar


def weights(sheet: Sheet, rank: RankReport) -> Iterator[Section]:
    """Return the weights by class and dtype; the rows add up to the engine's figure."""
    held = rank.weights
    if held is None or not held.rows:
        return
    longest = max(row["loaded_bytes"] for row in held.rows) or 1

    def of(row: WeightRow) -> list[str]:
        size = row["loaded_bytes"]
        return [
            TITLES["weights"][row["class"]],
            row["dtype"],
            GIB4(row["expected_bytes"]),
            GIB4(size),
            signed(row["difference_bytes"]),
            row["why"],
            *[bar_of(max(size, 0) / longest, _CELLS)] * sheet.wide,
        ]

    total = [text("weights (engine)"), "", GIB4(held.expected_bytes), GIB4(held.engine_bytes)]
    over = minus(held.engine_bytes, held.expected_bytes)
    rows = [Row(of(row), style=PLAIN if row["dtype"] else MUTED) for row in held.rows]
    rows.append(Row([*total, signed(over), "", *[""] * sheet.wide], style=TOTAL, mark="="))
    figures = {
        **vars(held),
        str(held.source or "unknown"): True,
        "fixed": held.expandable is False,
    }
    yield draw(sheet, "weights", rows, figures)
