"""The finding of the audit: a figure of the engine is not what memprof read."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_memprof.accounting.audit import audit_title
from vllm_memprof.accounting.findings.needs import AUDITED
from vllm_memprof.accounting.findings.registry import WARNING, Found, RankContext, finding
from vllm_memprof.text import join, text


@finding(
    "engine-term-off",
    severity=WARNING,
    title=text("A figure of the engine is not what memprof read of the same memory"),
    needs=AUDITED,
)
def engine_term_off(context: RankContext) -> Iterator[Found]:
    """Find figures of the engine that memprof's own readings contradict.

    Meaning:
        The engine sizes its KV cache by figures that it reads itself. memprof reads the same
        memory at its own phase edges. A difference beyond what can lie between both moments means
        that the KV cache is too large or too small by as much, although the equation, recomputed
        from the engine's figures, is equal.

    Computed:
        The engine's figure less memprof's reading, beyond the tolerance of the row
        (`vllm_memprof/accounting/audit.py::audit`). The bytes are those of the KV cache: granted
        less what the equation gives with memprof's readings; where that is within its tolerance,
        the largest difference of a figure.

    To do:
        Look at the edges that the audit names. Where another process took or released memory
        meanwhile, start again without it. Otherwise report it to the engine, with the run folder.
    """
    off = [row for row in context.rank.budget.audit if row.agrees is False]
    if not off:
        return
    parts = [
        text(
            "{term}: engine {engine:gib4} GiB, read {own:gib4} GiB ({difference:bytes} bytes; "
            "{source})",
            term=audit_title(row),
            engine=row.engine_bytes,
            own=row.own_bytes,
            difference=row.difference_bytes,
            source=row.source,
        )
        for row in off
    ]
    of_kv_cache = [row for row in off if row.term == "kv_cache"]
    worst = max(of_kv_cache or off, key=lambda row: abs(row.difference_bytes or 0))
    yield Found(join("; ", parts), worst.difference_bytes)
