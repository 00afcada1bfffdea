"""A finding of the toy engine alone."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_memprof.accounting.findings.needs import NOTHING
from vllm_memprof.accounting.findings.registry import INFO, Found, RankContext, finding
from vllm_memprof.text import text


@finding("toy-share-small", severity=INFO, title=text("Half of the device is not asked for"),
         needs=NOTHING, priced=False)  # fmt: skip
def toy_share_small(context: RankContext) -> Iterator[Found]:
    """Find starts that leave half of the free memory or more."""
    share = context.rank.figures.get("toy_share")
    if share is not None and share <= 0.5:
        yield Found(text("share {share}", share=share), action=text("raise --toy-share"))


FINDINGS = (toy_share_small,)
