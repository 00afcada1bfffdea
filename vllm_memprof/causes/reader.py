"""Lines of a log become the failures that they tell of, the first of each start of an engine.

``CauseReader`` takes the lines once, in order, secrets replaced, and keeps those that may matter.
``named`` then walks the book.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from vllm_memprof.causes.book import BOOK
from vllm_memprof.causes.cures import SGLANG, TORCH, TORCH_NPU, VLLM
from vllm_memprof.causes.rows import (
    AFTER_ANOTHER,
    LINES_AFTER,
    LINES_BEFORE,
    SERVING,
    SYMPTOM,
    WRAPPER,
    Row,
)
from vllm_memprof.record.cause import KINDS, Cure, EvidenceLine, NamedFailure
from vllm_memprof.text import text

#: A line that tells of a failure contains one of these, or stands near one that does.
SIGNALS = ("rror", "RROR", "ailed", "illed", "xception")
_MORE = (
    *("ut of memory", "ssert", "exhaust", "nsufficient", "overlap", "leaked", "imeout", "time out"),
    *("time is out", " enough", "refused", "Cannot", "cannot", "fault", "dumped", "not found"),
    *(" fail", "Fail", "E39999", "EZ", "EI0", "EL0", "EE9", "denied", "nvalid", "abort", "Abort"),
    *(
        "NPUWorkspaceAllocator",
        "No space",
        "atchdog",
        "disappeared",
        "SIGKILL",
        "profiled value",
        "nsupported",
        "nexpected",
        "timed out",
    ),
    "MoeInitRouting",
)
#: Lines that say what the engine was doing: kept for ``beside``.
_CONTEXT = (
    *(
        "No running processes",
        "Available",
        "KV Cache",
        "KV cache",
        "KV pool",
        "max_local_cpu_size",
        "apturing",
        "apture ",
    ),
    *("Sleep mode", "wake_up", "wake up", "eight", "Starting to load", "multi-modal", "LMCache"),
    *("prompt_logprobs", ", in ", "num-scheduler-steps", "Tried to allocate", "argument"),
)
#: A process of the engine says that it is over.
_FATAL = re.compile(
    r"Engine core initialization failed|EngineCore (?:failed|encountered)|EngineDeadError"
    r"|WorkerProc (?:hit an exception|failed|initialization failed)|Scheduler hit an exception"
    r"|Received sigquit from a child|[Ee]ngine process failed to start|is already dead"
    r"|terminate called after|Engine process \(pid \d+\) died"
    r"|core dumped|Segmentation fault|died unexpectedly"
)
_QUIET = re.compile(
    r"^.{0,120}?(?:(?<![=\w])(?:INFO|DEBUG|WARNING)\b[ :\]]"
    r"|\[W\d{3,6}[ \]]|\b[\w.]*Warning: |^[IW]\d{4} )"
)
_ERROR_LEVEL = re.compile(r"^.{0,120}?\b(?:ERROR|CRITICAL|FATAL)\b")
_EXCEPTION = re.compile(
    r"(?:^|[\s\]:'\"(>|])(?<!raise )(?P<said>(?!Engine(?:Dead|Core)|(?:[\w.]*\.)?EngineDead"
    r"|Warning)(?:\w+\.)*\w*(?:Error|Exception)\b(?::|\().{0,600})"
)
#: What follows from an error that stands before it.
_CONSEQUENCE = re.compile(
    r"EngineDeadError|Engine core initialization failed|See root cause above|cancelled|Cancelled"
    r"|Engine process failed to start|WorkerProc initialization failed|KeyboardInterrupt|BrokenPipe"
    r"|Connection closed by peer|HTTPException|ClientDisconnect|error_code|JSONDecodeError"
)
_DIGITS = str.maketrans("", "", "0123456789abcdef")

#: Engines whose arguments cures name.
_TITLES = {VLLM: "vLLM", SGLANG: "SGLang"}

#: Lines that are kept of one start, characters of a line, lines kept after one with a signal.
_MOST_LINES, _MOST_CHARACTERS, _AFTER = 4000, 2000, 12
#: A match further down than this many lines is about something else.
_SAME_FAILURE = 400


@dataclass(frozen=True)
class Words:
    """What engines print, as their rows and the reader of logs know it."""

    begins: tuple[str, ...]  # in a line that begins a start
    ready: tuple[str, ...]  # in one of a server that is up
    ended: tuple[str, ...]  # in one of a server that ends as it was told to
    #: What serves, or what is below it, as ``Cure.engine`` names it -> what it alone prints.
    speakers: Mapping[str, re.Pattern[str]]


@dataclass
class _Kept:
    """The lines of one start that may matter."""

    lines: list[tuple[int, str, bool]] = field(default_factory=list)  # number, text, quiet
    seen: set[str] = field(default_factory=set)
    ready: int | None = None  # line at which the server was up
    ended: bool = False  # it said so
    after_another: bool = False  # that did not say so


class CauseReader:
    """Keeps what may tell of a failure; ``finish`` returns the failures."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self._starts = [_Kept()]
        self._after = 0
        self._before: list[tuple[int, str]] = []

    def add(self, number: int, line: str) -> None:
        """Take the next line; its number counts from 1, its secrets are replaced."""
        kept = self._starts[-1]
        if any(words in line for words in self._words.begins) and (
            kept.ready is not None or self._failed()
        ):
            kept = _Kept(after_another=not kept.ended)
            self._starts.append(kept)
            del self._starts[:-50]
        if kept.ready is None and any(words in line for words in self._words.ready):
            kept.ready = number
        kept.ended |= any(words in line for words in self._words.ended)
        signal = any(words in line for words in SIGNALS) or any(words in line for words in _MORE)
        if signal:
            for each in self._before:
                self._keep(kept, *each)
            self._before.clear()
            self._after = _AFTER
        if signal or self._after > 0 or any(words in line for words in _CONTEXT):
            self._after -= 1
            self._keep(kept, number, line)
        else:
            self._before.append((number, line))
            del self._before[:-3]

    def _failed(self) -> bool:
        return any(_FATAL.search(line) for _, line, _ in self._starts[-1].lines)

    @staticmethod
    def _keep(kept: _Kept, number: int, line: str) -> None:
        line = line.rstrip()[:_MOST_CHARACTERS]
        key = line.translate(_DIGITS)
        if len(kept.lines) >= _MOST_LINES or (key in kept.seen and len(kept.lines) > 500):
            return
        kept.seen.add(key)
        quiet = _QUIET.match(line) is not None and _ERROR_LEVEL.match(line) is None
        kept.lines.append((number, line, quiet))

    def finish(self) -> list[tuple[int, NamedFailure]]:
        """Return (line, failure) of each start that failed, in their order."""
        found = (_first_cause(kept, self._words) for kept in self._starts if kept.lines)
        return [each for each in found if each is not None]


class _Page:
    """Lines as one text, so that a pattern may cross their ends; positions back to lines."""

    def __init__(self, lines: list[tuple[int, str, bool]]) -> None:
        self.lines = lines
        self.begins: list[int] = []
        at = 0
        for _, line, _ in lines:
            self.begins.append(at)
            at += len(line) + 1
        self.text = "\n".join(line for _, line, _ in lines)

    def index(self, at: int) -> int:
        return bisect_right(self.begins, at) - 1

    def around(self, number: int) -> list[tuple[int, str, bool]]:
        """Return the lines near the one of that number."""
        index = bisect_right(self.lines, number, key=lambda line: line[0]) - 1
        return self.lines[max(0, index - LINES_BEFORE) : index + LINES_AFTER]


@dataclass(frozen=True)
class _Match:
    row: Row
    order: int
    number: int
    groups: dict[str, str | None]
    beside: int | None  # line of what stands beside it


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.MULTILINE)


def _first_cause(kept: _Kept, words: Words) -> tuple[int, NamedFailure] | None:
    loud = _Page([each for each in kept.lines if not each[2]])
    whole = _Page(kept.lines)
    over = [
        number
        for number, line, quiet in kept.lines
        if not quiet and _FATAL.search(line) is not None
    ]
    up = kept.ready or 0  # what came before was survived
    matches = []
    for order, row in enumerate(BOOK):
        match = _match(row, order, whole if row.quiet else loud, whole, kept)
        if match is None or (match.number < up and not any(at < up for at in over)):
            continue
        # a request may fail while the server goes on; that is no failure of the server
        if not up or match.number < up or _is_memory(row) or any(at >= up for at in over):
            matches.append(match)
    if not matches:
        return _unrecognised(kept, loud, over)
    grave = [each for each in matches if each.row.rank >= SYMPTOM] or matches
    first = min(each.number for each in grave)
    near = [each for each in grave if each.number <= first + _SAME_FAILURE]
    best = min(near, key=lambda each: (-each.row.rank, each.number, each.order))
    return best.number, _named(best, whole, words)


def _is_memory(row: Row) -> bool:
    return KINDS[row.kind] if row.memory is None else row.memory


def _match(row: Row, order: int, page: _Page, whole: _Page, kept: _Kept) -> _Match | None:
    """Return the first place at which a row holds."""
    for tried, match in enumerate(_compiled(row.pattern).finditer(page.text)):
        if tried >= 8:
            break
        groups = match.groupdict()
        if row.holds is not None and not row.holds(groups):
            continue
        number = page.lines[page.index(match.start())][0]
        beside = None
        if row.beside or row.unless:
            near = whole.around(number)
            said = "\n".join(line for _, line, _ in near)
            if kept.ready is not None and number > kept.ready:
                said = f"{SERVING}\n{said}"
            if kept.after_another:
                said = f"{AFTER_ANOTHER}\n{said}"
            if row.unless and _compiled(row.unless).search(said):
                continue
            if row.beside:
                if not _compiled(row.beside).search(said):
                    continue
                hits = (at for at, line, _ in near if _compiled(row.beside).search(line))
                beside = next(hits, None)
        return _Match(row, order, number, groups, beside)
    return None


def _named(match: _Match, whole: _Page, words: Words) -> NamedFailure:
    row = match.row
    numbers = sorted({match.number, match.beside or match.number})
    spoken = [name for name, own in words.speakers.items() if own.search(whole.text)]
    cures = []
    for cure in row.cures:
        if not _is_for(cure, spoken):
            continue
        name = cure.argument or cure.environment or ""
        computed = (row.values or {}).get(name)
        value = computed(match.groups) if computed is not None else ""
        if value:
            cure = replace(cure, value=value, enough="computed")
        if cure.engine in _TITLES and cure.engine not in spoken:
            cure = replace(
                cure, why=text("with {engine}: {why}", engine=_TITLES[cure.engine], why=cure.why)
            )
        cures.append(cure)
    return NamedFailure(
        kind=row.kind,
        is_memory=_is_memory(row),
        title=row.title,
        confidence="certain" if row.certain and row.rank != WRAPPER else "likely",
        evidence=[
            EvidenceLine(number, line.strip()[:400])
            for number, line, _ in whole.lines
            if number in numbers
        ][:3],
        cures=cures,
        source=row.source,
    )


def _is_for(cure: Cure, spoken: list[str]) -> bool:
    """Whether it is a cure of the engine that speaks, and of the platform below it.

    Where none of a group speaks, it is for each of them.
    """
    for group in ((SGLANG, VLLM), (TORCH_NPU, TORCH)):
        named = next((name for name in group if name in spoken), None)
        if named is not None and cure.engine in group:
            return cure.engine == named
    return True


def _unrecognised(kept: _Kept, loud: _Page, over: list[int]) -> tuple[int, NamedFailure] | None:
    """Return an error that no row names, where one was the end of a process or of a start."""
    if not over and kept.ready is not None:
        return None
    said = None
    for number, line, _ in loud.lines:
        found = _EXCEPTION.search(line)
        if found is not None and _CONSEQUENCE.search(line) is None:
            said = number, found["said"].strip()
            break
    if said is None and over:
        said = next((number, line) for number, line, _ in loud.lines if number == over[0])
    if said is None and kept.ready is None:
        errors = (each[:2] for each in loud.lines if _ERROR_LEVEL.match(each[1]) is not None)
        said = next(errors, None)
    if said is None:
        return None
    number, line = said
    shown = line.strip()[:300]
    failure = NamedFailure(
        kind="other",
        is_memory=False,
        title=text("failed: {error}; not recognised", error=shown),
        confidence="unrecognised",
        evidence=[EvidenceLine(number, shown)],
    )
    return number, failure
