"""What a comparison of two runs says, before a reporter decides how it looks: why first, then what, then where."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from vllm_memprof.accounting.model import RunSummary
from vllm_memprof.accounting.quantities import (
    KV_TITLES,
    NEVER_MODELLED_ROWS,
    is_device_wide,
    title_of,
)
from vllm_memprof.compare.causes import (
    BLOCKS,
    METHOD,
    MIXED,
    RANK,
    REQUEST,
    RESIDUAL,
    ROUNDING,
    SIZE,
    STATE,
    UNKNOWN,
    Cause,
    Side,
)
from vllm_memprof.compare.diff import Diff, RankDiff, TermDiff
from vllm_memprof.compare.phases import OwnerDiff, PhaseDiff
from vllm_memprof.report.sections.base import (
    BAD,
    GOOD,
    MODELLED_MARK,
    MUTED,
    PLAIN,
    SHOWN_GROUPS,
    TOTAL,
    Column,
    Row,
    Section,
    fold,
    number,
)
from vllm_memprof.units import GIB, format_bytes, format_gib

#: Quantities that the device's counters may divide by owner; rows of a device that are no owner's.
_OF_OWNERS = {"initial_non_torch", "non_torch"}
_NOT_OWNERS = {*NEVER_MODELLED_ROWS, "unaccounted"}
_PHASE_FIELDS = (
    ("Reserved", "reserved_bytes"),
    ("Allocated peak", "allocated_peak_bytes"),
    ("Allocated", "allocated_bytes"),
    ("Non-torch", "non_torch_bytes"),
    ("Free", "device_free_bytes"),
)


def head(diff: Diff) -> list[tuple[str, str]]:
    """The lines that name both runs: (what, text)."""
    served = diff.served
    granted = (None, None) if served is None else (served.a_granted, served.b_granted)
    lines = [
        ("A", _run_text(diff.a, granted[0], diff.a_kv_tokens)),
        ("B", _run_text(diff.b, granted[1], diff.b_kv_tokens)),
        ("B less A", verdict(diff)),
    ]
    because = _because(served) if served is not None else ""
    lines += [("because", because)] if because else []
    return [*lines, *(("note", note) for note in diff.notes)]


def verdict(diff: Diff) -> str:
    """The result in one sentence."""
    served = diff.served
    size = None if served is None else served.difference_bytes
    if served is None or size is None:
        return "no difference of KV cache to explain"
    text = "the same KV cache" if size == 0 else f"KV cache {_difference(size)}"
    if diff.difference_tokens is not None:
        text += f", {_signed(diff.difference_tokens)} tokens"
    if served.causes_bytes != size:
        return f"{text}; the causes do not add up to it"
    unknown = sum(cause.bytes or 0 for cause in served.causes if cause.kind == UNKNOWN)
    if unknown:
        return f"{text}; of it by causes that are not known: {_difference(unknown)}"
    if "log" in (diff.a.source, diff.b.source):
        reach = f", ±{served.tolerance_bytes:,} bytes" if served.tolerance_bytes else ""
        return f"{text}; the causes add up to it within the printed digits{reach}"
    return f"{text}; the causes add up to it to the byte"


def _difference(size: int) -> str:
    """GiB where they show anything, and bytes."""
    exact = f"{size:+,} bytes"
    return f"{_signed_gib(size)} GiB ({exact})" if abs(size) >= GIB // 200 else exact


def _run_text(run: RunSummary, granted: int | None, tokens: int | None) -> str:
    engine = " ".join(part for part in (run.engine, run.engine_version) if part) or "engine unknown"
    device = run.device or "device unknown"
    device += f" [simulated: profile {run.device_profile or 'unknown'}]" if run.simulated else ""
    text = f"{run.model}, {engine}, {device}, {run.status}"
    if granted is not None:
        text += f": KV cache {format_gib(granted, 4)} GiB"
        text += f", {format_bytes(tokens)} tokens" if tokens is not None else ""
    return text


#: Values of so many characters are cut to what differs.
_LONG = 32
#: A cause that changes tokens and no bytes.
_TOKENS_ALONE = "tokens alone"
#: What the causes of a kind have in common, in the order of the sentence.
_BECAUSE = {
    REQUEST: "by what was asked for",
    METHOD: "by what one equation subtracts and the other does not",
    MIXED: "by quantities that a run does not tell apart",
    STATE: "by what both subtract, held in other sizes",
    SIZE: "by a fixed size",
    RANK: "by the rank that has the least",
    RESIDUAL: "by residuals: not what the equations give",
    ROUNDING: "by rounding",
    UNKNOWN: "not known",
}


def _because(served: RankDiff) -> str:
    parts = []
    for kind, text in _BECAUSE.items():
        sizes = [cause.bytes for cause in served.causes if cause.kind == kind and cause.bytes]
        if sizes:
            size = sum(sizes)
            parts.append(
                f"{_signed_gib(size)} GiB {text}"
                if abs(size) >= GIB // 200
                else f"{size:+,} bytes {text}"
            )
    return "; ".join(parts)


def diff_sections(diff: Diff, width: int) -> list[Section]:
    """All tables of a comparison, the causes first.

    Args:
        diff: the two runs.
        width: characters that a line has; from 110 on, tables gain columns.
    """
    wide = width >= 110
    found = []
    if diff.served is not None:
        found.append(_cause_section(diff, diff.served, _label(diff.served, diff.ranks), wide))
        found += _other_ranks(diff, diff.served, wide)
    found += _changed_section(diff)
    if diff.served is not None:
        found.append(_term_section(diff, diff.served))
        found += _phase_section(diff, diff.served, width)
        found += _owner_sections(diff.served)
    found += _kv_section(diff)
    found += _finding_section(diff)
    return found


def _label(served: RankDiff, ranks: Sequence[RankDiff]) -> str:
    """The ranks that the causes of ``served`` hold for."""
    alike = [rank for rank in ranks if rank.a_label == rank.b_label and _key(rank) == _key(served)]
    if served.a_label == served.b_label and alike:
        return fold([rank.a_label for rank in alike])
    return (
        served.a_label
        if served.a_label == served.b_label
        else f"{served.a_label} of A, {served.b_label} of B"
    )


def _key(rank: RankDiff) -> Hashable:
    return (
        rank.a_granted,
        rank.b_granted,
        tuple((cause.names, cause.bytes) for cause in rank.causes if cause.bytes),
    )


def _other_ranks(diff: Diff, served: RankDiff, wide: bool) -> list[Section]:
    groups: dict[Hashable, list[RankDiff]] = {}
    for rank in diff.ranks:
        if _key(rank) != _key(served):
            groups.setdefault(_key(rank), []).append(rank)
    found = []
    for members in list(groups.values())[:SHOWN_GROUPS]:
        found.append(
            _cause_section(
                diff, members[0], fold([rank.b_label for rank in members]), wide, others=True
            )
        )
    if len(groups) > SHOWN_GROUPS:
        found[-1].notes.append(f"{len(groups) - SHOWN_GROUPS} more groups of ranks are in the JSON")
    return found


def _cause_section(
    diff: Diff, rank: RankDiff, label: str, wide: bool, others: bool = False
) -> Section:
    priced = any(cause.kv_tokens is not None for cause in rank.causes)
    columns = [Column("", right=False), Column("A holds"), Column("B holds")]
    columns += [Column("KV cache, GiB")] if wide else []
    columns += [Column("KV, bytes")] + ([Column("tokens")] if priced else [])
    columns += [Column("Why", right=False)] if wide else []

    def line(
        title: str, held: Sequence[str], size: int | None, tokens: str, why: str, style: str = PLAIN
    ) -> Row:
        total = style == TOTAL
        gib = [format_gib(size, 4) if total else _signed_gib(size, 4)] if wide else []
        text = format_bytes(size) if total else _signed(size)
        if why == _TOKENS_ALONE:
            gib, text = [""] * len(gib), ""
        return Row(
            [title, *held, *gib, text, *([tokens] if priced else []), *([why] if wide else [])],
            style=style,
        )

    shown = [cause for cause in rank.causes if cause.bytes != 0 or cause.kind == BLOCKS]
    rows = [line("KV cache of A", ["", ""], rank.a_granted, _tokens(diff.a_kv_tokens), "", TOTAL)]
    for cause in shown:
        cells = [_held(cause, cause.a), _held(cause, cause.b)]
        worth = "-" if cause.kv_tokens is None else _signed(cause.kv_tokens)
        rows.append(
            line(
                _cause_title(diff, cause),
                cells,
                cause.bytes,
                worth,
                _why(rank, cause),
                _style(cause),
            )
        )
    rows.append(
        line("= KV cache of B", ["", ""], rank.b_granted, _tokens(diff.b_kv_tokens), "", TOTAL)
    )
    rows.append(_sum_row(rank, len(columns), wide))
    title = "Why the KV budget differs" if others else "Why the KV cache differs"
    title = title if rank.difference_bytes is not None else "KV budgets side by side"
    return Section(f"{title}, {label}", columns, rows, _cause_notes(rank, shown, brief=others))


def _sum_row(rank: RankDiff, cells: int, wide: bool) -> Row:
    size, total = rank.difference_bytes, rank.causes_bytes
    text = "B less A = sum of the causes"
    if size is None or total is None:
        return Row([f"{text}: not known", *[""] * (cells - 1)], style=MUTED)
    good = size == total
    gib = [_signed_gib(size, 4)] if wide else []
    row = [f"{text} {'✓' if good else '✗'}", "", "", *gib, _signed(size)]
    return Row([*row, *[""] * (cells - len(row))], style=GOOD if good else BAD)


def _cause_notes(rank: RankDiff, shown: Sequence[Cause], brief: bool) -> list[str]:
    left_out = any(
        not side.subtracts and side.held_bytes is not None
        for cause in shown
        for side in (cause.a, cause.b)
    )
    notes = (
        ["GiB; in brackets: held, and subtracted by no term of that run's equation"]
        if left_out and not brief
        else []
    )
    same = [cause.title for cause in rank.causes if cause.bytes == 0 and cause.kind == STATE]
    same += (
        ["requested"]
        if any(cause.kind == REQUEST and cause.bytes == 0 for cause in rank.causes)
        else []
    )
    if same:
        notes.append(f"the same in both, to the byte: {', '.join(same)}")
    unknown = [cause.title for cause in rank.causes if cause.kind == UNKNOWN]
    if unknown and rank.difference_bytes is not None:
        notes.append(
            "not known: a run does not tell of it, so it is what the granted KV cache leaves"
        )
    notes += _owner_notes(rank)
    if rank.tolerance_bytes:
        notes.append(
            f"from printed digits: the difference is known to ±{rank.tolerance_bytes:,} bytes"
        )
    return notes


def _owner_notes(rank: RankDiff) -> list[str]:
    """Whose non-torch memory it is, where counters of the device tell."""
    if not any(set(cause.names) & _OF_OWNERS for cause in rank.causes if cause.bytes):
        return []
    owners = [
        owner
        for owner in rank.owners
        if owner.phase == "profile_run" and owner.component not in _NOT_OWNERS
    ]
    parts = [
        f"{owner.component} {_signed(_less(owner.b, owner.a))}"
        for owner in owners
        if owner.a is not None and owner.b is not None and owner.a != owner.b
    ]
    if not parts or {owner.component for owner in owners} <= {"npu_workspace", "other_non_torch"}:
        return []
    return [f"non-torch memory after profile_run by owner, B less A in bytes: {', '.join(parts)}"]


def _tokens(count: int | None) -> str:
    return "-" if count is None else format_bytes(count)


def _style(cause: Cause) -> str:
    return {RESIDUAL: BAD, UNKNOWN: BAD, ROUNDING: MUTED, BLOCKS: MUTED}.get(cause.kind, PLAIN)


def _cause_title(diff: Diff, cause: Cause) -> str:
    simulated = diff.a.simulated or diff.b.simulated
    mark = f" {MODELLED_MARK}" if simulated and any(map(is_device_wide, cause.names)) else ""
    return f"{'not known: ' if cause.kind == UNKNOWN else ''}{cause.title}{mark}"


def _held(cause: Cause, side: Side) -> str:
    """What a run held, GiB; in brackets what its equation leaves out."""
    if side.subtracts and side.subtracted_bytes is not None:
        text = format_gib(side.subtracted_bytes, 4)
        over = None if side.held_bytes is None else side.held_bytes - side.subtracted_bytes
        return (
            text
            if not over or len(side.subtracts) == len(cause.names)
            else f"{text} ({format_gib(over, 4)})"
        )
    return "" if side.held_bytes is None else f"({format_gib(side.held_bytes, 4)})"


def _why(rank: RankDiff, cause: Cause) -> str:
    if cause.kind == STATE:
        return "subtracted by both"
    if cause.kind in (METHOD, MIXED):
        names = (rank.a_equation, rank.b_equation)
        a, b = names if names[0] != names[1] and None not in names else ("A", "B")
        if not cause.a.subtracts or not cause.b.subtracts:
            return f"subtracted by {a if cause.a.subtracts else b} alone"
        return f"{a}: {_subtracted(cause, cause.a)}; {b}: {_subtracted(cause, cause.b)}"
    return {
        REQUEST: "asked for",
        SIZE: "--kv-cache-memory-bytes",
        RESIDUAL: "not balanced",
        UNKNOWN: "what the rest leaves",
        BLOCKS: _TOKENS_ALONE,
    }.get(cause.kind, "")


def _subtracted(cause: Cause, side: Side) -> str:
    if len(side.subtracts) == len(cause.names):
        return "all of it"
    return " + ".join(title_of(name) for name in side.subtracts)


def _changed_section(diff: Diff) -> list[Section]:
    if not diff.changed:
        return [Section("What was given: nothing differs that the records hold", [], [])]
    columns = [Column("", right=False), Column("A", right=False), Column("B", right=False)]
    rows: list[Row] = []
    kinds: set[str] = set()
    for row in diff.changed:
        if row.kind not in kinds:
            rows.append(Row([row.kind, "", ""], style=MUTED))
        kinds.add(row.kind)
        rows.append(Row([row.name, *_given(row.a, row.b)], indent=1))
    return [Section("What was given", columns, rows)]


def _given(a: str | None, b: str | None) -> tuple[str, str]:
    """Both values; of two long paths what differs."""
    if a is None or b is None or min(len(a), len(b)) < _LONG:
        return ("-" if a is None else a, "-" if b is None else b)
    left, right = a.split("/"), b.split("/")
    same = next((i for i, (x, y) in enumerate(zip(left, right, strict=False)) if x != y), 0)
    return (f"…/{'/'.join(left[same:])}", f"…/{'/'.join(right[same:])}") if same > 1 else (a, b)


def _term_section(diff: Diff, rank: RankDiff) -> Section:
    rows = []
    for term in rank.terms:
        if term.a is None and term.b is None:
            continue
        if term.name == "gpu_memory_utilization":
            rows.append(Row(["× gpu_memory_utilization", number(term.a), number(term.b), ""]))
            continue
        style = TOTAL if term.name in ("requested", "kv_cache") else PLAIN
        cells = [_level(term.a), _level(term.b), _signed(_less(term.b, term.a))]
        rows.append(Row([_term_title(diff, term), *cells], style=style))
    columns = [
        Column("", right=False),
        Column("A, GiB"),
        Column("B, GiB"),
        Column("B less A, bytes"),
    ]
    formulas = [("A", rank.a_equation, rank.a_formula), ("B", rank.b_equation, rank.b_formula)]
    notes = [f"{run}, {equation}: {formula}" for run, equation, formula in formulas if formula]
    return Section(f"Budget equations, term by term, {_pair(rank)}", columns, rows, notes)


def _term_title(diff: Diff, term: TermDiff) -> str:
    plain = {
        "device_total": "  device total",
        "requested": "= requested",
        "kv_cache": "= KV cache, the engine's figure",
        "residual": "  residual",
        "fits_request_kv_cache": "  honest KV cache",
    }
    if term.name in plain:
        return plain[term.name]
    mark = (
        f" {MODELLED_MARK}"
        if (diff.a.simulated or diff.b.simulated) and is_device_wide(term.name)
        else ""
    )
    title = title_of(term.name) + mark
    if term.a_subtracted or term.b_subtracted:
        return f"- {title}"
    return f"  {title}, not subtracted"


def _pair(rank: RankDiff) -> str:
    return (
        rank.b_label
        if rank.a_label == rank.b_label
        else f"{rank.a_label} of A, {rank.b_label} of B"
    )


def _phase_section(diff: Diff, rank: RankDiff, width: int) -> list[Section]:
    shown = [
        row for row in rank.phases if row.path[-1] != "empty_cache"
    ]  # the phase around it ends with its reading
    if not shown:
        return []
    wide = width >= 110
    fields = [
        field
        for field in _PHASE_FIELDS
        if width >= 160 or field[0] in ("Reserved", "Allocated peak", "Non-torch")
    ]
    mark = f" {MODELLED_MARK}" if diff.a.simulated or diff.b.simulated else ""
    columns = [Column("Phase", right=False), *([Column("s")] if wide else [])]
    columns += [Column(title + (mark if title == "Non-torch" else "")) for title, _ in fields]
    rows = []
    for row in shown:
        lone = " (A alone)" if not row.b_count else " (B alone)" if not row.a_count else ""
        seconds = [_seconds(row)] if wide else []
        cells = [_after(*row.values(name), wide) for _, name in fields]
        rows.append(Row([row.path[-1] + lone, *seconds, *cells], indent=len(row.path) - 1))
    what = "A → B and the difference" if wide else "B and its difference to A"
    return [Section(f"Phases, GiB after each: {what}, {_pair(rank)}", columns, rows)]


def _seconds(row: PhaseDiff) -> str:
    texts = ["-" if value is None else f"{value:.1f}" for value in (row.a_seconds, row.b_seconds)]
    return " → ".join(texts)


def _after(a: int | None, b: int | None, wide: bool) -> str:
    if a is None or b is None:
        return f"{format_gib(a)} → {format_gib(b)}" if wide or b is None else format_gib(b)
    change = "=" if a == b else _signed_gib(b - a)
    return (
        f"{format_gib(a)} → {format_gib(b)} {change:>6}" if wide else f"{format_gib(b)} {change:>6}"
    )


def _owner_sections(rank: RankDiff) -> list[Section]:
    found = []
    columns = [
        Column("Owner", right=False),
        Column("A, GiB"),
        Column("B, GiB"),
        Column("B less A, bytes"),
    ]
    moments = dict.fromkeys((owner.phase, owner.edge) for owner in rank.owners)
    for phase, edge in moments:
        owners = [owner for owner in rank.owners if (owner.phase, owner.edge) == (phase, edge)]
        rows = [
            _owner_row(owner)
            for owner in owners
            if owner.a or owner.b or owner.component == "unaccounted"
        ]
        found.append(Section(f"Device memory {edge} {phase}, {_pair(rank)}", columns, rows))
    return found


def _owner_row(owner: OwnerDiff) -> Row:
    cells = [owner.component, _level(owner.a), _level(owner.b), _signed(_less(owner.b, owner.a))]
    return Row(cells, style=MUTED if owner.component == "unaccounted" else PLAIN)


def _kv_section(diff: Diff) -> list[Section]:
    def text(name: str, value: int | float | None) -> str:
        return (
            ("-" if value is None else f"{value:.2f}x")
            if name == "max_concurrency"
            else number(value, ",")
        )

    rows = []
    for row in diff.kv:
        if row.a is not None or row.b is not None:
            less = _less(row.b, row.a)
            change = (
                "-"
                if less is None
                else f"{less:+.2f}"
                if isinstance(less, float)
                else _signed(less)
            )
            cells = [
                KV_TITLES[row.name],
                text(row.name, row.a),
                text(row.name, row.b),
                change,
            ]
            rows.append(Row(cells, style=TOTAL if row.name == "tokens" else PLAIN))
    columns = [Column("", right=False), Column("A"), Column("B"), Column("B less A")]
    return [Section("KV cache", columns, rows)] if rows else []


def _finding_section(diff: Diff) -> list[Section]:
    both: list[tuple[str, list[str], Callable[[str], Row]]] = [
        ("A", diff.a_findings, lambda name: Row([name, "A alone"])),
        ("B", diff.b_findings, lambda name: Row([name, "B alone"])),
    ]
    rows = [make(name) for _, names, make in both for name in names]
    return (
        [Section("Findings that one run alone has", [Column("", right=False)] * 2, rows)]
        if rows
        else []
    )


def _level(value: int | float | None) -> str:
    text = format_gib(value, 4)
    return "0.0000" if text == "-0.0000" else text


def _less(left: int | float | None, right: int | float | None) -> int | float | None:
    return None if left is None or right is None else left - right


def _signed(value: int | float | None) -> str:
    return "-" if value is None else f"{value:+,}" if value else "0"


def _signed_gib(value: int | float | None, digits: int = 2) -> str:
    if value is None:
        return "-"
    return f"{'+' if value > 0 else ''}{format_gib(value, digits)}"
