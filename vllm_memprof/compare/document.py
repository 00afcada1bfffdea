"""The document of a comparison of two runs: causes first, then inputs, terms and moments."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from operator import methodcaller
from typing import NamedTuple

from vllm_memprof.accounting.model import RunSummary
from vllm_memprof.accounting.readings.quantities import (
    NEVER_MODELLED_ROWS,
    is_device_wide,
    title_of,
)
from vllm_memprof.accounting.summary import device_text, engine_text
from vllm_memprof.accounting.titles import TITLES, title_in
from vllm_memprof.compare.causes import (
    BLOCKS,
    METHOD,
    MIXED,
    REQUEST,
    RESIDUAL,
    ROUNDING,
    SIZE,
    STATE,
    UNKNOWN,
    Cause,
    CausePart,
)
from vllm_memprof.compare.changes import Change
from vllm_memprof.compare.diff import TABLES, Diff, RankDiff, TermDiff
from vllm_memprof.compare.phases import OwnerDiff, PhaseDiff
from vllm_memprof.document import (
    BAD,
    GOOD,
    MUTED,
    PLAIN,
    TOTAL,
    Document,
    Line,
    Row,
    Section,
    note_lines,
)
from vllm_memprof.record.spans import UNEXPLAINED
from vllm_memprof.tables import (
    PAIRS,
    PHASE_COLUMNS,
    SHOWN_GROUPS,
    WIDE,
    Column,
    Look,
    Paper,
    group_ranks,
    modelled,
    more_groups,
    number,
    signed,
    table,
)
from vllm_memprof.text import Text, fold, join, text
from vllm_memprof.units import GIB, Amount, format_bytes, format_gib, format_signed_gib, minus

#: Quantities that the device's counters may divide by owner; rows of a device that are no owner's.
_OF_OWNERS = {"initial_non_torch", "non_torch"}
_NOT_OWNERS = {*NEVER_MODELLED_ROWS, "free"}
#: Terms that are the results.
_TOTALS = ("requested", "kv_cache")
#: Values of so many characters are cut to what differs.
_LONG = 32
#: A cause that changes tokens and no bytes.
_TOKENS_ALONE = text("tokens only")
_WHY = {
    REQUEST: text("requested"),
    STATE: text("subtracted by both"),
    SIZE: "--kv-cache-memory-bytes",
    RESIDUAL: text("the engine's value and the recomputed one differ"),
    UNKNOWN: text("unexplained"),
    BLOCKS: _TOKENS_ALONE,
}
_STYLES = {RESIDUAL: BAD, UNKNOWN: BAD, ROUNDING: MUTED, BLOCKS: MUTED}


def _level(value: int | float | None) -> str:
    shown = format_gib(value, 4)
    return "0.0000" if shown == "-0.0000" else shown


#: A size of both runs, and the difference.
_SIDES = (
    Column("A, GiB", "a", _level),
    Column("B, GiB", "b", _level),
    Column("B - A, bytes", lambda row: minus(row.b, row.a), signed),
)


def diff_document(diff: Diff, width: int) -> Document:
    """Return the whole comparison, its tables laid out for lines of ``width`` characters."""
    served = diff.served
    granted = (None, None) if served is None else (served.a_granted, served.b_granted)
    result = verdict(diff)
    head = [
        Line("A", _run(diff.a, granted[0], diff.a_kv_tokens)),
        Line("B", _run(diff.b, granted[1], diff.b_kv_tokens)),
        Line(text("B - A"), result),
    ]
    terms = [] if served is None else served.terms
    for term in (term for term in terms if term.name == "headroom"):
        for run, size in ("A", term.a), ("B", term.b):
            if size is not None and size < 0:
                short = text(
                    "{run}: {size:size} over the device at the serving peak", run=run, size=-size
                )
                head.append(Line(text("CAREFUL"), short, BAD))
    parts, causes = [], [] if served is None else served.causes
    for kind, title in TITLES["causes"].items():
        sizes = [cause.bytes for cause in causes if cause.kind == kind and cause.bytes]
        if sizes:
            parts.append(TABLES.say("cause", {"title": title, **_size(sum(sizes))}))
    if parts:
        head.append(Line(text("causes"), join("; ", parts)))
    head += note_lines(diff.notes)
    found = []
    if served is not None:
        groups = group_ranks(diff.ranks, _key)
        alike = [rank for rank in diff.ranks if _key(rank) == _key(served)]
        labels = [rank.b_label for rank in alike if rank.a_label == rank.b_label]
        named = served.a_label == served.b_label and labels
        whose = fold(labels) if named else _pair(served)
        found.append(_cause_section(diff, served, whose, width))
        others = [group for group in groups if _key(group[0]) != _key(served)]
        for group in others[:SHOWN_GROUPS]:
            whose = fold([rank.b_label for rank in group])
            found.append(_cause_section(diff, group[0], whose, width, others=True))
        found[-1].notes.extend(more_groups(others, text("the JSON")))
    found.append(_changed_section(diff))
    if served is not None:
        found.append(_term_section(diff, served))
        found += _phase_section(diff, served, width)
        found += _owner_sections(served)
    found += _kv_section(diff)
    only = [(name, text("A only")) for name in diff.a_findings]
    only += [(name, text("B only")) for name in diff.b_findings]
    if only:
        found.append(table(text("Findings of one run only"), PAIRS, only))
    return Document(
        kind="diff",
        title=result,
        head=head,
        sections=found,
        verdict=result,
        whole=text("the JSON"),
        simulated=diff.simulated,
    )


def verdict(diff: Diff) -> Text:
    """Return the result in one sentence."""
    served = diff.served
    size = None if served is None else served.difference_bytes
    if served is None or size is None:
        return text("no difference of KV cache to explain")
    tokens = diff.difference_tokens
    unknown = sum(cause.bytes or 0 for cause in served.causes if cause.kind == UNKNOWN)
    known = {
        "difference": TABLES.say("differs", {"difference": size != 0 and _difference(size)}),
        "tokens": None if tokens is None else signed(tokens),
        "broken": served.causes_bytes != size,
        "unexplained": unknown != 0 and _difference(unknown),
        "exact": "log" not in (diff.a.source, diff.b.source),
        "tolerance": served.tolerance_bytes or None,
    }
    return TABLES.say("verdict", known)


def _size(size: int) -> dict[str, object]:
    """Return bytes, and GiB where they show anything."""
    return {"size": size, "gib": abs(size) >= GIB // 200 and format_signed_gib(size, 2)}


def _difference(size: int) -> Text:
    return TABLES.say("difference", _size(size))


def _run(run: RunSummary, granted: Amount, tokens: Amount) -> Text:
    told = join(", ", [run.model, engine_text(run), device_text(run), run.status])
    if granted is None:
        return told
    size = text("KV cache {size:gib4} GiB", size=granted)
    if tokens is not None:
        size = text("{size}, {tokens:,} tokens", size=size, tokens=tokens)
    return text("{run}: {kv_cache}", run=told, kv_cache=size)


def _pair(rank: RankDiff) -> str:
    if rank.a_label == rank.b_label:
        return rank.b_label
    return text("{a} of A, {b} of B", a=rank.a_label, b=rank.b_label)


def _key(rank: RankDiff) -> Hashable:
    causes = tuple((cause.names, cause.bytes) for cause in rank.causes if cause.bytes)
    return rank.a_granted, rank.b_granted, causes


#: From how many columns on bars and bytes are shown; the longest bar, cells.
WITH_BARS, WITH_BYTES, _BAR_CELLS = 100, 140, 6


class _CauseRow(NamedTuple):
    """A cause, a KV cache, or the sum of the causes; a cell that a row lacks is empty."""

    title: str
    gib: str = ""
    bytes: str = ""
    tokens: str = ""
    percent: str = ""
    bar: str = ""
    a: str = ""
    b: str = ""
    why: str = ""
    style: str = PLAIN
    mark: str = ""


def _signed_bar(share: float) -> str:
    """Return a bar to the left of an axis for a loss, to its right for a gain; 1 is the longest."""
    cells = "█" * round(_BAR_CELLS * abs(share))
    return f"{cells if share < 0 else '':>{_BAR_CELLS}}|{cells if share > 0 else ''}"


def _cause_section(
    diff: Diff, rank: RankDiff, label: str, width: int, others: bool = False
) -> Section:
    def total(title: str, size: Amount, tokens: Amount, mark: str) -> _CauseRow:
        sizes = format_gib(size, 4), format_bytes(size), format_bytes(tokens)
        return _CauseRow(title, *sizes, style=TOTAL, mark=mark)

    def cause_row(cause: Cause) -> _CauseRow:
        why = _why(rank, cause)
        title = modelled(cause.title, diff.simulated and any(map(is_device_wide, cause.names)))
        if cause.kind == UNKNOWN:
            title = text("unknown: {title}", title=title)
        sizes = (format_signed_gib(cause.bytes), signed(cause.bytes))
        size, base = cause.bytes, rank.a_granted
        return _CauseRow(
            title,
            *(("", "") if why is _TOKENS_ALONE else sizes),
            signed(cause.kv_tokens),
            f"{100 * size / base:+.1f}" if size and base and base > 0 else "",
            _signed_bar(size / largest) if size else "",
            _held(cause, cause.a),
            _held(cause, cause.b),
            why,
            _STYLES.get(cause.kind, PLAIN),
        )

    shown = [cause for cause in rank.causes if cause.bytes != 0 or cause.kind == BLOCKS]
    largest = max((abs(cause.bytes or 0) for cause in shown), default=0)
    size, causes = rank.difference_bytes, rank.causes_bytes
    good = size == causes
    figures: dict[str, object] = {
        "labels": label,
        "with_bytes": width >= WITH_BYTES,
        "with_bars": width >= WITH_BARS,
        "priced": any(cause.kv_tokens is not None for cause in rank.causes),
    }
    if size is None or causes is None:
        added_up = _CauseRow(text("B - A = sum of the causes: unknown"), style=MUTED)
    else:
        added_up = _CauseRow(
            text("B - A = sum of the causes"),
            format_signed_gib(size),
            signed(size),
            style=GOOD if good else BAD,
            mark="✓" if good else "✗",
        )
        what = text("KV cache budget") if others else text("KV cache")
        figures |= {"what": what, "difference": _difference(size), "good": good}
    rows = [
        total(text("KV cache of A"), rank.a_granted, diff.a_kv_tokens, ""),
        *map(cause_row, shown),
        total(text("KV cache of B"), rank.b_granted, diff.b_kv_tokens, "="),
        added_up,
    ]
    figures |= _cause_figures(rank, shown, brief=others)
    return TABLES.draw(Paper(width >= WIDE), "causes", rows, figures)


def _cause_figures(rank: RankDiff, shown: Sequence[Cause], brief: bool) -> dict[str, object]:
    """Return what the notes below a table of causes name."""
    sides = [side for cause in shown for side in (cause.a, cause.b)]
    same = [
        cause.title for cause in rank.causes if cause.bytes == 0 and cause.kind in (STATE, REQUEST)
    ]
    unknown = any(cause.kind == UNKNOWN for cause in rank.causes)
    # the owners of non-torch memory, where counters of the device name them
    owners = [
        owner
        for owner in rank.owners
        if owner.phase == "profile_run" and owner.component not in _NOT_OWNERS
    ]
    parts = [
        f"{owner.component} {signed(minus(owner.b, owner.a))}"
        for owner in owners
        if owner.a is not None and owner.b is not None and owner.a != owner.b
    ]
    differ = any(set(cause.names) & _OF_OWNERS for cause in rank.causes if cause.bytes)
    divided = {owner.component for owner in owners} - {"npu_workspace", UNEXPLAINED}
    return {
        "bracketed": not brief
        and any(not side.subtracts and side.held_bytes is not None for side in sides),
        "printed" if rank.tolerance_bytes else "titles": join(", ", same),
        "unknown": unknown and rank.difference_bytes is not None,
        "owners": differ and divided and ", ".join(parts),
        "tolerance": rank.tolerance_bytes or None,
    }


def _held(cause: Cause, side: CausePart) -> str:
    """Return what a run held, GiB; in brackets what its equation does not subtract."""
    if not side.subtracts or side.subtracted_bytes is None:
        return "" if side.held_bytes is None else f"({format_gib(side.held_bytes, 4)})"
    over = None if side.held_bytes is None else side.held_bytes - side.subtracted_bytes
    if not over or len(side.subtracts) == len(cause.names):
        return format_gib(side.subtracted_bytes, 4)
    return f"{format_gib(side.subtracted_bytes, 4)} ({format_gib(over, 4)})"


def _why(rank: RankDiff, cause: Cause) -> str:
    if cause.kind not in (METHOD, MIXED):
        return _WHY.get(cause.kind, "")
    names = (rank.a_equation, rank.b_equation)
    a, b = names if names[0] != names[1] and None not in names else ("A", "B")
    if not cause.a.subtracts or not cause.b.subtracts:
        return text("subtracted by {equation} only", equation=a if cause.a.subtracts else b)

    def subtracted(side: CausePart) -> str:
        if len(side.subtracts) == len(cause.names):
            return text("all of it")
        return join(" + ", [title_of(name) for name in side.subtracts])

    return text(
        "{a}: {a_parts}; {b}: {b_parts}",
        a=a,
        a_parts=subtracted(cause.a),
        b=b,
        b_parts=subtracted(cause.b),
    )


def _changed_section(diff: Diff) -> Section:
    rows: list[Row | Change] = []
    kinds: set[str] = set()
    for change in diff.changed:
        if change.kind not in kinds:
            rows.append(Row([title_in("changes", change.kind), "", ""], style=MUTED))
        kinds.add(change.kind)
        rows.append(change)
    return TABLES.draw(
        Paper(),
        "changes",
        rows,
        {"changed": rows},
        look=lambda _: Look(indent=1),
        given_a=lambda change: _given(change.a, change.b)[0],
        given_b=lambda change: _given(change.a, change.b)[1],
    )


def _given(a: str | None, b: str | None) -> tuple[str, str]:
    """Return both values; of two long paths what differs."""
    if a is None or b is None or min(len(a), len(b)) < _LONG:
        return ("-" if a is None else a, "-" if b is None else b)
    left, right = a.split("/"), b.split("/")
    same = next((i for i, (x, y) in enumerate(zip(left, right, strict=False)) if x != y), 0)
    return (f"…/{'/'.join(left[same:])}", f"…/{'/'.join(right[same:])}") if same > 1 else (a, b)


def _term_section(diff: Diff, rank: RankDiff) -> Section:
    def term_row(term: TermDiff) -> Row | TermDiff:
        if term.name == "gpu_memory_utilization":
            return Row([term.name, number(term.a), number(term.b), ""], mark="×")
        return term

    def look(term: TermDiff) -> Look:
        return Look(TOTAL if term.name in _TOTALS else PLAIN, _term(diff, term)[0])

    rows = [term_row(term) for term in rank.terms if (term.a, term.b) != (None, None)]
    formulas = [("A", rank.a_equation, rank.a_formula), ("B", rank.b_equation, rank.b_formula)]
    notes = [f"{run}, {equation}: {formula}" for run, equation, formula in formulas if formula]
    return TABLES.draw(
        Paper(),
        "terms",
        rows,
        {"labels": _pair(rank)},
        notes,
        look,
        columns=_SIDES,
        term=lambda term: _term(diff, term)[1],
    )


def _term(diff: Diff, term: TermDiff) -> tuple[str, str]:
    """Return a term's mark and title."""
    if own := TITLES["terms"].get(term.name):
        return "=" * (term.name in _TOTALS), own
    title = modelled(title_of(term.name), diff.simulated and is_device_wide(term.name))
    if term.a_subtracted or term.b_subtracted:
        return "-", title
    return "", text("{term}, not subtracted", term=title)


def _phase_section(diff: Diff, rank: RankDiff, width: int) -> list[Section]:
    # the phase around an empty_cache ends with its reading
    shown = [row for row in rank.phases if row.path[-1] != "empty_cache"]
    if not shown:
        return []
    wide = width >= WIDE

    def phase(row: PhaseDiff) -> str:
        name = row.path[-1]
        if row.a_count and row.b_count:
            return name
        return text("{phase} ({run} only)", phase=name, run="A" if row.a_count else "B")

    def seconds(row: PhaseDiff) -> str:
        return " → ".join(
            "-" if each is None else f"{each:.1f}" for each in (row.a_seconds, row.b_seconds)
        )

    def after(sizes: tuple[int | None, int | None]) -> str:
        a, b = sizes
        if a is None or b is None:
            return f"{format_gib(a)} → {format_gib(b)}" if wide or b is None else format_gib(b)
        change = "=" if a == b else format_signed_gib(b - a, 2)
        shown = f"{format_gib(b)} {change:>6}"
        return f"{format_gib(a)} → {shown}" if wide else shown

    columns = []
    for each in PHASE_COLUMNS:
        if each.shown([], width >= 160):
            values = methodcaller("values", each.value)
            marked = each.value == "non_torch_bytes"
            columns.append(replace(each, value=values, unit=after, when=True, marked=marked))
    return [
        TABLES.draw(
            Paper(wide, diff.simulated),
            "phases",
            shown,
            {"wide": wide, "labels": _pair(rank)},
            look=lambda row: Look(indent=len(row.path) - 1),
            columns=columns,
            phase=phase,
            seconds=seconds,
        )
    ]


def _owner_sections(rank: RankDiff) -> list[Section]:
    def look(row: OwnerDiff) -> str:
        return MUTED if row.component == UNEXPLAINED else PLAIN

    found = []
    for phase, edge in dict.fromkeys((row.phase, row.edge) for row in rank.owners):
        rows = [
            row
            for row in rank.owners
            if (row.phase, row.edge) == (phase, edge)
            and (row.a or row.b or row.component == UNEXPLAINED)
        ]
        figures = {edge: True, "phase": phase, "labels": _pair(rank)}
        found.append(
            TABLES.draw(
                Paper(),
                "owners",
                rows,
                figures,
                look=look,
                columns=_SIDES,
                owner=lambda row: title_in("weights", row.component),
            )
        )
    return found


def _kv_section(diff: Diff) -> list[Section]:
    def value(row: TermDiff, side: int | float | None) -> str:
        if row.name == "max_concurrency" and side is not None:
            return f"{side:.2f}x"
        return number(side, ",")

    def change(row: TermDiff) -> str:
        less = minus(row.b, row.a)
        return f"{less:+.2f}" if isinstance(less, float) else signed(less)

    rows = [row for row in diff.kv if (row.a, row.b) != (None, None)]

    def look(row: TermDiff) -> str:
        return TOTAL if row.name == "tokens" else PLAIN

    if not rows:
        return []
    return [
        TABLES.draw(
            Paper(),
            "kv",
            rows,
            look=look,
            titled=lambda row: TITLES["kv"][row.name],
            of_a=lambda row: value(row, row.a),
            of_b=lambda row: value(row, row.b),
            change=change,
        )
    ]
