"""A finding of the toy engine alone."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_memprof.accounting.findings.rules import Context, Found
from vllm_memprof.accounting.model import RankReport


def toy_share_small(rank: RankReport, run: Context) -> Iterator[Found]:
    """Find starts that leave half of the free memory or more."""
    share = rank.figures.get("toy_share")
    if share is not None and share <= 0.5:
        yield Found(None, {"share": share})
