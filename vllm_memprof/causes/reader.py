"""Lines of a log become the failures that they tell of, the first of each start of an engine.

``CauseReader`` takes the lines once, in order, secrets replaced, and keeps those that may matter.
``named`` then walks the book.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from functools import cache

from vllm_memprof.causes.book import BOOK
from vllm_memprof.causes.cures import SGLANG, TORCH, TORCH_NPU, VLLM
from vllm_memprof.causes.rows import LINES_AFTER, LINES_BEFORE, SERVING, SYMPTOM, WRAPPER, Row
from vllm_memprof.record.cause import KINDS, EvidenceLine, NamedFailure
from vllm_memprof.text import text

#: A line that tells of a failure contains one of these, or stands near one that does.
SIGNALS = ("rror", "RROR", "ailed", "illed", "xception")
_MORE = (
    *("ut of memory", "ssert", "exhaust", "nsufficient", "overlap", "leaked", "imeout", "time out"),
    *("time is out", " enough", "refused", "Cannot", "cannot", "fault", "dumped", "not found"),
    *(" fail", "Fail", "E39999", "EZ", "EI0", "EL0", "EE9", "denied", "nvalid", "abort", "Abort"),
    *("NPUWorkspaceAllocator", "No space", "nsupported", "nexpected", "timed out"),
    "MoeInitRouting",
)
#: Lines that say what the engine was doing: kept for ``beside``.
_CONTEXT = (
    *("Available", "KV Cache", "KV cache", "KV pool", "max_local_cpu_size", "apturing", "apture "),
    *("Sleep mode", "wake_up", "wake up", "eight", "Starting to load", "multi-modal", "LMCache"),
    *("prompt_logprobs", ", in ", "num-scheduler-steps", "Tried to allocate", "argument"),
)
_READY = ("startup complete", "fired up and ready to roll", "Starting vLLM API server on http")
_BEGIN = ("Initializing a V", "Initializing an LLM engine", "vLLM API server version")
#: A process of the engine says that it is over.
_FATAL = re.compile(
    r"Engine core initialization failed|EngineCore (?:failed|encountered)|EngineDeadError"
    r"|WorkerProc (?:hit an exception|failed|initialization failed)|Scheduler hit an exception"
    r"|Received sigquit from a child|engine process failed to start|is already dead"
    r"|terminate called after|Engine process \(pid \d+\) died"
    r"|core dumped|Segmentation fault|died unexpectedly"
)
_QUIET = re.compile(
    r"^.{0,120}?(?:(?<![=\w])(?:INFO|DEBUG|WARNING)\b[ :\]]"
    r"|\[W\d{3,6}[ \]]|\b[\w.]*Warning: |^[IW]\d{4} )"
)
_ERROR_LEVEL = re.compile(r"^.{0,120}?\b(?:ERROR|CRITICAL|FATAL)\b")
_EXCEPTION = re.compile(
    r"(?:^|[\s\]:'\"(>|])(?P<said>(?!Engine(?:Dead|Core)|(?:[\w.]*\.)?EngineDead|Warning)"
    r"(?:\w+\.)*\w*(?:Error|Exception)\b(?::|\().{0,600})"
)
#: What follows from an error that stands before it.
_CONSEQUENCE = re.compile(
    r"EngineDeadError|Engine core initialization failed|See root cause above|cancelled|Cancelled"
    r"|Engine process failed to start|WorkerProc initialization failed|KeyboardInterrupt|BrokenPipe"
    r"|Connection closed by peer|HTTPException|ClientDisconnect|error_code|JSONDecodeError"
)
_ENGINES = (
    (SGLANG, re.compile(r"sglang|mem-fraction-static|Scheduler hit an exception|sgl_kernel")),
    (VLLM, re.compile(r"vllm|EngineCore|VllmWorker|Worker_TP|gpu_memory_utilization")),
    (TORCH_NPU, re.compile(r"NPU|npu|Ascend|ascend|\bacl[rn]|\bE[ILZEHJ]\d{4}\b|HCCL|Hccl|CANN")),
    (TORCH, re.compile(r"CUDA|cuda|NCCL|cuBLAS|CUBLAS|nvidia|NVIDIA|Triton")),
)
_DIGITS = str.maketrans("", "", "0123456789abcdef")

#: Lines that are kept of one start, characters of a line, lines kept after one with a signal.
_MOST_LINES, _MOST_CHARACTERS, _AFTER = 4000, 2000, 12
#: A match further down than this many lines is about something else.
_SAME_FAILURE = 400


@dataclass
class _Kept:
    """The lines of one start that may matter."""

    lines: list[tuple[int, str, bool]] = field(default_factory=list)  # number, text, quiet
    seen: set[str] = field(default_factory=set)
    ready: int | None = None  # line at which the server was up


class CauseReader:
    """Keeps what may tell of a failure; ``finish`` returns the failures."""

    def __init__(self) -> None:
        self._starts = [_Kept()]
        self._after = 0
        self._before: list[tuple[int, str]] = []

    def add(self, number: int, line: str) -> None:
        """Take the next line; its number counts from 1, its secrets are replaced."""
        kept = self._starts[-1]
        if any(words in line for words in _BEGIN) and (kept.ready is not None or self._failed()):
            self._starts.append(_Kept())
            kept = self._starts[-1]
            del self._starts[:-50]
        if kept.ready is None and any(words in line for words in _READY):
            kept.ready = number
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
        found = (_first_cause(kept) for kept in self._starts if kept.lines)
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


def _first_cause(kept: _Kept) -> tuple[int, NamedFailure] | None:
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
        match = _match(row, order, whole if row.quiet else loud, whole, kept.ready)
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
    return best.number, _named(best, whole)


def _is_memory(row: Row) -> bool:
    return KINDS[row.kind] if row.memory is None else row.memory


def _match(row: Row, order: int, page: _Page, whole: _Page, ready: int | None) -> _Match | None:
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
            if ready is not None and number > ready:
                said = f"{SERVING}\n{said}"
            if row.unless and _compiled(row.unless).search(said):
                continue
            if row.beside:
                if not _compiled(row.beside).search(said):
                    continue
                hits = (at for at, line, _ in near if _compiled(row.beside).search(line))
                beside = next(hits, None)
        return _Match(row, order, number, groups, beside)
    return None


def _named(match: _Match, whole: _Page) -> NamedFailure:
    row = match.row
    numbers = sorted({match.number, match.beside or match.number})
    spoken = [name for name, pattern in _ENGINES if pattern.search(whole.text)]
    engines = [name for name in spoken if name in (VLLM, SGLANG)][:1]
    platforms = [name for name in spoken if name in (TORCH, TORCH_NPU)]
    cures = []
    for cure in row.cures:
        asked = engines if cure.engine in (VLLM, SGLANG) else platforms
        if cure.engine is not None and asked and cure.engine not in asked:
            continue
        name = cure.argument or cure.environment or ""
        computed = (row.values or {}).get(name)
        value = computed(match.groups) if computed is not None else ""
        cures.append(replace(cure, value=value, enough="computed") if value else cure)
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
