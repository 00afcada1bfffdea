"""The ranks of a plan, in words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from vllm_memprof.accounting.deployment.ranks import rank_notes, spans, step_notes
from vllm_memprof.accounting.model import Report, RunSummary
from vllm_memprof.compare.changes import changes
from vllm_memprof.record.schema import FullStep, HoldsMore, ModalityStep, PlannedRanks


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([3], "3"), ([0, 1], "0-1"), ([7, 0, 2, 3, 4], "0, 2-4, 7"), (range(1, 32), "1-31")],
)
def test_spans(numbers, text):
    assert spans(numbers) == text


def planned(mode: str, world_size: int, run: list[int], **values: Any) -> PlannedRanks:
    given = {"why": f"--ranks {mode}", "alike": {}, "not_run": [], **values}
    return PlannedRanks(mode=mode, world_size=world_size, run=run, **given)


@pytest.mark.parametrize("ranks", [None, planned("all", 2, [0, 1])])
def test_nothing_to_say_where_all_ran(ranks):
    assert rank_notes(ranks) == []


def test_what_was_run_what_is_assumed_and_what_is_not_known():
    ranks = planned(
        "one",
        32,
        [0],
        why="32 ranks, and this machine has 8 devices",
        alike={0: [1, 2, 3, 4, 5, 6, 7]},
        not_run=list(range(8, 32)),
    )
    assert rank_notes(ranks) == [
        "ranks run: 0 of 32 (32 ranks, and this machine has 8 devices)",
        "ranks not run, assumed alike: 1-7 as rank 0",
        "ranks not run and not known: 8-31, with other layers, experts or neighbours than any rank that was run; "
        "the KV cache is that of the rank with the least; --ranks edges runs one of each kind",
    ]


def test_ranks_not_run_that_hold_more_are_named_with_it():
    head = HoldsMore("lm_head", None, 1 << 29)
    more = {6: [head], 7: [head], 5: [HoldsMore("experts", 1, None)]}
    ranks = planned("one", 8, [0], alike={0: [1, 2, 3, 4]}, not_run=[5, 6, 7], more=more)
    assert rank_notes(ranks)[-1] == (
        "ranks not run that hold more than rank 0, as the model's sizes give it: "
        "6-7: last pipeline stage (LM head 0.500 GiB, sampler); 5: experts in each layer (+1)"
    )


def test_edges():
    ranks = planned("edges", 6, [0, 2, 5], alike={0: [1], 2: [3, 4]})
    assert rank_notes(ranks)[1:] == ["ranks not run, assumed alike: 1 as rank 0; 3-4 as rank 2"]


def report(command: list[str], world_size: int | None) -> Report:
    ranks = None if world_size is None else planned("one", world_size, [0])
    command = ["memprof", "plan", "m", *command]
    return Report(RunSummary("r", "plan", "m", command, ranks=ranks), [])


def test_a_world_is_as_large_as_the_engine_believes():
    assert report([], 32).world_size == 32
    assert report([], None).world_size == 0


def test_one_rank_and_all_of_them_are_the_same_run():
    assert (
        list(changes(report(["--ranks", "one", "--rank", "3"], 4), report(["--ranks=all"], 4)))
        == []
    )


STEP = FullStep(
    prefill_tokens=8192,
    decode_requests=16,
    decode_length=32644,
    max_num_batched_tokens=8192,
    max_num_seqs=16,
    max_model_len=32768,
    multimodal=False,
    steps=12,
    seconds=1.5,
    not_run=None,
)


def test_the_batches_of_a_plan_are_named_with_what_bounds_them():
    assert step_notes(None) == []
    assert "--until ready" in step_notes(None, stopped_before=True)[0]
    assert step_notes(STEP) == [
        "largest batches run: a step of 8,192 tokens (max_num_batched_tokens 8,192), "
        "a decode of 16 requests at 32,644 tokens (max_num_seqs 16, max_model_len 32,768)"
    ]
    assert step_notes(replace(STEP, multimodal=True))[0].endswith(
        "; text alone, no multimodal batch"
    )
    assert step_notes(replace(STEP, not_run="the model generates no tokens")) == [
        "the largest batches were not run: the model generates no tokens"
    ]
    images = ModalityStep("image", 2, 2048, 2500, 2400, None)
    videos = ModalityStep("video", None, None, 2500, None, "one takes 9,000 tokens, a request 899")
    [said] = step_notes(replace(STEP, multimodal=True, modalities=[images, videos]))
    assert said.endswith(
        "max_model_len 32,768), 2 image items in a step of 2,400 tokens (the encoder's 2,048 of "
        "2,500); no video: one takes 9,000 tokens, a request 899"
    )
    [decode_unknown] = step_notes(replace(STEP, decode_requests=None, decode_length=None))
    assert "decode" not in decode_unknown
