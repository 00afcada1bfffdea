"""The first screen of a run, a plan or a log: the answer in at most ``MOST_LINES`` lines.

Reports enter, a compact document leaves. Whatever it leaves out is in the whole report (``--full``,
``--section``). Figures are those of the report; each block below returns none where it has nothing
to say.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from math import inf

from packaging.version import Version

from vllm_memprof.accounting.budget.equations import EQUATIONS, STARTUP_PLAN, divisor_of, form_of
from vllm_memprof.accounting.evidence import EVIDENCE
from vllm_memprof.accounting.findings.advice import MoreKvCache, more_kv_cache
from vllm_memprof.accounting.model import (
    AT_LEAST,
    AT_MOST,
    ESTIMATED,
    MODELLED,
    ItemPart,
    Oom,
    RankReport,
    Remedy,
    Report,
)
from vllm_memprof.accounting.owners.peak_owners import (
    FAILURE,
    FREE,
    HEADROOM,
    LAST_READING,
    OVER,
    SERVING_PEAK,
    DividedDevice,
    divided_device,
)
from vllm_memprof.accounting.readings.quantities import is_device_wide, title_of
from vllm_memprof.accounting.summary import engine_text
from vllm_memprof.accounting.titles import TITLES
from vllm_memprof.accuracy.spread import spread_of
from vllm_memprof.document import BAD, CODE, GOOD, MUTED, PLAIN, TOTAL, Document, Line, Row, Section
from vllm_memprof.record.cause import Cure
from vllm_memprof.report.documents.report import SOLE_WORKER
from vllm_memprof.report.sections.audit import audited
from vllm_memprof.report.sections.base import least_grant
from vllm_memprof.report.sections.deployment import gap_text, summary_of
from vllm_memprof.report.sections.findings import finding_views
from vllm_memprof.report.sections.oom import OWNER_TITLES
from vllm_memprof.report.sections.phases import Passage, passages_of
from vllm_memprof.report.sections.starts import starts_section
from vllm_memprof.tables import (
    UNKNOWN,
    Column,
    Look,
    fold,
    group_ranks,
    modelled,
    table,
)
from vllm_memprof.text import Text, join, text
from vllm_memprof.units import GIB, MIB, format_gib, format_size, one_line

#: Width of a line -> lines that a first screen has at most; the widest that fits counts.
MOST_LINES = {100: 45, 0: 55}
#: Less is left out.
_LEAST_BYTES = 10 * MIB
#: Rows of a block, at most.
_OWNERS, _STARTS, _RANK_ROWS, _ACTIONS = 9, 8, 6, 5
_VERDICTS = ("fits", "narrow", "release", "exceeds")
_EIGHTHS = " ▏▎▍▌▋▊▉"


@dataclass(frozen=True)
class FirstScreen:
    """What a first screen is made of."""

    reports: Sequence[Report]  # of a run one; of a log its starts, of which the last is shown
    where: str = ""  # run folder, or log as a person types it
    serve: str = ""  # of a plan: the command that serves it
    less: int = 0  # rows that have to go, because the lines are short

    @property
    def report(self) -> Report:
        return self.reports[-1]


@dataclass(frozen=True)
class Share:
    """One owner of the device."""

    name: str
    title: str
    size: str
    percent: str
    width: float  # of the bar, in percent
    of_largest: float
    note: str
    style: str


@dataclass(frozen=True)
class Bar:
    """The device by owner."""

    title: str
    shares: list[Share]
    end: float  # where the device ends, in percent of the bar: owners may be more than it holds


@dataclass(frozen=True)
class Opening:
    """What is seen at one look: on a page everything else is folded away."""

    failed: bool
    facts: list[str]  # of the run, its model aside
    answer: list[Line]
    bar: Bar | None
    actions: list[Section]
    absent: list[Line]


def opening_of(report: Report, width: int) -> Opening:
    """Return what a page begins with, of which the first screen is made, too."""
    rank, failed = _worst(report), _failed(report)
    return Opening(
        failed,
        _facts(report),
        _answer(report, rank, failed, width, FirstScreen([report])),
        _device(report, rank),
        _what_to_do(report, rank, failed, _ACTIONS),
        _not_in_the_log(report),
    )


def most_lines(width: int) -> int:
    """Return how many lines a first screen has at most, by the width of a line."""
    return next(lines for least, lines in MOST_LINES.items() if width >= least)


def first_screen_document(screen: FirstScreen, width: int) -> Document:
    """Return the first screen, laid out for lines of ``width`` characters."""
    report = screen.report
    rank = _worst(report)
    failed = _failed(report)
    less = screen.less
    blocks: list[list[Section]] = []
    start_up, less = _start_up(report, rank, width, less)
    differing, less = _differing(report, less)
    todo = _what_to_do(report, rank, failed, max(2, _ACTIONS - less))
    device = _bars(_device(report, rank), width)
    if failed:
        blocks += [device, todo, differing, start_up, _equation(report, rank)]
    else:
        blocks += [device, differing, start_up, _equation(report, rank), todo]
    head = [_headline(report), *_answer(report, rank, failed, width, screen)]
    if starts := _starts(screen, width):
        blocks.insert(0, [*starts, _named(head)])
        head = []
    return Document(
        kind="report",
        title=report.run.model,
        head=head,
        sections=[section for block in blocks for section in block],
        verdict="",
        tail=[*_not_in_the_log(report), *_more(screen)],
        compact=True,
        simulated=report.run.simulated,
    )


def _named(lines: Sequence[Line]) -> Section:
    """Return named lines as a table, which may come after another one."""
    columns = Column("", "name"), Column("", "value")
    return table("", columns, lines, look=lambda line: "" if line.style == CODE else line.style)


def _failed(report: Report) -> bool:
    return report.failure is not None or report.run.outcome in ("failed", "oom")


def _by_room(rank: RankReport) -> tuple[bool, float, float]:
    """Return the order of ranks: one that ran out of memory, then by their headroom."""
    budget = rank.budget
    known = [
        size for size in (budget.headroom_bytes, budget.engine_kv_cache_bytes) if size is not None
    ]
    headroom = inf if budget.headroom_bytes is None else float(budget.headroom_bytes)
    return rank.oom is None, headroom, float(known[-1]) if known else inf


def _worst(report: Report) -> RankReport | None:
    """Return the rank that failed, or the one with the least headroom."""
    reason = set(re.findall(r"\w+", report.run.exit_reason or ""))
    return min(
        report.ranks, key=lambda rank: (rank.label not in reason, *_by_room(rank)), default=None
    )


# The headline and the answer


def _headline(report: Report) -> Line:
    run = report.run
    named = [_short_model(run.model)] if run.model != UNKNOWN else []
    return Line("memprof", join("  ", [*named, *_facts(report)]), TOTAL)


def _facts(report: Report) -> list[str]:
    """Return the engine, the ranks, the device and the time, where they are known."""
    run = report.run
    total = next((rank.device_total_bytes for rank in report.ranks if rank.device_total_bytes), 0)
    device: list[str] = [] if run.device is None else [run.device.removeprefix("Ascend")]
    if total:
        device.append(text("{size:gib} GiB", size=total))
    if run.simulated:
        device.append(text("(simulated)"))
    named = run.engine is not None or run.model == UNKNOWN
    parts: list[str] = [engine_text(run) if named else "", _parallel(report)]
    parts += [join(" ", device)] if device else []
    parts += [] if run.seconds is None else [text("{seconds:.0f} s", seconds=run.seconds)]
    return [part for part in parts if part]


def _short_model(model: str, most: int = 44) -> str:
    return model if len(model) <= most else f"…{model[1 - most :]}"


def _parallel(report: Report) -> str:
    """Return TP8 where ranks differ in nothing else, their number where they do."""
    if report.world_size < 2:
        return ""
    matches = [re.fullmatch(r"([A-Z]+)\d+", rank.label) for rank in report.ranks]
    kinds = {match and match.group(1) for match in matches}
    (kind,) = kinds if len(kinds) == 1 else (None,)
    if kind:
        return f"{kind}{report.world_size}"
    return text("{count} ranks", count=report.world_size)


def _answer(
    report: Report, rank: RankReport | None, failed: bool, width: int, screen: FirstScreen
) -> list[Line]:
    """Return the outcome, what it rests on, and what was checked."""
    lines = _failure(report, rank, width) if failed else _outcome(report)
    if report.deployment is not None:
        lines.append(Line(text("hosts"), summary_of(report.deployment)))
        gaps = report.deployment.gaps
        lines += [Line(text("MISSING"), gap_text(gap), BAD) for gap in gaps[:2]]
    if not failed:
        lines += _checked(report)
    if screen.serve and not failed:
        lines.append(Line(text("serve it"), one_line(screen.serve, 3 * width), CODE))
    return lines + _spread(report)


def _outcome(report: Report) -> list[Line]:
    run = report.run
    words: dict[str, tuple[str, str]] = {
        "ok": (text("FITS") if run.mode == "plan" else text("OK"), GOOD),
        "truncated": (text("CUT OFF"), BAD),
    }
    word, style = words[run.outcome]
    if run.status == "running":
        word, style = text("RUNNING"), GOOD
    fits = [_fits(report)]
    if run.mode == "plan" and any(_verdict(rank) == "exceeds" for rank in report.ranks):
        word, style = text("DOES NOT FIT"), BAD
    groups = [] if report.deployment is None else report.deployment.groups
    if len(groups) > 1:
        named = [
            text("{group}: {verdict}", group=group or "-", verdict=said)
            for group in groups
            if (said := _kv_cache([rank for rank in report.ranks if rank.group == group], report))
        ]
        lines = [Line(word if not i else "", said, style) for i, said in enumerate(named)]
    else:
        said = _kv_cache(report.ranks, report) or _no_kv_cache(report)
        lines = [Line(word, said, style)]
    return lines + [line for line in fits if line is not None]


def _no_kv_cache(report: Report) -> Text:
    ended = EVIDENCE[report.run.source].status.get("truncated")
    if report.run.outcome == "truncated" and ended is not None:
        return ended
    tokens = [rank.kv.tokens for rank in report.ranks if rank.kv.tokens is not None]
    if tokens:
        return text("KV cache of {tokens:,} tokens, its size is not known", tokens=min(tokens))
    return text("no KV cache was sized")


def _kv_cache(ranks: Sequence[RankReport], report: Report) -> Text | None:
    """Return the KV cache in GiB, tokens and requests; of several ranks the least."""
    least = least_grant(ranks)
    if least is None or (size := least.budget.engine_kv_cache_bytes) is None:
        return None
    known = [rank.budget.engine_kv_cache_bytes for rank in ranks]
    sizes = {size for size in known if size is not None}
    said = text("KV cache {size:size}", size=size)
    if len(sizes) > 1:
        count = len(known) - known.count(None)
        said = text(
            "{size} on {label}, the least of {count} ranks",
            size=said,
            label=least.label,
            count=count,
        )
    elif len(known) > 1:
        said = text("{size} per rank", size=said)
    elif report.run.source == "log" and least.label != SOLE_WORKER:
        said = text("{size} on {label}", size=said, label=least.label)
    parts = [said]
    if least.kv.tokens is not None:
        parts.append(text("{tokens:,} tokens", tokens=least.kv.tokens))
    if least.kv.max_concurrency is not None and least.kv.max_model_len is not None:
        parts.append(
            text(
                "{count:,.1f} requests of {length:,}",
                count=least.kv.max_concurrency,
                length=least.kv.max_model_len,
            )
        )
    return join(" = ", parts)


def _verdict(rank: RankReport) -> str | None:
    return rank.budget.device_verdict


def _fits(report: Report) -> Line | None:
    """Return whether the device holds it, by the rank with the least headroom."""
    known = [rank for rank in report.ranks if _verdict(rank) is not None]
    if not known:
        return None
    worst = min(known, key=lambda r: (-_VERDICTS.index(_verdict(r) or "fits"), _by_room(r)))
    budget, style = worst.budget, BAD
    word: str = text("CAREFUL")
    said: str
    match budget.device_verdict:
        case "fits":
            word, style = "", PLAIN
            said = text(
                "fits the device; headroom {size:size} at the serving peak",
                size=budget.headroom_bytes,
            )
        case "narrow":
            said = text(
                "fits the device narrowly: headroom {size:size} at the serving peak, less than "
                "profiling may miss",
                size=budget.headroom_bytes,
            )
        case "release":
            said = text(
                "fits the device only if the allocator releases unused blocks: {size:size} over at "
                "the serving peak",
                size=-(budget.headroom_bytes or 0),
            )
        case _:
            over = budget.released_headroom_bytes or budget.headroom_bytes or 0
            said = text("does not fit the device: {size:size} over at the serving peak", size=-over)
    said = modelled(said, budget.how.get("headroom_bytes") == MODELLED)
    runs_none = any(item.name == "held_at_worst" for item in budget.held_at_peak)
    if runs_none or not any(each.samples for each in report.ranks):
        said = text("{verdict}; estimated: no full batch ran", verdict=said)
    if len(report.ranks) > 1 and len({_printed_room(each) for each in known}) > 1:
        said = text("{verdict}, on {label}", verdict=said, label=worst.label)
    return Line(word, said, style)


def _printed_room(rank: RankReport) -> str:
    return format_size(rank.budget.headroom_bytes)


def _checked(report: Report) -> list[Line]:
    """Return whether the equation was reproduced, and how many values match."""
    sized = [rank for rank in report.ranks if rank.budget.engine_kv_cache_bytes is not None]
    if not sized:
        return []
    equation = _named_equation(sized[0].budget.equation)
    overrides = {rank.budget.override for rank in sized} - {None}
    results = {rank.budget.balanced for rank in sized}
    values = audited(report)
    word, style = text("CHECKED"), GOOD
    if STARTUP_PLAN in overrides:
        said = text("size fixed by a start-up plan, profiling skipped")
    elif overrides:
        said = text("size fixed by {option}", option=_option(overrides.pop() or ""))
    elif False in results:
        word, style = text("DIFFERS"), BAD
        wrong = [rank.label for rank in sized if rank.budget.balanced is False]
        said = text(
            "{equation} does not reproduce it on {labels}", equation=equation, labels=fold(wrong)
        )
    elif True not in results and EVIDENCE[report.run.source].partial:
        return []
    elif True not in results:
        word, style, said = text("UNCHECKED"), PLAIN, text("the equation could not be recomputed")
    elif any(rank.budget.tolerance_bytes for rank in sized):
        said = text("{equation} reproduces it within the rounding of the log", equation=equation)
    else:
        said = text("{equation} reproduces it to the byte", equation=equation)
    return [Line(word, said if values is None else join("; ", [said, values]), style)]


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _named_equation(name: str | None) -> Text:
    """Return an equation with the releases that have it."""
    rows = [row for row in EQUATIONS if row.id == name]
    if not rows:
        return text("the equation")
    limits = [one for row in rows for one in row.versions.split(",")]
    least = min((Version(one[2:]) for one in limits if one.startswith(">=")), default=None)
    engine = rows[0].engine
    since = engine if least is None else f"{engine} {least.major}.{least.minor}+"
    return text("equation {id} ({since})", id=name, since=since)


def _spread(report: Report) -> list[Line]:
    """Return how far plans of this kind were off on hardware, where enough runs were published."""
    least = least_grant(report.ranks)
    if least is None or report.run.mode != "plan" or not report.run.simulated:
        return []
    spread = spread_of(least.budget.equation, report.run.device_profile)
    if spread is None:
        return []
    said = text(
        "on {count} published runs of this kind the KV cache of a plan was off by {low:+.1f} to "
        "{high:+.1f} %, median {median:+.1f} %",
        count=spread.runs,
        low=100 * spread.low,
        high=100 * spread.high,
        median=100 * spread.median,
    )
    return [Line(text("accuracy"), said)]


# A failure


def _failure(report: Report, rank: RankReport | None, width: int) -> list[Line]:
    """Return the cause, once: what failed, where, and the lines that tell."""
    failure, run = report.failure, report.run
    word = text("DOES NOT FIT") if run.mode == "plan" and _is_memory(report) else text("FAILED")
    oom = None if rank is None else rank.oom
    if failure is not None:
        said: str = failure.title
        if failure.confidence == "likely":
            said = text("{title} ({kind}, likely)", title=said, kind=failure.kind)
        elif failure.confidence == "certain":
            said = text("{title} ({kind})", title=said, kind=failure.kind)
    elif oom is not None:
        said = text("out of device memory")
    else:
        said = _cut(run.exit_reason or text("failed"), 2 * width)
    lines = [Line(word, said, BAD)]
    if oom is not None and rank is not None:
        lines.append(Line("", _asked(report, rank, oom)))
    elif failure is not None and run.exit_reason and not EVIDENCE[run.source].partial:
        lines.append(Line("", _cut(run.exit_reason, width)))
    if (kv := _kv_cache(report.ranks, report)) is not None:
        lines.append(Line("", kv))
    for each in [] if failure is None else failure.evidence[:2]:
        line = _cut(each.text, width + width // 2)
        lines.append(Line(text("line {number}", number=each.line), line, MUTED))
    return lines


def _is_memory(report: Report) -> bool:
    return report.run.outcome == "oom" or (report.failure is not None and report.failure.is_memory)


def _cut(words: str, most: int) -> str:
    """Return words as they are where they are short; what others wrote is cut."""
    return words if len(words) <= most and "\n" not in words else one_line(words, most)


def _asked(report: Report, rank: RankReport, oom: Oom) -> Text:
    """Return what was asked for, what was free, short by how much; where, and on which rank."""
    parts: list[str] = []
    if oom.requested_bytes is not None:
        parts.append(text("asked for {size:size}", size=oom.requested_bytes))
    if oom.free_bytes is not None:
        parts.append(text("{size:size} free on the device", size=oom.free_bytes))
    if oom.missing_bytes is not None:
        parts.append(text("short by {size:size}", size=oom.missing_bytes))
    elif oom.requested_bytes is not None and oom.free_bytes is not None:
        parts.append(text("free in pieces only"))
    if oom.phase is not None:
        parts.append(text("in {phase}", phase=oom.phase))
    elif oom.last_phase is not None:
        parts.append(text("after {phase}", phase=oom.last_phase))
    if oom.stage is not None:
        parts.append(TITLES["stages"].get(oom.stage, oom.stage))
    failed = [each.label for each in report.ranks if each.oom is not None]
    parts.append(text("on {labels}", labels=_few(failed)))
    return join(", ", parts)


def _few(labels: Sequence[str], most: int = 40) -> str:
    """Return labels as ranges; the first of them where they are many."""
    said = fold(labels)
    if len(said) <= most:
        return said
    return text("{label} and {count} more", label=labels[0], count=len(labels) - 1)


# The device by owner


def _bar(share: float, cells: int) -> str:
    """Return a bar of a share of ``cells`` characters, in eighths."""
    eighths = max(0, round(share * cells * 8))
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


_MOMENTS = {
    SERVING_PEAK: text("Device at the serving peak"),
    FAILURE: text("Device when the allocation failed"),
}


def _device(report: Report, rank: RankReport | None) -> Bar | None:
    """Return the device of the worst rank by owner."""
    divided = None if rank is None else divided_device(rank)
    if rank is None or divided is None:
        return None
    rows = _owners(divided)
    if not rows:
        return None
    total = divided.total_bytes or 0
    largest = max(row.bytes for row in rows)
    whole = max(total, sum(max(row.bytes, 0) for row in rows))
    shares = []
    for row in rows:
        name, _, whose = row.name.partition(":")
        words = OWNER_TITLES.get(name, row.title)
        if whose:
            words = text("{owner} {whose}", owner=words, whose=whose)
        shares.append(
            Share(
                name,
                modelled(words, row.how == MODELLED and report.run.simulated),
                _gib_or_mib(row.bytes),
                _percent(row.bytes, total),
                round(100 * max(row.bytes, 0) / whole, 3),
                row.bytes / largest,
                _note(row, divided),
                {OVER: BAD, HEADROOM: GOOD, FREE: MUTED}.get(row.name, PLAIN),
            )
        )
    if divided.moment in _MOMENTS:
        when = _MOMENTS[divided.moment]
    elif divided.moment == LAST_READING:
        when = text("Device at the last reading, {phase}", phase=divided.phase)
    else:
        when = text("Device by the values of the log")
    heading = text("{when}, GiB", when=when)
    if len(report.ranks) > 1:
        groups = _groups(report)
        heading = (
            text("{when}, GiB per rank, {labels} alike", when=when, labels=_few(groups[0][0]))
            if len(groups) == 1
            else text("{when}, GiB, {label}", when=when, label=_role(report, rank))
        )
    return Bar(heading, shares, round(100 * (total or whole) / whole, 3))


def _bars(bar: Bar | None, width: int) -> list[Section]:
    """Return the device as a table, with bars of characters."""
    if bar is None:
        return []
    cells = 30 if width >= 100 else 20

    def barred(row: Share) -> str:
        drawn = _bar(row.of_largest, cells)
        return text("{bar}   {note}", bar=drawn, note=row.note) if row.note else drawn

    columns = (
        Column("", "title"),
        Column("", "size", right=True),
        Column("", "percent", right=True, when=any(row.percent for row in bar.shares)),
        Column("", barred),
    )
    return [table(bar.title, columns, bar.shares)]


def _role(report: Report, rank: RankReport) -> str:
    if rank.oom is not None:
        return text("{label}, which failed", label=rank.label)
    if rank.budget.headroom_bytes is not None:
        return text("{label}, the least headroom", label=rank.label)
    return rank.label


def _gib_or_mib(size: int) -> str:
    """Return GiB without the unit; with it below 0.1 GiB, in MiB."""
    return format_gib(size) if abs(size) >= 0.1 * GIB else format_size(size)


def _percent(size: int, total: int | None) -> str:
    if not total:
        return ""
    share = 100 * size / total
    return f"{share:.0f} %" if abs(share) >= 0.5 else "<1 %"


def _owners(divided: DividedDevice) -> list[ItemPart]:
    """Return the owners worth a row, the largest first, what is free behind them."""
    last = [row for row in divided.owners if row.name in (FREE, HEADROOM, OVER)]
    first = [row for row in divided.owners if row not in last]
    first = sorted((row for row in first if row.bytes), key=lambda row: -row.bytes)
    shown = [row for row in first if abs(row.bytes) >= _LEAST_BYTES] or first
    room = _OWNERS - len(last)
    if len(shown) > room:
        rest = shown[room - 1 :]
        size = sum(row.bytes for row in rest)
        shown = [
            *shown[: room - 1],
            ItemPart("others", text("{count} more owners", count=len(rest)), size, rest[0].how),
        ]
    return [*shown, *last]


def _note(row: ItemPart, divided: DividedDevice) -> str:
    """Return what non-torch memory is, the largest first."""
    if row.name != "non_torch" or divided.memory is None:
        return "" if row.name != OVER else text("over the device")
    sizes: dict[str, int] = {}
    for part in divided.memory.rows:
        if part.component in ("allocated", "reserved_not_allocated", "free", "other_processes"):
            continue
        name = part.component.partition(":")[0]
        sizes[name] = sizes.get(name, 0) + (part.bytes or 0)
    named = sorted(sizes.items(), key=lambda each: -each[1])
    parts = [
        text("{name} {size:size}", name=OWNER_TITLES.get(name, name), size=size)
        for name, size in named[:3]
        if size >= _LEAST_BYTES
    ]
    return join(", ", parts)


# Ranks that differ


def _groups(report: Report) -> list[tuple[list[str], RankReport]]:
    """Return ranks whose figures print alike together: their labels, and the first of them."""

    def key(rank: RankReport) -> tuple[object, ...]:
        divided = divided_device(rank)
        rows = [] if divided is None else divided.owners
        figures = [format_gib(size) for _, size in _figures(rank)]
        return (*figures, *((row.name, format_gib(row.bytes)) for row in rows))

    found = group_ranks(report.ranks, key)
    return [([rank.label for rank in group], group[0]) for group in found]


def _figures(rank: RankReport) -> list[tuple[str, int | None]]:
    """Return what ranks are compared by: title, bytes."""
    budget = rank.budget
    graph = rank.figures.get("graph_bytes")
    return [
        (text("KV cache"), budget.engine_kv_cache_bytes),
        (text("headroom"), budget.headroom_bytes),
        *((title_of(row.name), row.bytes) for row in budget.terms if row.subtracted),
        (text("graph memory"), None if graph is None else int(graph)),
        (text("free at the start"), rank.initial_free_bytes),
    ]


def _differing(report: Report, less: int) -> tuple[list[Section], int]:
    """Return what differs between ranks, side by side: of many the worst, the median, the best."""
    groups = _groups(report)
    if len(groups) < 2:
        return [], less
    groups.sort(key=lambda group: _by_room(group[1]))
    heads: list[str] = [_few(labels, 18) for labels, _ in groups]
    if len(groups) > 3:
        ordered = sorted(report.ranks, key=_by_room)
        middle = ordered[len(ordered) // 2]
        shown = [ordered[0], middle, ordered[-1]]
        words = text("worst"), text("median"), text("best")
        heads = [
            text("{word}: {label}", word=word, label=rank.label)
            for word, rank in zip(words, shown, strict=True)
        ]
    else:
        shown = [rank for _, rank in groups]
    per_rank = [dict(_figures(rank)) for rank in shown]
    titles = list(dict.fromkeys(title for figures in per_rank for title in figures))
    rows = []
    for title in titles:
        cells = [format_gib(figures.get(title)) for figures in per_rank]
        if len(set(cells)) > 1:
            rows.append(Row([title, *cells], indent=1))
    kept = rows[: max(1, min(_RANK_ROWS, len(rows) - less))]
    columns = [Column(text("Ranks that differ, GiB"), "title")]
    columns += [Column(head, "title", right=True) for head in heads]
    gone = len(rows) - len(kept)
    return ([table("", columns, kept)] if kept else []), max(0, less - gone)


# The start-up


#: Reading -> its column, whether the profile of a simulated device sets it, whether short lines
#: have room for it.
_START_UP = {
    "reserved_bytes": (text("torch reserved"), False, True),
    "allocated_peak_bytes": (text("torch peak"), False, False),
    "non_torch_bytes": (text("non-torch"), True, True),
    "device_free_bytes": (text("free"), True, True),
}
_NOT_START_UP = ("request", "stage", "oom")


def _start_up(
    report: Report, rank: RankReport | None, width: int, less: int
) -> tuple[list[Section], int]:
    """Return the phases that changed the device, before and after."""
    if rank is None:
        return [], less
    found = _telling(list(passages_of(rank).values()))
    room = max(3, 12 - less)
    if len(found) > room:
        least = sorted(found, key=_changed, reverse=True)[:room]
        found = [each for each in found if each in least]
    less = max(0, less - 9)
    if not found:
        return [], less
    wide, simulated = width >= 100, report.run.simulated

    def edges(name: str) -> Column:
        def cell(each: Passage) -> str:
            sizes = each.edges(name)
            return "-" if sizes == [None, None] else " → ".join(map(format_gib, sizes))

        title, mark, _ = _START_UP[name]
        return Column(modelled(title, mark and simulated), cell, right=True)

    title = text("Start-up, GiB")
    if len(_groups(report)) > 1:
        title = text("Start-up of {label}, GiB", label=rank.label)
    columns = [
        Column(title, "name"),
        Column("s", _seconds, right=True, when=EVIDENCE[report.run.source].no_times is None),
        *(edges(name) for name, (_, _, narrow) in _START_UP.items() if wide or narrow),
    ]
    return [
        table("", columns, found, look=lambda each: Look(BAD if each.open else PLAIN, indent=1))
    ], less


def _seconds(each: Passage) -> str:
    if each.open:
        return text("open")
    return "-" if each.seconds is None else f"{each.seconds:.1f}"


def _changed(each: Passage) -> float:
    """Return the most that a figure changed in a phase, bytes; inf of one that was not left."""
    if each.open:
        return inf
    pairs = [each.edges(name) for name in _START_UP]
    known = [abs(new - old) for old, new in pairs if old is not None and new is not None]
    return max(known, default=0)


def _telling(rows: list[Passage]) -> list[Passage]:
    """Return passages that changed the device; those in one stand for it if they are all of it."""
    found: list[Passage] = []
    while rows:
        row, *rows = rows
        within = list(takewhile(lambda each, depth=row.indent: each.indent > depth, rows))  # type: ignore[misc]
        if row.name == "shutdown":
            break
        if row.name.partition(" ")[0] in _NOT_START_UP or _changed(row) < _LEAST_BYTES:
            rows = rows[len(within) :]
            continue
        inside = [
            each
            for each in within
            if each.indent == row.indent + 1 and _changed(each) >= _LEAST_BYTES
        ]
        named = [each for each in inside if not each.name.startswith("empty_cache")]
        whole = bool(named) and _cells(row) == (_cells(inside[0])[0], _cells(inside[-1])[1])
        if not (named[-1].open if named and row.open else whole):
            found.append(row)
            rows = rows[len(within) :]
    return found


def _cells(each: Passage) -> tuple[list[str], list[str]]:
    """Return what is printed of a passage, before and after."""
    edges = [each.edges(name) for name in _START_UP]
    return [format_gib(edge[0]) for edge in edges], [format_gib(edge[1]) for edge in edges]


# The equation


def _equation(report: Report, rank: RankReport | None) -> list[Section]:
    """Return the equation with its values in one line, and what it does not subtract."""
    if rank is None:
        return []
    budget = rank.budget
    terms = [row for row in budget.terms if row.subtracted]
    if budget.override or budget.equation is None or all(row.bytes is None for row in terms):
        return []
    form = form_of(budget.equation)
    base: float | None = budget.device_total_bytes or rank.device_total_bytes
    share: float | None = budget.gpu_memory_utilization
    if form is not None and form.base != "device_total_bytes":
        base, share = rank.figures.get(form.base), rank.figures.get(form.share)
    asked = text("requested ?")
    if budget.requested_bytes is not None:
        asked = text("requested {asked:gib}", asked=budget.requested_bytes)
    if base is not None and share is not None and budget.requested_bytes is not None:
        asked = text(
            "{base:gib} × {share} = {asked:gib}",
            base=base,
            share=share,
            asked=budget.requested_bytes,
        )
    parts: list[str] = [asked]
    for row in terms:
        if row.bytes is None:
            parts.append(text("? {title}", title=title_of(row.name)))
        elif abs(row.bytes) >= _LEAST_BYTES // 2:
            mark = report.run.simulated and is_device_wide(row.name)
            title = modelled(title_of(row.name), mark)
            parts.append(text("{size:gib} {title}", size=row.bytes, title=title))
    said: Text = join(" - ", parts)
    if (divisor := divisor_of(budget.equation)) > 1:
        said = text("({sum}) / {divisor}", sum=said, divisor=divisor)
    size = budget.kv_cache_bytes
    size = budget.engine_kv_cache_bytes if size is None else size
    if size is not None:
        said = text("{sum} = {size:gib}", sum=said, size=size)
    lines = [(text("Equation {id}", id=budget.equation), said)]
    left = [row for row in budget.not_subtracted if (row.bytes or 0) >= _LEAST_BYTES]
    if left:
        named = [
            text("{title} {size:size}", title=row.title, size=row.bytes)
            for row in sorted(left, key=lambda row: -(row.bytes or 0))
        ]
        lines.append((text("not subtracted"), join(", ", named)))
    columns = Column("", lambda row: row[0]), Column("", lambda row: row[1])
    return [table("", columns, lines, look=lambda row: PLAIN)]


# What to do


def _what_to_do(report: Report, rank: RankReport | None, failed: bool, most: int) -> list[Section]:
    """Return what to change, in the order of its cost."""
    rows = _cures(report, rank) if failed else _offers(report, rank)
    if not failed:
        acted: dict[str, _Action] = {}
        order = "error", "warning", "info"
        for view in sorted(finding_views(report), key=lambda view: order.index(view.severity)):
            if view.action and (view.severity != "info" or not rows):
                said = text("{title}: {action}", title=view.title, action=view.action)
                acted.setdefault(view.id, (view.id, said, PLAIN))
        told = list(acted.values())[: max(1, 3 - len(rows))]
        careful = any(_verdict(each) not in ("fits", None) for each in report.ranks)
        rows = [*told, *rows] if careful else [*rows, *told]
    shown = rows[:most]
    if not shown:
        return []
    columns = (
        Column(text("What to do"), lambda row: row[0]),
        Column("", lambda row: row[1]),
    )
    return [table("", columns, shown, look=lambda row: Look(row[2], indent=1))]


_Action = tuple[str, str, str]  # what, what it brings, style


def _offers(report: Report, rank: RankReport | None) -> list[_Action]:
    """Return what a run that started leaves to gain."""
    if rank is None:
        return []
    found: list[_Action] = []
    budget = rank.budget
    more: MoreKvCache | None = more_kv_cache(report.ranks)
    if more is not None:
        gain: Text = text("+{size:gib} GiB", size=more.bytes)
        if more.tokens is not None:
            gain = text("{gain}, {tokens:,} tokens", gain=gain, tokens=more.tokens)
        said = text(
            "{argument}: {gain}; leaves {left:size}. Run a full batch first (--sample 16)",
            argument=more.argument,
            gain=gain,
            left=more.left_bytes,
        )
        found.append((text("more KV cache"), said, PLAIN))
    fits, size = budget.fits_request_bytes, budget.engine_kv_cache_bytes
    share = budget.gpu_memory_utilization
    free = budget.takes_fixed_size and budget.override is None
    if fits and size and share and free and 0 < fits < size - _LEAST_BYTES:
        least = min(each.budget.fits_request_bytes or fits for each in report.ranks)
        what = text("stay within {share}", share=share)
        found.append((what, f"--kv-cache-memory-bytes {least}", PLAIN))
    return found


def _cures(report: Report, rank: RankReport | None) -> list[_Action]:
    """Return what makes room, each with whether it is enough; what is not enough comes last."""
    remedies = [] if rank is None or rank.oom is None else rank.oom.remedies
    rows = [_remedy(row) for row in sorted(remedies, key=lambda row: row.bytes is None)]
    said = " ".join(row.argument for row in remedies)
    failure, cures = report.failure, []
    for cure in [] if failure is None else failure.cures:
        change = cure.action or cure.argument or cure.environment or ""
        if _applies(cure, report) and change not in said:
            cures.append(_cure(cure, change))
    named = failure is not None and failure.kind != "other"
    order = GOOD, PLAIN, MUTED
    return sorted(
        [*cures, *rows] if named else [*rows, *cures], key=lambda row: order.index(row[2])
    )


def _applies(cure: Cure, report: Report) -> bool:
    """Return False for an argument of an engine that is not the one of the run."""
    engine = report.run.engine
    if cure.engine not in ("vllm", "sglang") or engine is None:
        return True
    return engine.startswith(cure.engine)


def _remedy(row: Remedy) -> _Action:
    if row.bytes is None:
        return row.argument, row.grounds, PLAIN
    size = text("frees {size:size}", size=row.bytes)
    if row.bound == AT_MOST:
        size = text("frees at most {size:size}", size=row.bytes)
    elif row.bound == AT_LEAST:
        size = text("frees at least {size:size}", size=row.bytes)
    how = TITLES["how"].get(row.how or "", row.how or "")
    if row.enough:
        enough = (
            text("enough for this allocation if so, not tried ({how})", how=how)
            if row.how == ESTIMATED
            else text("enough for this allocation, not tried ({how})", how=how)
        )
        return row.argument, join(": ", [size, enough]), GOOD
    if row.enough is False:
        return row.argument, join(": ", [size, text("not enough")]), MUTED
    return row.argument, join(": ", [size, text("whether that is enough is not known")]), PLAIN


_ENOUGH = {
    "checked": text("enough, checked by a run"),
    "computed": text("enough, computed, not tried"),
    "at least": text("at least this much"),
}


def _cure(cure: Cure, change: str) -> _Action:
    if cure.value is not None:
        change += ("=" if cure.environment else " ") + cure.value
    enough = _ENOUGH.get(cure.enough)
    if enough is None:
        return change, cure.why, PLAIN
    return change, join("; ", [cure.why, enough]), GOOD if cure.enough != "at least" else PLAIN


# The rest


def _starts(screen: FirstScreen, width: int) -> list[Section]:
    """Return the engine starts of a log, the last of which the rest is about."""
    if len(screen.reports) < 2:
        return []
    section = starts_section(screen.reports[-_STARTS:], width)
    notes: list[str] = []
    if (left := len(screen.reports) - _STARTS) > 0:
        notes.append(text("{count} earlier starts are not shown", count=left))
    notes.append(text("below: the last start; another one: {command}", command=_another(screen)))
    title = text("{count} engine starts", count=len(screen.reports))
    return [replace(section, title=title, notes=notes)]


def _another(screen: FirstScreen) -> str:
    name = screen.where or screen.report.run.id.rpartition("#")[0] or "LOG"
    return f"memprof explain {name}#1"


def _not_in_the_log(report: Report) -> list[Line]:
    """Return what a log does not tell, in one line."""
    if not EVIDENCE[report.run.source].partial:
        return []
    ranks = report.ranks

    def lacks(read: Iterable[object]) -> bool:
        return all(each is None for each in read)

    terms = {row.name for rank in ranks for row in rank.budget.terms if row.subtracted}
    wanted = sorted(terms) or ["weights", "peak_activation", "non_torch"]

    def known(rank: RankReport, name: str) -> int | float | None:
        term = rank.budget.term(name)
        return rank.figures.get(f"{name}_bytes") if term is None else term

    names = {
        text("release"): report.run.engine_version is None,
        text("device total"): lacks(rank.device_total_bytes for rank in ranks),
        **{title_of(name): lacks(known(rank, name) for rank in ranks) for name in wanted},
        text("KV cache"): lacks(rank.budget.engine_kv_cache_bytes for rank in ranks),
        text("KV tokens"): lacks(rank.kv.tokens for rank in ranks),
        text("memory at the phases"): not any(rank.phases for rank in ranks),
    }
    absent = [name for name, missing in names.items() if missing]
    return [Line(text("not in this log"), join(", ", absent), MUTED)] if absent else []


def _more(screen: FirstScreen) -> list[Line]:
    """Return where the rest is."""
    log = EVIDENCE[screen.report.run.source].partial
    what = "memprof explain LOG" if log else "memprof report RUN"
    more = f"{what} --full | --section NAME | --format html"
    count = len(finding_views(screen.report))
    lines = [Line(text("findings"), f"{count}: --section findings", MUTED)] if count else []
    lines.append(Line(text("more"), more, MUTED))
    if screen.where:
        lines.append(Line("LOG" if log else "RUN", screen.where, MUTED))
    return lines
