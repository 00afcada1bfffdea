"""Figures of the page's plots: each is one of report.json, or a sum of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.runs import LOGS, RUNS, report_of
from tests.unit.accounting.builders import TOTAL, gib, process, run_of, snapshot, span
from vllm_memprof.accounting import Report, build_report
from vllm_memprof.accounting.model import RankReport
from vllm_memprof.logs.to_record import read_log
from vllm_memprof.record.schema import Snapshot
from vllm_memprof.record.spans import Span, edges_of
from vllm_memprof.report.plots import MOST_VIEWS, WaterfallBar, plots, waterfall
from vllm_memprof.report.timeline import MOST_MOMENTS, MOST_PEAKS, Timeline


def timeline(report: Report, view: int = 0) -> Timeline:
    found = plots(report).views[view].timeline
    assert found is not None
    return found


@pytest.mark.parametrize("name", RUNS)
def test_every_moment_adds_up_to_what_is_in_use(name: str) -> None:
    """The stack has all rows of report.json but the free memory, and what is not accounted for."""
    report = report_of(name)
    rank, line = report.ranks[0], timeline(report)
    edges = {
        (span.phase, edge.side, round(edge.snapshot.t_ns / 1e9, 6)): edge.owners
        for span, edge in edges_of(rank.phases)
    }
    assert len(line.moments) == _read(rank)
    for i, moment in enumerate(line.moments):
        memory = edges[moment.phase, moment.edge, round(moment.seconds + _start(report), 6)]
        assert memory is not None
        wanted = sum(
            row.bytes for row in memory.rows if row.bytes is not None and row.component != "free"
        )
        wanted += memory.unexplained_bytes or 0
        stacked = sum(owner.bytes[i] or 0 for owner in line.owners)
        assert stacked == wanted
        if line.in_use[i] is not None:
            assert stacked == line.in_use[i]
        tensors = [owner.bytes[i] for owner in line.owners if owner.name.startswith("tensors")]
        allocated = next(row.bytes for row in memory.rows if row.component == "allocated")
        assert sum(size for size in tensors if size is not None) == (allocated or 0)


def _start(report: Report) -> float:
    rows = [row for rank in report.ranks for row in rank.phases]
    return min(s.t_ns for row in rows for s in (row.before, row.after) if s is not None) / 1e9


def _read(rank: RankReport) -> int:
    """Return the number of edges at which an owner was read."""
    divided = [edge.owners for _, edge in edges_of(rank.phases) if edge.owners is not None]
    return sum(any(row.bytes is not None for row in memory.rows) for memory in divided)


def test_tensors_are_divided_by_the_phase_that_allocated_them() -> None:
    report = report_of("recorded_023_tp2")
    line = timeline(report)
    rows = {row.phase: row for row in report.ranks[0].phases if row.depth == 0}
    for phase, title in (
        ("weight_load", "tensors: weights"),
        ("kv_cache_alloc", "tensors: KV cache"),
    ):
        grown = rows[phase].after.allocated_bytes - rows[phase].before.allocated_bytes
        sizes = next(owner.bytes for owner in line.owners if owner.name == title)
        assert set(sizes) == {None, grown}
        for moment, size in zip(line.moments, sizes, strict=True):
            at = (moment.phase, moment.edge)
            if at == (phase, "before"):
                assert size is None
            if at == (phase, "after"):
                assert size == grown
            if at == ("shutdown", "after"):  # which of them are gone nobody knows
                assert size is None


@pytest.mark.parametrize(("unmapped", "tensors", "cached"), [(39, 1, 1), (40.5, None, 0.5)])
def test_memory_that_sleep_unmapped_is_off_the_stack(unmapped, tensors, cached) -> None:
    awake = at(
        1, allocated_bytes=gib(40), reserved_bytes=gib(41), device_free_bytes=TOTAL - gib(41)
    )
    left = {"unmapped_bytes": gib(unmapped), "device_free_bytes": TOTAL - gib(41 - unmapped)}
    line = timeline(
        build_report(
            run_of(process([span("sleep", awake, replace(awake, t_ns=2 * 10**9, **left))]))
        )
    )
    stacks = [{owner.name: owner.bytes[i] for owner in line.owners} for i in range(2)]
    assert (stacks[0]["tensors: other"], stacks[0]["reserved, not allocated"]) == (gib(40), gib(1))
    assert stacks[1].get("tensors: not divided") == (
        None if tensors is None else gib(tensors)
    )  # 0 is no owner
    assert stacks[1]["reserved, not allocated"] == gib(cached)
    assert line.in_use == [gib(41), gib(41 - unmapped)]


def at(seconds: float, **values: int | None) -> Snapshot:
    return replace(snapshot(**{"device_total_bytes": TOTAL, **values}), t_ns=int(seconds * 1e9))


@pytest.mark.parametrize("name", RUNS)
def test_peaks_are_readings_or_what_the_allocator_kept(name: str) -> None:
    report = report_of(name)
    rank, line = report.ranks[0], timeline(report)
    snapshots = [s for row in rank.phases for s in (row.before, row.after) if s is not None]
    for peak in line.peaks:
        if peak.what == "allocated":
            assert peak.bytes in {s.allocated_run_peak_bytes for s in snapshots} | {
                s.allocated_bytes for s in snapshots
            }
        elif peak.exact:
            assert peak.bytes in {
                (rank.device_total_bytes or 0) - s.device_free_bytes
                for s in snapshots
                if s.device_free_bytes is not None
            }
        assert peak.bytes <= (line.worst_bytes or 0)
        assert line.moments[0].seconds <= peak.seconds <= line.moments[-1].seconds
    assert (
        rank.device_total_bytes >= (line.worst_bytes or 0) >= max(size or 0 for size in line.in_use)
    )


def test_the_profile_run_has_its_peaks() -> None:
    peaks = timeline(report_of("recorded_023_tp2")).peaks
    assert [(peak.what, peak.where, peak.bytes, peak.exact) for peak in peaks] == [
        ("allocated", "in mm_profile", 14_650_350_080, False),
        ("in use", "before empty_cache", 15_603_230_310, True),
    ]


def test_a_recorded_failure_is_drawn_where_it_happened() -> None:
    line = timeline(report_of("recorded_oom"))
    (failure,) = (band for band in line.bands if band.phase == "oom")
    around = next(band for band in line.bands if band.phase == "graph_capture")
    assert failure.start == failure.end
    assert around.end is not None
    assert around.start < failure.start < around.end


def test_a_peak_between_readings_is_marked_where_the_allocator_kept_it() -> None:
    low = {
        "reserved_bytes": gib(10),
        "non_torch_bytes": gib(1),
        "device_free_bytes": TOTAL - gib(11),
    }
    before = at(1, **low, reserved_run_peak_bytes=gib(10))
    after = at(3, **low, reserved_run_peak_bytes=gib(30))
    (peak,) = timeline(build_report(run_of(process([span("profile_run", before, after)])))).peaks
    assert (peak.what, peak.bytes, peak.exact, peak.seconds) == ("in use", gib(31), False, 1.0)


def test_bands_are_the_phases() -> None:
    report = report_of("recorded_killed_tp2")
    bands = timeline(report, view=1).bands
    assert [(band.phase, band.depth) for band in bands] == [
        (r.phase, r.depth) for r in report.ranks[1].phases
    ]
    assert [band.phase for band in bands if band.end is None] == ["weight_load"]


def test_hosts_have_clocks_of_their_own() -> None:
    snap = at(1000, allocated_bytes=5)
    far = at(5, allocated_bytes=5)
    a = process([span("weight_load", snap, replace(snap, t_ns=1002 * 10**9))])
    b = process(
        [span("weight_load", far, replace(far, t_ns=6 * 10**9, allocated_bytes=6 * 2**30))],
        host="g",
        rank=1,
        label="TP1",
    )
    views = plots(build_report(run_of(a, b))).views
    assert [view.timeline.moments[0].seconds for view in views if view.timeline] == [0, 0]


@pytest.mark.parametrize("log", LOGS, ids=lambda path: path.stem)
def test_a_log_has_no_timeline_and_says_so(log) -> None:
    for run in read_log(str(log)):
        for view in plots(build_report(run)).views:
            assert view.timeline is None
            assert "log" in (view.no_timeline or "")


def test_many_requests_are_thinned_and_keep_the_fullest() -> None:
    report = report_of("recorded_tp1")
    rank = serving(report.ranks[0], requests=5000)
    line = timeline(replace(report, ranks=[rank]))
    assert len(line.moments) <= MOST_MOMENTS + 1
    assert line.left_out == _read(rank) - len(line.moments)
    assert max(size for size in line.in_use if size is not None) == TOTAL - gib(0.25)
    assert len(line.peaks) <= MOST_PEAKS


def serving(rank: RankReport, requests: int) -> RankReport:
    """The rank with requests of 5 ms after its start-up, one of which all but fills the device."""
    last = next(row for row in reversed(rank.phases) if row.depth == 0 and row.after is not None)
    rows: list[Span] = []
    read = last.edges[-1]
    for i in range(requests):
        order = rank.phases[-1].order + 1 + i
        free = gib(0.25) if i == requests // 3 else read.snapshot.device_free_bytes
        begins = read.snapshot.t_ns + 10**7 * i
        taken = {
            side: replace(read.snapshot, t_ns=t_ns, device_free_bytes=free)
            for side, t_ns in (("before", begins), ("after", begins + 5 * 10**6))
        }
        owners = dict.fromkeys(taken, read.owners)
        rows.append(
            replace(last, phase="request", order=order, parent=None, owners=owners, **taken)
        )
    return replace(rank, phases=[*rank.phases, *rows])


# --- the waterfall


def levels_hold(steps: list[WaterfallBar]) -> None:
    height = None
    for step in steps:
        if step.kind == "level":
            assert height in (None, step.bytes), step.title
            height = step.bytes
        else:
            assert height is not None
            height += step.bytes


@pytest.mark.parametrize("name", RUNS)
def test_the_waterfall_is_the_budget(name: str) -> None:
    report = report_of(name)
    for rank in report.ranks:
        steps, why = waterfall(report, rank)
        if rank.budget.kv_cache_bytes is None:
            assert (steps, why) == ([], "no KV cache was sized: there is no waterfall")
            continue
        assert why is None
        levels_hold(steps)
        budget = rank.budget
        found = {step.title: step.bytes for step in steps}
        assert found["device total"] == rank.device_total_bytes
        assert found["requested"] == budget.requested_bytes
        assert found["KV cache"] == budget.engine_kv_cache_bytes
        assert found["KV cache that fits into requested memory"] == budget.fits_request_bytes
        changes = [-step.bytes for step in steps if step.kind == "change"]
        for part in [*(term for term in budget.terms if term.subtracted), *budget.not_subtracted]:
            assert not part.bytes or part.bytes in changes


@pytest.mark.parametrize("log", LOGS, ids=lambda path: path.stem)
def test_waterfalls_of_logs_hold_or_say_what_is_unknown(log) -> None:
    for run in read_log(str(log)):
        report = build_report(run)
        for rank in report.ranks:
            steps, why = waterfall(report, rank)
            levels_hold(steps)
            assert bool(steps) != bool(why)


def test_what_an_equation_does_besides_is_a_step() -> None:
    report = report_of("recorded_023_tp2")
    rank = report.ranks[0]
    granted = rank.budget.engine_kv_cache_bytes
    halved = replace(
        rank.budget, kv_cache_bytes=granted // 2, engine_kv_cache_bytes=granted // 2 + 7
    )
    steps, _ = waterfall(report, replace(rank, budget=halved))
    levels_hold(steps)
    assert {step.title: step.bytes for step in steps}[
        "other steps of the equation"
    ] == granted // 2 - granted
    assert {step.title: step.bytes for step in steps}["engine - recomputed"] == 7
    fixed = replace(
        rank.budget,
        override="kv_cache_memory_bytes",
        kv_cache_bytes=gib(3),
        engine_kv_cache_bytes=gib(3),
    )
    steps, _ = waterfall(report, replace(rank, budget=replace(fixed, fits_request_bytes=None)))
    levels_hold(steps)
    assert [step.title for step in steps][3:] == ["fixed by --kv-cache-memory-bytes", "KV cache"]


def test_an_unknown_term_is_named_never_drawn_as_nothing() -> None:
    report = report_of("recorded_023_tp2")
    rank = report.ranks[0]
    terms = [
        replace(term, bytes=None) if term.name == "weights" else term for term in rank.budget.terms
    ]
    assert waterfall(report, replace(rank, budget=replace(rank.budget, terms=terms))) == (
        [],
        "not drawn, unknown: weights",
    )
    budget = replace(rank.budget, requested=None)
    assert waterfall(report, replace(rank, budget=budget)) == ([], "not drawn, unknown: requested")
    nothing = replace(rank.budget, engine_kv_cache_bytes=None, kv_cache_bytes=None)
    assert waterfall(report, replace(rank, budget=nothing)) == (
        [],
        "no KV cache was sized: there is no waterfall",
    )


# --- ranks


def test_ranks_that_agree_in_print_share_a_view() -> None:
    assert [view.labels for view in plots(report_of("recorded_023_tp2")).views] == ["TP0-TP1"]
    assert [view.labels for view in plots(report_of("skewed_tp2")).views] == ["TP0", "TP1"]


def test_skew_has_least_most_and_median() -> None:
    report = report_of("skewed_tp2")
    row = next(
        row for row in plots(report).skew if row.title == "Available KV cache memory (engine)"
    )
    sizes = [rank.budget.engine_kv_cache_bytes for rank in report.ranks]
    assert row.bytes == sizes
    assert (row.least, row.least_label, row.most, row.most_label) == (
        sizes[1],
        "TP1",
        sizes[0],
        "TP0",
    )
    assert (row.median, row.spread) == (sizes[1], sizes[0] - sizes[1])
    assert plots(replace(report, ranks=report.ranks[:1])).skew == []


def test_unknown_ranks_do_not_count_in_the_skew() -> None:
    rows = plots(report_of("recorded_killed_tp2")).skew
    weights = next(row for row in rows if row.title == "weights")
    assert None in weights.bytes
    assert weights.spread == 0


def test_of_many_ranks_the_outliers_are_kept() -> None:
    report = report_of("recorded_023_tp2")
    ranks = [jittered(report.ranks[0], i, (i * 37 % 61) * 2**20) for i in range(512)]
    ranks[300] = jittered(report.ranks[0], 300, gib(3))
    drawn = plots(replace(report, ranks=ranks))
    assert len(drawn.views) == MOST_VIEWS
    assert any(view.labels == "TP300" for view in drawn.views)
    headroom = next(row for row in drawn.skew if row.title == "headroom at the serving peak")
    assert (headroom.least_label, headroom.spread) == ("TP300", gib(3))
    assert "TP300" not in drawn.folded.split(", ")
    shown = sum(view.ranks for view in drawn.views)
    assert 0 < shown < 512
    alike = [replace(rank, label=f"TP{i}") for i, rank in enumerate([report.ranks[0]] * 512)]
    assert [(view.labels, view.ranks) for view in plots(replace(report, ranks=alike)).views] == [
        ("TP0-TP511", 512)
    ]


def jittered(rank: RankReport, number: int, more: int) -> RankReport:
    """The rank with more bytes of context, as another card would have."""

    def moved(span: Span) -> Span:
        by = {"context": more, "free": -more}
        taken, owners = {}, {}
        for edge in span.edges:
            assert edge.owners is not None
            rows = [
                replace(r, bytes=None if r.bytes is None else r.bytes + by.get(r.component, 0))
                for r in edge.owners.rows
            ]
            owners[edge.side] = replace(edge.owners, rows=rows)
            free = edge.snapshot.device_free_bytes
            free = None if free is None else free - more
            taken[edge.side] = replace(edge.snapshot, device_free_bytes=free)
        return replace(span, owners=owners, **taken)

    phases = list(map(moved, rank.phases))
    left = None if rank.budget.headroom_bytes is None else rank.budget.headroom_bytes - more
    return replace(
        rank,
        rank=number,
        label=f"TP{number}",
        phases=phases,
        budget=replace(rank.budget, headroom_bytes=left),
    )
