"""Runs that lost lines, figures or counters: always a report, never a zero for what is missing, always balanced."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.render import render_json, table
from tests.unit.accounting.builders import DATA
from vllm_memprof.accounting import Report, build_report
from vllm_memprof.errors import RunRecordError
from vllm_memprof.record.codec import to_json
from vllm_memprof.record.loader import load_run
from vllm_memprof.record.spans import edges_of
from vllm_memprof.report.markdown import render_markdown

SOURCE = DATA / "graph_tp2"
FILES = sorted(path.name for path in (SOURCE / "events").iterdir())
LINES = {name: (SOURCE / "events" / name).read_text().splitlines() for name in FILES}
MOST_LINES = max(len(lines) for lines in LINES.values())


@contextmanager
def damaged(edit: Callable[[str, list[str]], bytes]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(shutil.copytree(SOURCE, Path(folder) / "run"))
        for name, lines in LINES.items():
            (run / "events" / name).write_bytes(edit(name, lines))
        yield run


def assert_sound(report: Report) -> None:
    """Whatever is left can be shown, and the books of every snapshot still close."""
    for rank in report.ranks:
        for _, edge in edges_of(rank.phases):
            memory = edge.owners
            assert memory is not None
            if memory.unexplained_bytes is not None:
                known = sum(row.bytes for row in memory.rows if row.bytes is not None)
                assert known + memory.unexplained_bytes == edge.snapshot.device_total_bytes
        budget = rank.budget
        if any(term.subtracted and term.bytes is None for term in budget.terms):
            assert budget.kv_cache_bytes is None
            assert budget.balanced is None
            assert budget.fits_request_bytes is None
        elif budget.kv_cache_bytes is not None and budget.engine_kv_cache_bytes is not None:
            assert budget.residual_bytes == 0
    json.loads(render_json(report))
    render_markdown(report)
    table(report, 80)


@settings(max_examples=40)
@given(
    kept=st.dictionaries(
        st.sampled_from(FILES), st.sets(st.integers(1, MOST_LINES), max_size=MOST_LINES)
    )
)
def test_lines_that_are_gone(kept: dict[str, set[int]]) -> None:
    def edit(name: str, lines: list[str]) -> bytes:
        left = [
            line for i, line in enumerate(lines) if i == 0 or name not in kept or i in kept[name]
        ]
        return ("\n".join(left) + "\n").encode()

    with damaged(edit) as run:
        assert_sound(build_report(load_run(run)))


@settings(max_examples=40)
@given(cuts=st.fixed_dictionaries({name: st.integers(0, 40_000) for name in FILES}))
def test_files_cut_anywhere(cuts: dict[str, int]) -> None:
    def edit(name: str, lines: list[str]) -> bytes:
        return "\n".join(lines).encode()[: cuts[name]]

    with damaged(edit) as run:
        assert_sound(build_report(load_run(run)))


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), share=st.floats(0.0, 0.9))
def test_figures_and_counters_that_are_unknown(seed: int, share: float) -> None:
    chance = random.Random(seed)

    def blank(values: dict[str, Any]) -> dict[str, Any]:
        return {
            key: None if key != "t_ns" and chance.random() < share else value
            for key, value in values.items()
        }

    def edit(name: str, lines: list[str]) -> bytes:
        events = [json.loads(line) for line in lines]
        for event in events:
            for part in ("snapshot", "values"):
                if event.get(part):
                    event[part] = blank(event[part])
            if event["kind"] == "kv_plan":
                event.update(
                    blank({key: event[key] for key in event if key not in ("kind", "t_ns", "role")})
                )
            if event["kind"] == "identity":
                event.update(
                    blank({key: event[key] for key in event if key not in ("kind", "t_ns", "role")})
                )
        return ("\n".join(json.dumps(event) for event in events) + "\n").encode()

    with damaged(edit) as run:
        assert_sound(build_report(load_run(run)))


@settings(max_examples=60)
@given(place=st.integers(0, 30_000), junk=st.binary(min_size=1, max_size=40))
def test_bytes_that_were_overwritten(place: int, junk: bytes) -> None:
    """A disk that lies: the line is dropped, or the file refused; nothing else happens."""

    def edit(name: str, lines: list[str]) -> bytes:
        data = ("\n".join(lines) + "\n").encode()
        return data[:place] + junk + data[place + len(junk) :] if name == FILES[-1] else data

    with damaged(edit) as run:
        try:
            report = build_report(load_run(run))
        except RunRecordError:
            return
    json.dumps(to_json(report))
