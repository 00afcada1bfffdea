"""The conditions of a fit: ``--want`` and ``--headroom`` parsed, and a row checked. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from vllm_memprof.errors import UsageError
from vllm_memprof.plans.rows import PlanRow
from vllm_memprof.units import format_bytes, format_gib, parse_size

HINT = (
    "tokens=500000 (KV cache), concurrency=8@32768 (8 requests of 32768 tokens at once), "
    "concurrency=8 (of --max-model-len), kv-cache=40GiB"
)
#: The engine's own advice where the KV cache has no room.
_MORE_ROOM = re.compile(
    r"incr\w+ .?gpu[_-]memory[_-]utilization|No available memory for the cache|"
    r"larger than the available KV cache memory",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"[0-9][0-9_,]*")


@dataclass(frozen=True)
class Want:
    """One condition that a plan has to meet."""

    kind: str  # tokens | concurrency | kv-cache | headroom
    least: int  # tokens, requests or bytes
    length: int | None = None  # concurrency: tokens of a request; None: of max_model_len

    @property
    def text(self) -> str:
        if self.kind == "tokens":
            return f"KV tokens >= {self.least:,}"
        if self.kind == "concurrency":
            return f"concurrency >= {self.least:,} at {_length(self.length)}"
        name = "KV cache" if self.kind == "kv-cache" else "headroom"
        return f"{name} >= {format_gib(self.least, _digits(self.least))} GiB"


@dataclass(frozen=True)
class Miss:
    """A condition that a plan does not meet."""

    text: str
    kind: str  # of the want; length: of requests; plan: it failed; room: none for a KV cache


def parse_wants(texts: list[str], headroom: str | None) -> list[Want]:
    """Parse ``--want``, as often as given, and ``--headroom``, which is at least 0.

    Raises:
        UsageError: a want that is none, or the same one twice.
    """
    wants = [_parse(text) for text in texts]
    for i, want in enumerate(wants):
        if any((other.kind, other.length) == (want.kind, want.length) for other in wants[:i]):
            raise UsageError(f"--want {want.kind} is given twice")
    size = 0
    if headroom is not None:
        try:
            size = parse_size(headroom)
        except ValueError as error:
            raise UsageError(f"--headroom: {error}", hint="e.g. --headroom 2GiB") from error
    return [*wants, Want("headroom", size)]


def _parse(text: str) -> Want:
    kind, equals, value = text.partition("=")
    kind = kind.strip().lower().replace("_", "-")
    if not equals or kind not in ("tokens", "concurrency", "kv-cache"):
        raise UsageError(f"--want {text!r} is not known", hint=HINT)
    if kind == "kv-cache":
        try:
            size = parse_size(value)
        except ValueError as error:
            raise UsageError(
                f"--want {text}: {error}", hint="e.g. --want kv-cache=40GiB"
            ) from error
        return Want(kind, _positive(size, text))
    if kind == "tokens":
        return Want(kind, _integer(value, text))
    number, at, length = value.partition("@")
    return Want(kind, _integer(number, text), _integer(length, text) if at else None)


def _integer(text: str, whole: str) -> int:
    if not _NUMBER.fullmatch(text.strip()):
        raise UsageError(f"--want {whole!r}: {text.strip()!r} is not a whole number", hint=HINT)
    return _positive(int(text.strip().replace(",", "").replace("_", "")), whole)


def _positive(number: int, whole: str) -> int:
    if number < 1:
        raise UsageError(f"--want {whole!r}: it must be at least 1", hint=HINT)
    return number


def lengths(wants: list[Want]) -> tuple[int, ...]:
    """Return the tokens of requests for which a plan's concurrency is needed."""
    return tuple(want.length for want in wants if want.length is not None)


def misses(row: PlanRow, wants: list[Want]) -> list[Miss]:
    """Return the conditions that a plan does not meet; an unknown figure meets none."""
    if not row.ok:
        reason = row.reason or row.status
        return [Miss(reason, "room" if _MORE_ROOM.search(reason) else "plan")]
    return [miss for want in wants if (miss := _miss(row, want)) is not None]


def _miss(row: PlanRow, want: Want) -> Miss | None:
    if want.kind == "tokens":
        return _short("KV tokens", row.tokens, want)
    if want.kind == "kv-cache":
        return _short("KV cache", row.kv_cache_bytes, want)
    if want.kind == "headroom":
        return _short("headroom", row.spare_bytes, want)
    if (
        want.length is not None
        and row.max_model_len is not None
        and want.length > row.max_model_len
    ):
        return Miss(
            f"requests of {want.length:,} tokens are above --max-model-len {row.max_model_len:,}",
            "length",
        )
    found = row.max_concurrency if want.length is None else row.concurrency_at.get(want.length)
    if found is None:
        return Miss(f"concurrency at {_length(want.length)} is not known", want.kind)
    if found >= want.least:
        return None
    return Miss(f"concurrency {found:,.2f} < {want.least:,}", want.kind)


def _short(name: str, found: int | None, want: Want) -> Miss | None:
    if found is None:
        return Miss(f"{name} not known", want.kind)
    if found >= want.least:
        return None
    if want.kind == "tokens":
        return Miss(f"{name} {format_bytes(found)} < {want.least:,}", want.kind)
    digits = max(_digits(want.least), 2)
    shown, limit = format_gib(found, digits), format_gib(want.least, digits)
    if shown == limit:
        return Miss(f"{name} {format_bytes(found)} < {want.least:,} bytes", want.kind)
    return Miss(f"{name} {shown} < {limit} GiB", want.kind)


def _digits(size: int) -> int:
    return next(
        (digits for digits in range(5) if float(f"{size / 2**30:.{digits}f}") * 2**30 == size), 4
    )


def _length(length: int | None) -> str:
    return "max_model_len" if length is None else f"{length:,} tokens"
