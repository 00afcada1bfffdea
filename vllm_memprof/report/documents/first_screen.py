"""The first screen of a run, a plan or a log: the answer in at most ``most_lines``.

Reports enter, a compact document leaves. Whatever it leaves out is in the whole report (``--full``,
``--section``), whose sentences it says. Each block below returns none where it has nothing to say.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from math import inf
from string import digits

from vllm_memprof.accounting.budget.equations import divisor_of, form_of
from vllm_memprof.accounting.findings.advice import more_kv_cache
from vllm_memprof.accounting.model import Budget, ItemPart, RankReport, Report
from vllm_memprof.accounting.owners.peak_owners import (
    FREE,
    HEADROOM,
    OVER,
    DividedDevice,
    divided_device,
)
from vllm_memprof.accounting.readings.quantities import is_device_wide, title_of
from vllm_memprof.accounting.summary import engine_name
from vllm_memprof.accounting.titles import how_title, title_in
from vllm_memprof.document import BAD, CODE, GOOD, MUTED, PLAIN, TOTAL, Document, Line, Row, Section
from vllm_memprof.record.schema import DAMAGED
from vllm_memprof.record.spans import MODELLED
from vllm_memprof.report.documents.report import (
    by_group,
    fits_device,
    granted,
    gravest,
    recomputed,
    said_of_cure,
    spread,
    tried,
)
from vllm_memprof.report.sections.audit import audited
from vllm_memprof.report.sections.base import (
    columns_of,
    least_grant,
    sentences_of,
)
from vllm_memprof.report.sections.deployment import gap_text, summary_of
from vllm_memprof.report.sections.files import TABLES, memory_files
from vllm_memprof.report.sections.findings import finding_views
from vllm_memprof.report.sections.oom import OWNER_TITLES
from vllm_memprof.report.sections.phases import Passage, passages_of
from vllm_memprof.report.sections.starts import starts_section
from vllm_memprof.tables import (
    UNKNOWN,
    Column,
    Look,
    Paper,
    Values,
    bar_of,
    foremost,
    group_ranks,
    modelled,
    number,
    table,
)
from vllm_memprof.text import Text, fold, join, text
from vllm_memprof.units import GIB, MIB, either, format_gib, format_size, one_line, only_known

#: Less is left out.
_LEAST_BYTES = 10 * MIB
#: Rows of a block, at most.
_OWNERS, _STARTS = 9, 8
#: Rows of a divided device that are no owner's.
_LAST = {OVER: BAD, HEADROOM: GOOD, FREE: MUTED}
#: Words of the answer that do not say that all is well.
_WORDS = dict.fromkeys(("DOES NOT FIT", "CUT OFF", "DIFFERS"), BAD) | {"UNCHECKED": PLAIN}
_SIZE = "--kv-cache-memory-bytes"
_START_UP = ("reserved_bytes", "allocated_peak_bytes", "non_torch_bytes", "device_free_bytes")


@dataclass(frozen=True)
class Share:
    """One owner of the device, in words."""

    name: str
    title: str
    size: str
    percent: str  # "" where the device's total is not known
    width: float  # of all that the bar shows, in percent
    note: str
    style: str


@dataclass(frozen=True)
class Bar:
    """The device by owner."""

    title: str
    shares: list[Share]
    end: float  # of the device, in percent of the bar: owners may be more than it has


@dataclass(frozen=True)
class Opening:
    """What is seen at one look: the begin of a page, and most of a first screen."""

    failed: bool
    facts: str  # of the run, its model aside
    answer: list[Line]
    bar: Bar | None
    todo: list[Line]
    absent: list[Line]


@dataclass(frozen=True)
class FirstScreen:
    """What a first screen is made of."""

    reports: Sequence[Report]  # of a run one; of a log its starts, of which the last is shown
    where: str = ""  # run folder, or log as a person types it; "": the newest run
    serve: str = ""  # of a plan: the command that serves it
    less: int = 0  # rows that have to go, because the lines are short

    @property
    def report(self) -> Report:
        return self.reports[-1]

    def room(self, most: int, least: int, before: int = 0) -> int:
        """Return the rows that a block has, where others went without ``before`` first."""
        return max(least, min(most, most + before - self.less))


def most_lines(width: int) -> int:
    """Return how many lines a first screen has at most, by the width of a line."""
    return 45 if width >= 100 else 55


def opening_of(screen: FirstScreen, width: int) -> Opening:
    """Return the answer, its lines cut for a width where they quote what was printed."""
    report, rank = screen.report, _worst(screen.report)
    failed = report.failure is not None or report.run.outcome in ("failed", "terminated", "oom")
    answer = list(_failure(report, rank, width) if failed else _answer(report))
    if report.deployment is not None:
        answer.append(Line(text("hosts"), summary_of(report.deployment)))
        gaps = report.deployment.gaps[:2]
        answer += [Line(text("MISSING"), gap_text(gap), BAD) for gap in gaps]
    damaged = [note for note in report.run.notes if note.startswith(DAMAGED)]
    answer += [Line(text("DAMAGED"), one_line(note, 3 * width), BAD) for note in damaged[:2]]
    if screen.serve and not failed:
        answer.append(Line(text("serve it"), one_line(screen.serve, 3 * width), CODE))
    return Opening(
        failed,
        _headline(report, named=False),
        [*answer, *_waiting(report), *spread(report)],
        None if rank is None else _device(report, rank),
        (_cures if failed else _offers)(report, rank),
        [] if report.failure and not report.failure.is_memory else _not_in_the_log(report),
    )


def first_screen_document(screen: FirstScreen, width: int) -> Document:
    """Return the first screen, laid out for lines of ``width`` characters."""
    report, on = screen.report, Paper(width >= 100, screen.report.run.simulated)
    rank, opening = _worst(report), opening_of(screen, width)
    head = [Line("memprof", _headline(report), TOTAL), *opening.answer]
    said = _pairs(text("What to do"), opening.todo[: screen.room(5, 2, 14)], 1)
    sections = []
    if rank is not None:
        sections = [
            _differing(report, screen.room(6, 1, 9)),
            _start_up(on, report, rank, screen.room(12, 3)),
            _pairs("", _equation(on, rank)),
        ]
    sections.insert(0 if opening.failed else len(sections), said)
    if rank is not None:
        alone = report.run.source == "file"  # then the bar has its owners
        names = [name for name in TABLES if name != "owners"] if alone else ["owners", "modules"]
        sections = [*memory_files(on, rank, screen.room(5, 2), names), *sections]
    if opening.bar is not None:
        sections.insert(0, _bars(opening.bar, 30 if on.wide else 20))
    if len(screen.reports) > 1:
        sections = [_starts(screen, width), _pairs("", head), *sections]
        head = []
    return Document(
        kind="report",
        title=report.run.model,
        head=head,
        sections=[section for section in sections if section.rows],
        tail=[*opening.absent, *_more(screen)],
        compact=True,
        simulated=on.simulated,
    )


def _pairs(title: str, lines: Sequence[Line], indent: int = 0) -> Section:
    """Return named lines as a table, which may come after another one."""
    columns = Column(title, "name"), Column("", "value")
    return table("", columns, lines, look=lambda line: Look(line.style, indent=indent))


def _by_room(rank: RankReport) -> tuple[bool, float, float]:
    """Return the order of ranks: one that ran out of memory, then by their headroom."""
    sizes = rank.budget.headroom_bytes, rank.budget.engine_kv_cache_bytes
    headroom, size = (inf if each is None else each for each in sizes)
    return rank.oom is None, headroom, size


def _worst(report: Report) -> RankReport | None:
    """Return the rank that failed, or the one with the least headroom."""
    reason = re.findall(r"\w+", report.run.exit_reason or "")
    return min(
        report.ranks, key=lambda rank: (rank.label not in reason, *_by_room(rank)), default=None
    )


def _few(labels: Sequence[str], most: int = 40) -> str:
    """Return labels as ranges; the first of them where they are many."""
    if len(said := fold(labels)) <= most:
        return said
    return text("{label} and {count} more", label=labels[0], count=len(labels) - 1)


# The headline and the answer


def _headline(report: Report, named: bool = True) -> Text:
    """Return model, engine, ranks, device and time, as far as known; not ``named``: no model."""
    run, ranks = report.run, report.ranks
    kind = ranks[0].label.rstrip(digits) if ranks else ""
    all_ranks = {f"{kind}{at}" for at in range(report.world_size)}  # no TP7 of those of TP4
    known = run.model != UNKNOWN
    figures = {
        "model": known and named and (run.model if len(run.model) <= 44 else f"…{run.model[-43:]}"),
        "engine": engine_name(run),
        "unnamed": not known,
        "kind": kind.isalpha() and all_ranks.issuperset(rank.label for rank in ranks) and kind,
        "count": report.world_size if report.world_size > 1 else None,
        "device": (run.device or "").removeprefix("Ascend"),
        "total": report.device_total_bytes,
        "simulated": run.simulated,
        "seconds": run.seconds,
    }
    return sentences_of("headline", figures, "  " if named else " · ")


def _answer(report: Report) -> Iterable[Line]:
    """Yield the outcome, whether it fits the device, and what was checked."""
    run, least_room = report.run, gravest(report)
    verdict = "fits" if least_room is None else least_room.budget.device_verdict
    exceeds = run.mode == "plan" and verdict == "exceeds"
    said = {run.status: True, run.outcome: True, run.mode: True, "exceeds": exceeds}
    word: str = sentences_of("outcome", said)
    style = _WORDS.get(word, GOOD)
    for group, part in by_group(report).items():
        told = _granted(part)
        told = text("{group}: {verdict}", group=group, verdict=told) if group else told
        yield Line(word, told, style)
        word = ""
    careful = ("", PLAIN) if verdict == "fits" else (text("CAREFUL"), BAD)
    yield from (Line(careful[0], each, careful[1]) for each in fits_device(report))
    budgets = [rank.budget for rank in report.ranks if rank.budget.engine_kv_cache_bytes]
    checks = {each.balanced for each in budgets}
    checked = {
        "fixed": any(each.override for each in budgets),
        "differs": False in checks,
        "equal": True in checks,
        "unchecked": None in checks and not run.evidence.partial,
    }
    if word := sentences_of("checked", checked):
        outcomes = join("; ", (*recomputed(report), audited(report)))
        yield Line(word, outcomes, _WORDS.get(word, GOOD))


def _granted(report: Report) -> Text:
    """Return the KV cache, with the requests that it holds at a time."""
    least = least_grant(report.ranks)
    requests = None if least is None else sentences_of("concurrency", vars(least.kv))
    replicas = report.replicas > 1 and text("in each of {replicas} replicas", report)
    return join(", ", (granted(report), requests or None, replicas))


def _waiting(report: Report) -> Iterable[Line]:
    """Yield requests that wait for ever, and a KV cache that a kernel does not address."""
    for each in report.findings:
        if each.id == "kv-out-of-reach" and each.severity == "error":
            yield Line(text("CAREFUL"), each.title, BAD)


# A failure


def _failure(report: Report, rank: RankReport | None, width: int) -> Iterable[Line]:
    """Yield the cause, once: what failed, where, and the lines that tell."""

    def cut(words: str, most: int) -> str:
        return words if len(words) <= most and "\n" not in words else one_line(words, most)

    failure, run, oom = report.failure, report.run, None if rank is None else rank.oom
    memory = run.outcome == "oom" or (failure is not None and failure.is_memory)
    word = text("DOES NOT FIT") if run.mode == "plan" and memory else text("FAILED")
    word = text("STOPPED") if failure is None and run.interrupted else word
    figures = {} if failure is None else vars(failure) | {failure.confidence: True}
    figures |= {"out": oom is not None, "reason": cut(run.exit_reason or "", 2 * width)}
    yield Line(word, sentences_of("failed", figures), BAD)
    if oom is not None:
        asked = {
            **vars(oom),
            "missing": oom.missing_bytes,
            "pieces": None not in (oom.requested_bytes, oom.free_bytes),
            "part": title_in("stages", oom.stage),
            "labels": _few([each.label for each in report.ranks if each.oom is not None]),
        }
        yield Line("", sentences_of("asked", asked, ", "))
    elif failure is not None and run.exit_reason and not run.evidence.partial:
        yield Line("", cut(run.exit_reason, 2 * width))
    if least_grant(report.ranks) is not None:
        yield Line("", _granted(report))
    for view in finding_views(report):
        if view.id == "host-limit":
            yield Line(text("host"), text("{title}: {evidence}", view), BAD)
            yield Line("", view.action)
            break
    if failure is None:
        return
    for each in failure.evidence[:2]:
        yield Line(text("line {line}", each), cut(each.text, 2 * width + width // 2), MUTED)
    yield from tried(failure)


# The device by owner


def _device(report: Report, rank: RankReport) -> Bar | None:
    """Return the device of the worst rank by owner."""
    divided = divided_device(rank)
    rows = [] if divided is None else _owners(divided)
    if divided is None or not rows:
        return None
    total, simulated = divided.total_bytes, report.run.simulated
    whole = max(total or 0, sum(max(row.bytes, 0) for row in rows))
    least = least_grant(report.ranks)
    available = None if least is None else least.budget.engine_kv_cache_bytes

    def share(row: ItemPart) -> Share:
        name, _, whose = row.name.partition(":")
        words = OWNER_TITLES.get(name, row.title)
        words = text("{owner} {whose}", owner=words, whose=whose) if whose else words
        percent = 100 * row.bytes / (total or whole)
        note = _outside(divided) if row.name == "non_torch" else ""
        note = text("over the device") if row.name == OVER else note
        if row.name == "kv_cache" and available and format_gib(row.bytes) != format_gib(available):
            # the answer says what the engine may use; of it the engine allocates whole blocks
            note = text("of {size:gib} available", size=available)
        return Share(
            name,
            modelled(words, row.how == MODELLED and simulated),
            format_gib(row.bytes) if abs(row.bytes) >= 0.1 * GIB else format_size(row.bytes),
            "" if total is None else f"{percent:.0f} %" if abs(percent) >= 0.5 else "<1 %",
            100 * max(row.bytes, 0) / whole,
            note,
            _LAST.get(row.name, PLAIN),
        )

    groups, several = _groups(report), len(report.ranks) > 1
    when = sentences_of("moment", {divided.moment: True, "phase": divided.phase})
    figures = {
        "when": when,
        "alike": several and len(groups) == 1 and _few([each.label for each in groups[0]]),
        "label": several and rank.label,
        "failed": rank.oom is not None,
        "least": rank.budget.headroom_bytes is not None,
    }
    title = sentences_of("divided_device", figures)
    return Bar(title, [*map(share, rows)], 100 * (total or whole) / whole)


def _bars(bar: Bar, cells: int) -> Section:
    """Return the device by owner as a table, with bars of characters."""
    widest = max(share.width for share in bar.shares)

    def drawn(share: Share) -> str:
        drawn = bar_of(share.width / widest, cells)
        return text("{bar}   {note}", bar=drawn, note=share.note) if share.note else drawn

    columns = [Column("", "title"), Column("", "size", right=True)]
    columns += [Column("", "percent", right=True)] if bar.shares[0].percent else []
    return table(bar.title, [*columns, Column("", drawn)], bar.shares)


def _owners(divided: DividedDevice) -> list[ItemPart]:
    """Return the owners worth a row, the largest first, what is free behind them."""
    last = [row for row in divided.owners if row.name in _LAST]
    first = [row for row in divided.owners if row.bytes and row not in last]
    first.sort(key=lambda row: -row.bytes)
    shown = [row for row in first if abs(row.bytes) >= _LEAST_BYTES] or first
    room = _OWNERS - len(last) - 1
    if len(rest := shown[room:]) > 1:
        title = text("{count} more owners", count=len(rest))
        size = sum(row.bytes for row in rest)
        shown = [*shown[:room], ItemPart("others", title, size, rest[0].how)]
    return [*shown, *last]


def _outside(divided: DividedDevice) -> Text:
    """Return what non-torch memory is, the largest first."""
    sizes: Counter[str] = Counter()
    memory, unnamed = divided.memory, "communicators_unnamed"
    parts = [] if memory is None else [each for each in memory.parts if each.component == unnamed]
    for part in [] if memory is None else [*memory.rows, *parts]:
        name = part.component.partition(":")[0]
        if name not in ("allocated", "reserved_not_allocated", "free", "other_processes"):
            sizes[name] += part.bytes or 0
    titles = {
        **OWNER_TITLES,
        "graph": text("graphs outside torch"),
        unnamed: text("other HCCL memory"),
    }
    return join(
        ", ",
        (
            text("{title} {size:size}", title=titles.get(name, name), size=size)
            for name, size in sizes.most_common(3)
            if size >= _LEAST_BYTES
        ),
    )


# Ranks that differ


def _groups(report: Report) -> list[list[RankReport]]:
    """Return ranks whose figures print alike together."""

    def key(rank: RankReport) -> str:
        divided = divided_device(rank)
        rows = [] if divided is None else divided.owners
        sizes = [*_figures(rank).values(), *(row.bytes for row in rows)]
        return repr([*map(format_gib, sizes), *(row.name for row in rows)])

    return group_ranks(report.ranks, key)


def _figures(rank: RankReport) -> dict[str, float | None]:
    """Return what ranks are compared by: title -> bytes."""
    budget = rank.budget
    return {
        text("KV cache"): budget.engine_kv_cache_bytes,
        text("headroom"): budget.headroom_bytes,
        **{title_of(name): size for name, size in budget.subtracted.items()},
        text("graph memory"): rank.figures.get("graph_bytes"),
        text("free at the start"): rank.initial_free_bytes,
    }


def _differing(report: Report, most: int) -> Section:
    """Return what differs between ranks, side by side: of many the worst, the median, the best."""
    ordered = sorted(report.ranks, key=_by_room)
    groups = sorted(_groups(report), key=lambda group: _by_room(group[0]))
    heads = [_few([rank.label for rank in group], 18) for group in groups]
    shown = [group[0] for group in groups]
    if len(groups) > 3:
        shown = [ordered[0], ordered[len(ordered) // 2], ordered[-1]]
        heads = [
            text("worst: {label}", shown[0]),
            text("median: {label}", shown[1]),
            text("best: {label}", shown[2]),
        ]
    per_rank = [_figures(rank) for rank in shown]
    rows = []
    for title in dict.fromkeys(title for figures in per_rank for title in figures):
        cells = [format_gib(figures.get(title)) for figures in per_rank]
        if len(set(cells)) > 1:
            rows.append(Row([title, *cells], indent=1))
    columns = [Column(text("Ranks that differ, GiB"), "")]
    columns += [Column(head, "", right=True) for head in heads]
    return table("", columns, rows[:most])


# The start-up


def _start_up(on: Paper, report: Report, rank: RankReport, most: int) -> Section:
    """Return the phases that changed the device, before and after."""

    def edges(each: Passage, name: str) -> str:
        sizes = each.edges(name)
        return "-" if sizes == [None, None] else " → ".join(map(format_gib, sizes))

    title = text("Start-up, GiB")
    if len(_groups(report)) > 1:
        title = text("Start-up of {label}, GiB", rank)

    def took(each: Passage) -> str:
        return text("open") if each.open else number(each.seconds, ".1f")

    timed = {"timed": report.run.evidence.no_times is None}
    read: dict[str, Values] = {name: partial(edges, name=name) for name in _START_UP}
    found = foremost(_telling(list(passages_of(rank).values())), most, _changed)
    columns = [Column(title, "name"), *columns_of("start_up", timed, took=took, **read)]
    return table(
        "",
        columns,
        found,
        wide=on.wide,
        simulated=on.simulated,
        look=lambda each: Look(BAD if each.open else PLAIN, indent=1),
    )


def _changed(each: Passage) -> float:
    """Return the most that a figure changed in a phase, bytes; inf of one that was not left."""
    pairs = [each.edges(name) for name in _START_UP]
    known = [abs(new - old) for old, new in pairs if old is not None and new is not None]
    return inf if each.open else max(known, default=0)


def _telling(rows: list[Passage]) -> list[Passage]:
    """Return passages that changed the device; those in one stand for it if they are all of it."""
    if not rows or rows[0].name == "shutdown":
        return []
    row, *rest = rows
    within = list(takewhile(lambda each: each.indent > row.indent, rest))
    after = _telling(rest[len(within) :])
    if row.name.partition(" ")[0] in ("request", "stage", "oom") or _changed(row) < _LEAST_BYTES:
        return after
    inside = [
        each for each in within if each.indent == row.indent + 1 and _changed(each) >= _LEAST_BYTES
    ]
    named = any(not each.name.startswith("empty_cache") for each in inside)
    divided = named and inside[-1].open
    if named and not row.open:
        ends = _printed(inside[0], 0), _printed(inside[-1], 1)
        divided = ends == (_printed(row, 0), _printed(row, 1))
    return [*(_telling(within) if divided else [row]), *after]


def _printed(each: Passage, side: int) -> list[str]:
    """Return what is printed of a passage, before or after."""
    return [format_gib(each.edges(name)[side]) for name in _START_UP]


# The equation


def _equation(on: Paper, rank: RankReport) -> list[Line]:
    """Return the equation with its values in one line, and what it does not subtract."""
    budget, form = rank.budget, form_of(rank.budget.equation)
    if budget.override or form is None or not only_known(budget.subtracted.values()):
        return []
    asked = {
        "base": budget.device_total_bytes or rank.device_total_bytes,
        "share": budget.gpu_memory_utilization,
        "requested_bytes": budget.requested_bytes,
    }
    if form.base != "device_total_bytes":
        asked |= {"base": rank.figures.get(form.base), "share": rank.figures.get(form.share)}
    parts = [sentences_of("asked_of_device", asked)]
    for name, size in budget.subtracted.items():
        if size is None or abs(size) >= _LEAST_BYTES // 2:
            title = modelled(title_of(name), on.simulated and is_device_wide(name))
            parts.append(sentences_of("term", {"bytes": size, "title": title}))
    divisor = divisor_of(budget.equation)
    figures = {
        "sum": join(" - ", parts),
        "divisor": divisor if divisor > 1 else None,
        "size": either(budget.kv_cache_bytes, budget.engine_kv_cache_bytes),
    }
    lines = [Line(text("Equation {equation}", budget), sentences_of("equation", figures))]
    left = [row for row in budget.not_subtracted if (row.bytes or 0) >= _LEAST_BYTES]
    left.sort(key=lambda row: -(row.bytes or 0))
    said = join(", ", (text("{title} {size:size}", row, size=row.bytes) for row in left))
    return [*lines, Line(text("not subtracted"), said)] if left else lines


# What to do


def _offers(report: Report, rank: RankReport | None) -> list[Line]:
    """Return what a run that started leaves to gain, and what its findings ask for."""
    found, budgets = [], [each.budget for each in report.ranks]
    if (more := more_kv_cache(report.ranks)) is not None:
        found.append(Line(text("more KV cache"), sentences_of("more_kv_cache", vars(more))))
    elif report.run.planned_only and all(each.device_verdict == "fits" for each in budgets):
        after = text("how much fits is known after graphs and warm-up: plan with --until ready")
        found.append(Line(text("more KV cache"), after))
    budget = Budget() if rank is None else rank.budget
    fits, size = budget.fits_request_bytes, budget.engine_kv_cache_bytes
    free = budget.takes_fixed_size and budget.override is None and budget.gpu_memory_utilization
    known = all(each.bytes is not None for each in budget.not_subtracted)
    if fits and size and free and known and 0 < fits < size - _LEAST_BYTES:
        least = min(each.fits_request_bytes or fits for each in budgets)
        what = text("stay within {gpu_memory_utilization}", budget)
        argument = f"{_SIZE} {least}"
        used = text("{argument}: now {size:size} more is used", argument=argument, size=size - fits)
        found.append(Line(what, used))
    told: dict[str, Line] = {}
    for view in finding_views(report):
        if view.action and (view.severity != "info" or not found):
            # of sizes for the KV cache one, that of the gravest
            key = _SIZE if _SIZE in view.action else view.id
            told.setdefault(key, Line(view.id, text("{title}: {action}", view)))
    asked = [*told.values()][: max(1, 3 - len(found))]
    careful = any(each.device_verdict not in ("fits", None) for each in budgets)
    return [*asked, *found] if careful else [*found, *asked]


def _cures(report: Report, rank: RankReport | None) -> list[Line]:
    """Return what makes room, each with whether it is enough; what is not enough comes last."""
    remedies = [] if rank is None or rank.oom is None else rank.oom.remedies
    told = [] if report.failure is None else report.failure.cures
    planned = [cure.change for cure in told if cure.enough in ("checked", "no")]
    remedies = [row for row in remedies if row.argument not in planned]
    cures, rows = list[Line](), list[Line]()
    for row in sorted(remedies, key=lambda row: row.bytes is None):
        figures = vars(row) | {
            row.bound or "": True,
            "how": how_title(row),
            "short": row.enough is False,
        }
        style = {True: GOOD, False: MUTED, None: PLAIN}[row.enough]
        rows.append(Line(row.argument, sentences_of("remedy", figures, ": "), style))
    known = " ".join(row.argument for row in remedies)
    for cure in told:
        change, why = said_of_cure(cure)
        if change not in known and cure.enough != "no":
            sure = cure.enough in ("checked", "computed")
            cures.append(Line(change, why, GOOD if sure else PLAIN))
    named = planned or (report.failure is not None and report.failure.kind != "other")
    order = GOOD, PLAIN, MUTED
    found = [*cures, *rows] if named else [*rows, *cures]
    return sorted(found, key=lambda line: order.index(line.style))


# The rest


def _starts(screen: FirstScreen, width: int) -> Section:
    """Return the engine starts of a log, the last of which the rest is about."""
    section = starts_section(screen.reports[-_STARTS:], width)
    name = screen.where or screen.report.run.id.rpartition("#")[0] or "LOG"
    note = text("below: the last start; another one: memprof explain {name}#1", name=name)
    title = text("{count} engine starts", count=len(screen.reports))
    return replace(section, title=title, notes=[note])


def _not_in_the_log(report: Report) -> list[Line]:
    """Return what a log does not tell, in one line."""
    ranks = report.ranks
    if report.run.source != "log":
        return []
    terms = {name for rank in ranks for name in rank.budget.subtracted}
    known: dict[str, list[object]] = {
        text("release"): [report.run.engine_version],
        text("device total"): [rank.device_total_bytes for rank in ranks],
    }
    for name in sorted(terms) or ["weights", "peak_activation", "non_torch"]:
        figure = f"{name}_bytes"
        read = [either(rank.budget.term(name), rank.figure(figure)) for rank in ranks]
        known[title_of(name)] = [*read]
    known[text("KV cache")] = [rank.budget.engine_kv_cache_bytes for rank in ranks]
    known[text("KV tokens")] = [rank.kv.tokens for rank in ranks]
    known[text("memory at the phases")] = [rank.phases or None for rank in ranks]
    absent = [name for name, values in known.items() if all(each is None for each in values)]
    return [Line(text("not in this log"), join(", ", absent), MUTED)] if absent else []


def _more(screen: FirstScreen) -> list[Line]:
    """Return where the rest is: commands that can be copied."""
    command = "explain" if screen.report.run.evidence.partial else "report"
    where = "LOG" if screen.where == "-" else screen.where  # a pipe is read once
    whole = " ".join(filter(None, ("memprof", command, where, "--full")))
    lines = [
        Line(text("more"), text("--section NAME, --format html, or the whole report:"), MUTED),
        Line("", whole, CODE),
    ]
    count = len(finding_views(screen.report))
    findings = Line(text("findings"), f"{count}: --section findings", MUTED)
    return [findings, *lines] if count else lines
