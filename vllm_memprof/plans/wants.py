"""The conditions of a fit: ``--want`` and ``--headroom`` parsed, and a row checked. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from vllm_memprof.errors import UsageError
from vllm_memprof.plans.rows import READY, PlanRow
from vllm_memprof.text import text
from vllm_memprof.units import format_gib, parse_size

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
#: The engine's words where a batch of ``--max-num-batched-tokens`` is too small for the rest.
#: (vllm 0.23.0, vllm/config/scheduler.py::SchedulerConfig.verify_max_model_len;
#: vllm/v1/core/encoder_cache_manager.py::compute_mm_encoder_budget)
_TOO_SMALL = re.compile(
    r"increase max_num_batched_tokens|"
    r"max_num_batched_tokens \(\d+\) must be greater than or equal to max_num_seqs",
    re.IGNORECASE,
)
#: What no value changes: an option that the engine's parser does not know, or that takes another
#: number of values; ranks that cannot be run. A value that it refuses is none of these.
#: (vllm_memprof/engines/vllm/kv_plan_run.py::run)
_REFUSED = re.compile(
    r"^(memprof plan: error: )?--until ready|unrecognized arguments|ambiguous option|"
    r"expected (one|at least one|0|\d+) argument|ignored explicit argument",
    re.IGNORECASE,
)
#: Before the reason of a run that failed: which process ended how. (launch.verdict)
_EXIT = re.compile(
    r"^the engine exited with status -?\d+( \([^()]*\)| before any worker reported)[:\s]+"
)
_NUMBER = re.compile(r"[0-9][0-9_,]*")


@dataclass(frozen=True)
class Want:
    """One condition that a plan has to meet."""

    kind: str  # tokens | concurrency | kv-cache | headroom
    least: int  # tokens, requests or bytes
    length: int | None = None  # concurrency: tokens of a request; None: of max_model_len

    def found(self, row: PlanRow) -> float | None:
        """Return what a plan has of it; None: not known."""
        if self.kind == "concurrency":
            if self.length is None:
                return row.max_concurrency
            return row.concurrency_at.get(self.length)
        sizes = {"kv-cache": row.kv_cache_bytes, "headroom": row.headroom_bytes}
        return sizes.get(self.kind, row.tokens)

    @property
    def text(self) -> str:
        if self.kind == "tokens":
            return text("KV tokens >= {least:,}", least=self.least)
        if self.kind == "concurrency":
            return text("concurrency >= {least:,} at {length}", least=self.least,
                       length=_length(self.length))  # fmt: skip
        size = format_gib(self.least, _digits(self.least))
        if self.kind == "kv-cache":
            return text("KV cache >= {size} GiB", size=size)
        return text("headroom >= {size} GiB", size=size)


@dataclass(frozen=True)
class Miss:
    """A condition that a plan does not meet."""

    text: str
    #: Of the want; length: of requests; plan: it failed; room: none for a KV cache; small: of a
    #: batch; refused: no value would do.
    kind: str
    short_bytes: int | None = None  # None: not a matter of bytes, or not known


#: What the engine says of a plan that failed -> the kind of the miss; the first match counts.
_KINDS = ((_MORE_ROOM, "room"), (_TOO_SMALL, "small"), (_REFUSED, "refused"))


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
    wants = [_parse(text) for text in texts]
    for i, want in enumerate(wants):
        if any((other.kind, other.length) == (want.kind, want.length) for other in wants[:i]):
            raise UsageError(f"--want {want.kind} is given twice")
    if headroom is not None:
        wants.append(Want("headroom", size_option("--headroom", headroom)))
    elif until != READY:
        wants.append(Want("headroom", 0))
    return wants


def size_option(option: str, typed: str) -> int:
    """Return the bytes that an option was given.

    Raises:
        UsageError: it is no size.
    """
    try:
        return parse_size(typed)
    except ValueError as error:
        raise UsageError(
            f"{option}: {error}", hint=f"e.g. {option.partition('=')[0]} 2GiB"
        ) from error


def _parse(text: str) -> Want:
    kind, equals, value = text.partition("=")
    kind = kind.strip().lower().replace("_", "-")
    if not equals or kind not in ("tokens", "concurrency", "kv-cache"):
        raise UsageError(f"--want {text!r} is not known", hint=HINT)
    number, at, length = value.partition("@" if kind == "concurrency" else "\0")
    if kind == "kv-cache":
        numbers = [size_option(f"--want {text}", value)]
    else:
        numbers = []
        for part in (number, length) if at else (number,):
            if not _NUMBER.fullmatch(part.strip()):
                raise UsageError(
                    f"--want {text!r}: {part.strip()!r} is not a whole number", hint=HINT
                )
            numbers.append(int(part.replace(",", "")))  # int() reads "_" itself
    if min(numbers) < 1:
        raise UsageError(f"--want {text!r}: it must be at least 1", hint=HINT)
    return Want(kind, *numbers)


def lengths(wants: list[Want]) -> tuple[int, ...]:
    """Return the tokens of requests for which a plan's concurrency is needed."""
    return tuple(want.length for want in wants if want.length is not None)


def misses(row: PlanRow, wants: list[Want]) -> list[Miss]:
    """Return the conditions that a plan does not meet; an unknown figure meets none."""
    if not row.ok:
        reason = _EXIT.sub("", row.reason or row.status)
        kind = next((kind for words, kind in _KINDS if words.search(reason)), "plan")
        return [Miss(reason, kind)]
    return [miss for want in wants if (miss := _miss(row, want)) is not None]


def _miss(row: PlanRow, want: Want) -> Miss | None:
    found, least, longest = want.found(row), want.least, row.max_model_len
    if want.length is not None and longest is not None and want.length > longest:
        above = text(
            "requests of {length:,} tokens are above --max-model-len {limit:,}",
            length=want.length,
            limit=longest,
        )
        return Miss(above, "length")
    if found is not None and found >= least:
        return None
    missing = None
    if want.kind == "tokens":
        if found is None:
            said = text("KV tokens not known")
        else:
            said = text("KV tokens {found:,} < {least:,}", found=found, least=least)
    elif want.kind == "concurrency":
        if found is None:
            said = text("concurrency at {length} is not known", length=_length(want.length))
        else:
            said = text("concurrency {found:,.2f} < {least:,}", found=found, least=least)
    else:
        name = text("headroom") if want.kind == "headroom" else text("KV cache")
        digits = max(_digits(least), 2)
        shown, limit = format_gib(found, digits), format_gib(least, digits)
        missing = None if found is None else least - int(found)
        if found is None:
            said = text("{name} not known", name=name)
        elif shown == limit:
            said = text("{name} {found:bytes} < {least:bytes} bytes", name=name, found=found,
                       least=least)  # fmt: skip
        else:
            said = text("{name} {found} < {least} GiB", name=name, found=shown, least=limit)
    return Miss(said, want.kind, missing)


def _digits(size: int) -> int:
    return next(
        (digits for digits in range(5) if float(f"{size / 2**30:.{digits}f}") * 2**30 == size), 4
    )


def _length(length: int | None) -> str:
    return "max_model_len" if length is None else text("{tokens:,} tokens", tokens=length)
