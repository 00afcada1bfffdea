"""Dirt changes no figure: harmless dirt keeps them all, other dirt loses some, none makes another
number.
"""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from vllm_memprof.logs.figures import parse_lines
from vllm_memprof.logs.lines import read_chunks, read_lines
from vllm_memprof.logs.packed import FORMS, ZIP, logs_in
from vllm_memprof.logs.starts import StartSorter
from vllm_memprof.logs.to_record import to_runs

from .dirt import HARMLESS, LOSSY, RENAMING, in_order, wrapped
from .samples import SAMPLES

DATA = Path(__file__).parents[2] / "data" / "logs"
#: Two starts with every kind of line: prefixed, and as a person copies it.
PREFIXED = "".join(
    f"(Worker_TP{i % 2} pid={31 + i % 2}) INFO 11-21 03:08:00 [worker.py:1] "
    f"{line.split('] ', 1)[-1]}\n"
    for i, (release, line, _) in enumerate(SAMPLES)
    if "by hand" not in release and "a value a line" not in release
)
NOTES = (DATA / "two_methods_910b_tp2.md").read_text()
LOGS = {path.name: path.read_text() for path in sorted(DATA.glob("*.log"))} | {
    "notes": NOTES,
    "every line": PREFIXED,
}


def read(data: str | bytes) -> tuple[set[tuple[str, Any]], list[Any]]:
    """Return (figures, the record's content per start and rank)."""
    raw = data.encode() if isinstance(data, str) else data
    ((_, stream),) = logs_in(io.BufferedReader(io.BytesIO(raw)), "log")
    lines = list(parse_lines(read_lines(read_chunks(stream))))
    starts = [
        (
            run.info.engine,
            run.info.engine_version,
            run.forms,
            [(p.identity.label, p.figures, p.kv_plan) for p in run.processes],
        )
        for run in to_runs(StartSorter().sort(lines), "log")
    ]
    return {(figure.name, figure.value) for line in lines for figure in line.figures}, starts


EXPECTED = {name: read(text) for name, text in LOGS.items()}


def test_the_logs_hold_figures():
    assert all(figures for figures, _ in EXPECTED.values())


@pytest.mark.parametrize("kind", sorted(HARMLESS))
@settings(max_examples=15)
@given(name=st.sampled_from(sorted(LOGS)), seed=st.integers(0, 2**32))
def test_harmless_dirt_keeps_the_record(kind, name, seed):
    dirty = HARMLESS[kind](LOGS[name], random.Random(seed))
    assert read(dirty) == EXPECTED[name]


@settings(max_examples=40)
@given(
    name=st.sampled_from(sorted(LOGS)),
    kinds=st.lists(
        st.sampled_from(
            [k for k in sorted(HARMLESS) if k not in ("packed", "utf_16", "byte_order_mark")]
        ),
        max_size=3,
        unique=True,
    ),
    last=st.sampled_from([None, "packed", "utf_16", "byte_order_mark"]),
    seed=st.integers(0, 2**32),
)
def test_several_kinds_of_harmless_dirt(name, kinds, last, seed):
    rng = random.Random(seed)
    dirty: Any = LOGS[name]
    for kind in in_order(kinds):
        dirty = HARMLESS[kind](dirty, rng)
    assert read(dirty if last is None else HARMLESS[last](dirty, rng)) == EXPECTED[name]


@pytest.mark.parametrize("kind", sorted(LOSSY))
@settings(max_examples=25)
@given(name=st.sampled_from(sorted(LOGS)), seed=st.integers(0, 2**32))
def test_no_dirt_makes_another_number(kind, name, seed):
    if name == "notes" and kind in (
        "lost_lines",
        "shuffled_lines",
        "cut_at_random",
        "cut_lines",
        "lost_beginnings",
        "noise",
    ):
        name = "every line"  # the heading of a section gives its lines another meaning
    dirty = LOSSY[kind](LOGS[name], random.Random(seed))
    assert read(dirty)[0] <= EXPECTED[name][0]


@pytest.mark.parametrize("kind", sorted(RENAMING))
@settings(max_examples=15)
@given(name=st.sampled_from(sorted(LOGS)), seed=st.integers(0, 2**32))
def test_who_printed_a_line_changes_no_figure(kind, name, seed):
    if name == "notes" and kind == "worker_prefixes":
        name = "every line"  # what somebody has written down has no prefix
    dirty = RENAMING[kind](LOGS[name], random.Random(seed))
    assert read(dirty)[0] == EXPECTED[name][0]


#: Figures that follow from the lines of all ranks of an SGLang start and its server_args.
DERIVED = (
    "mem_fraction_static",
    "least_free_before_load_bytes",
    "least_free_after_load_bytes",
    "kv_cache_bytes",
    "half_page_bytes",
    "limited_tokens",
)


#: The line with which a start begins: it keeps what two people have pasted one after the other
#: apart.
BEGINNING = "(EngineCore pid=1) INFO 11-21 03:07:41 [core.py:94] Initializing a V1 LLM engine "
BEGINNING += "(v0.23.0) with config: model='org/model-{number}', max_seq_len=4096, "
BEGINNING += "tensor_parallel_size={size}, x=1\n"
SINGLE = [
    name
    for name in sorted(LOGS)
    if name not in ("notes", "every line") and len(EXPECTED[name][1]) == 1
]


@settings(max_examples=40)
@given(names=st.lists(st.sampled_from(SINGLE), min_size=2, max_size=4), seed=st.integers(0, 2**32))
def test_several_starts_in_one_paste_are_kept_apart(names, seed):
    """Each with the line that begins it: the record of the paste is that of its parts."""
    rng = random.Random(seed)
    parts = [
        BEGINNING.format(number=number, size=2 if name.startswith("recorded") else 1) + LOGS[name]
        for number, name in enumerate(names)
    ]
    dirty = HARMLESS[
        rng.choice([kind for kind in sorted(HARMLESS) if kind not in ("fences", "quotes")])
    ]
    alone = [start for part in parts for start in read(part)[1]]
    together = read(dirty("\n".join(parts), rng))[1]
    assert [start[3] for start in together] == [start[3] for start in alone]
    # what a part does not say of its engine, another part may
    assert all(
        known[:3] == found[:3]
        for known, found in zip(alone, together, strict=True)
        if known[0] is not None
    )


@settings(max_examples=40)
@given(names=st.lists(st.sampled_from(SINGLE), min_size=2, max_size=4), seed=st.integers(0, 2**32))
@example(names=["vllm-project__vllm-11251.log", "noonghunna__club-3090-127.log"], seed=0)
def test_pastes_without_beginnings_mix_no_numbers(names, seed):
    """Nothing may tell such starts apart, and still every figure is one that a line holds under
    that name.
    """
    figures, starts = read("\n\n".join(LOGS[name] for name in names))
    known = set().union(*(EXPECTED[name][0] for name in names))
    known |= {
        (key, value)
        for name in names
        for start in EXPECTED[name][1]
        for _, of_process, _ in start[3]
        for key, value in of_process.items()
        if key in DERIVED
    }
    assert figures <= known
    for *_, processes in starts:
        for _, figures, _ in processes:
            printed = {
                (name, value) for name, value in figures.items() if name != "oom_reserved_bytes"
            }
            assert printed <= known


@settings(max_examples=40)
@given(
    name=st.sampled_from([name for name in sorted(LOGS) if name != "notes"]),
    seed=st.integers(0, 2**32),
)
def test_lines_wrapped_by_a_terminal_are_whole_again(name, seed):
    """But for numbers without a unit at the end of a line: broken within, nothing tells them from
    two numbers.
    """
    figures, starts = read(wrapped(LOGS[name], random.Random(seed)))
    expected_figures, expected_starts = EXPECTED[name]
    assert figures <= expected_figures
    assert expected_figures - figures <= {
        ("device_total_bytes", 65452113920),
        ("gpu_memory_utilization", 0.98),
    }
    if figures == expected_figures and name != "every line":
        # the set-up may be torn: a version, a model or the block size is unknown then
        for start, expected in zip(starts, expected_starts, strict=True):
            for (_, _, plan), (_, _, expected_plan) in zip(start[3], expected[3], strict=True):
                if plan is not None and plan["block_size"] is None:
                    plan["block_size"] = expected_plan["block_size"]
            for (_, of_process, _), (_, expected_of, _) in zip(start[3], expected[3], strict=True):
                if name.startswith("sglang"):  # with the set-up, what follows from it is unknown
                    missing = expected_of.keys() - of_process.keys()
                    assert missing <= set(DERIVED)
                    of_process.update({key: expected_of[key] for key in missing})
                    if "half_page_bytes" in missing:  # within a page that is not known
                        of_process["kv_cache_bytes"] = expected_of["kv_cache_bytes"]
        assert [start[2:] for start in starts] == [start[2:] for start in expected_starts]


@settings(max_examples=200)
@given(st.binary(max_size=4096))
def test_anything_can_be_read(data):
    assume(not data.startswith((*ZIP, *FORMS)))  # damage of those is said
    read(data)


@settings(max_examples=200)
@given(st.text(max_size=2000))
def test_any_text_can_be_read(text):
    read(text)
