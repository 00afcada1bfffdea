"""The conditions of a fit: ``--want`` and ``--headroom`` parsed, and a row checked. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from vllm_memprof.errors import UsageError
from vllm_memprof.plans.model import READY, TABLES, Miss, PlanRow
from vllm_memprof.text import text
from vllm_memprof.units import format_gib, only_known, parse_size

HINT = (
    "tokens=500000 (KV cache), concurrency=8@32768 (8 requests of 32768 tokens at once), "
    "concurrency=8 (of --max-model-len), kv-cache=40GiB"
)
#: Before the reason of a run that failed: which process ended how. (launch.verdict)
_EXIT = re.compile(
    r"^the engine exited with status -?\d+( \([^()]*\)| before any worker reported)[:\s]+"
)
_NUMBER = r"[1-9](?:[,_]?\d)*"
_WANT = re.compile(
    rf"tokens=(?P<tokens>{_NUMBER})|"
    rf"concurrency=(?P<concurrency>{_NUMBER})(?:@(?P<length>{_NUMBER}))?|kv[-_]cache=(?P<size>.+)"
)
#: Kind -> its words, and the figure of a row.
_KINDS = {
    "tokens": (text("KV tokens"), "tokens"),
    "concurrency": (text("concurrency at max_model_len"), "max_concurrency"),
    "kv-cache": (text("KV cache"), "kv_cache_bytes"),
    "headroom": (text("headroom"), "headroom_bytes"),
}


@dataclass(frozen=True)
class Want:
    """One condition that a plan has to meet."""

    kind: str  # of _KINDS
    least: int  # tokens, requests or bytes
    length: int | None = None  # concurrency: tokens of a request; None: of max_model_len

    @property
    def name(self) -> str:
        if self.length is None:
            return _KINDS[self.kind][0]
        return text("concurrency at {length:,} tokens", length=self.length)

    @property
    def text(self) -> str:
        return text("{name} >= {least}", name=self.name, least=self.shown(self.least))

    @property
    def of_bytes(self) -> bool:
        return _KINDS[self.kind][1].endswith("_bytes")

    def shown(self, figure: float) -> str:
        """Return a figure of its kind in its unit."""
        return f"{format_gib(figure, 4)} GiB" if self.of_bytes else f"{round(figure, 2):,}"

    def found(self, row: PlanRow) -> float | None:
        """Return what a plan has of it; None: not known."""
        if self.length is not None:
            return row.concurrency_at.get(self.length)
        found: float | None = getattr(row, _KINDS[self.kind][1])
        return found

    def misses(self, row: PlanRow) -> list[Miss]:
        """Return why a plan does not meet it; an unknown figure does not."""
        found, longest = self.found(row), row.max_model_len
        if self.length is not None and longest is not None and self.length > longest:
            above = text(
                "requests of {length:,} tokens are above --max-model-len {limit:,}",
                length=self.length,
                limit=longest,
            )
            return [Miss(above, "length")]
        if found is None:
            return [Miss(text("{name}: not known", name=self.name), self.kind)]
        if found >= self.least:
            return []
        sizes = {"found": self.shown(found), "least": self.shown(self.least)}
        said = text("{name} {found} < {least}", name=self.name, **sizes)
        return [Miss(said, self.kind, int(self.least - found) if self.of_bytes else None)]


def parse_wants(texts: list[str], headroom: str | None, until: str | None = None) -> list[Want]:
    """Parse ``--want``, as often as given, and ``--headroom``.

    Without ``--headroom`` a plan that stops at its KV plan must leave at least 0: what it holds
    beside must fit the device. One that goes on until the engine is ready has shown it.

    Args:
        texts: of ``--want``.
        headroom: of ``--headroom``.
        until: where the plans stop.

    Raises:
        UsageError: a want that is none, or the same one twice.
    """
    wants: list[Want] = []
    for typed in texts:
        match = _WANT.fullmatch(typed.strip())
        if match is None:
            raise UsageError(f"--want {typed!r} is not known", HINT)
        if match["size"] is not None:
            wants.append(Want("kv-cache", size_option("--want kv-cache", match["size"])))
            continue
        kind, length = "tokens" if match["tokens"] else "concurrency", match["length"]
        tokens = None if length is None else parse_size(length)
        wants.append(Want(kind, parse_size(match[kind]), tokens))
    if len({want.name for want in wants}) < len(wants):
        raise UsageError(f"--want: a condition is given twice: {', '.join(texts)}")
    if headroom is not None or until != READY:
        wants.append(Want("headroom", size_option("--headroom", headroom or "0")))
    return wants


def size_option(option: str, typed: str) -> int:
    """Return the bytes that an option was given.

    Raises:
        UsageError: it is no size.
    """
    try:
        return parse_size(typed)
    except ValueError as error:
        raise UsageError(f"{option}: {error}", f"e.g. {option} 2GiB") from error


def lengths(wants: list[Want]) -> tuple[int, ...]:
    """Return the tokens of requests for which a plan's concurrency is needed."""
    return tuple(only_known(want.length for want in wants))


def misses(row: PlanRow, wants: list[Want]) -> list[Miss]:
    """Return the conditions that a plan does not meet."""
    if row.ok:
        return [miss for want in wants for miss in want.misses(row)]
    reason = _EXIT.sub("", row.reason or row.status)
    kinds = (
        kind
        for kind, words in TABLES["failures"].items()
        if re.search(words, reason, re.IGNORECASE)
    )
    return [Miss(reason, next(kinds, "plan"))]
