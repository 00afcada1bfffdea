"""The largest batch of items: how many, in how many requests, and what leaves room for another."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.engines.vllm.test_full_step import ROOMY, SIZES
from vllm_memprof.engines.vllm.batch_limits import Limits
from vllm_memprof.engines.vllm.multimodal_batch import (
    Batch,
    MediaItem,
    Prompt,
    Room,
    fill,
    largest,
    prompts_of,
)

ROOM = Room(per_prompt=999, encoder_tokens=8192, whole=False)
ROOMS = st.builds(
    Room,
    per_prompt=st.integers(1, 20),
    encoder_tokens=st.integers(1, 65536),
    whole=st.booleans(),
)


def item(embeds: int, around: int = 2) -> MediaItem:
    return MediaItem("image", [7] * (embeds + around), embeds, None, None, None)


def none(_: int) -> None:
    return None


def test_items_fill_the_encoder_and_the_step() -> None:
    assert fill(ROOMY, ROOM, tokens=1026, embeds=1024) == [(8, 0)]
    assert fill(ROOMY, replace(ROOM, per_prompt=3), tokens=1026, embeds=1024) == [
        (3, 0), (3, 0), (2, 0),
    ]  # fmt: skip


def test_a_step_that_may_not_end_within_an_item_has_one_less() -> None:
    assert fill(ROOMY, replace(ROOM, whole=True), tokens=1026, embeds=1024) == [(7, 1010)]


def test_text_fills_what_few_small_items_leave() -> None:
    few = replace(ROOMY, requests=2)
    assert fill(few, replace(ROOM, per_prompt=1), tokens=258, embeds=256) == [(1, 7676), (1, 0)]
    short = replace(few, length=1001)
    assert fill(short, replace(ROOM, per_prompt=1), tokens=258, embeds=256) == [(1, 742), (1, 742)]


def test_an_item_that_no_request_holds_makes_no_batch() -> None:
    assert fill(replace(ROOMY, length=1000), ROOM, tokens=1026, embeds=1024) == []


def test_one_item_larger_than_a_step_is_encoded_alone() -> None:
    small_step = replace(ROOMY, batched_tokens=2048)
    room = replace(ROOM, encoder_tokens=16384)
    assert fill(small_step, room, tokens=16386, embeds=16384) == [(1, 0)]


def test_a_smaller_item_takes_what_the_largest_leave() -> None:
    asked = []

    def smaller(left: int) -> MediaItem:
        asked.append(left)
        return item(left - 8)

    limits, room = replace(ROOMY, batched_tokens=20_000), replace(ROOM, encoder_tokens=20_000)
    made = prompts_of(limits, room, item(16384), smaller)
    assert asked == [20_000 - 16384]
    assert [(len(each.items), each.items[0].embeds, len(each.text)) for each in made] == [
        (1, 3608, 0), (1, 16384, 4),
    ]  # fmt: skip
    assert [len(each.items) for each in prompts_of(limits, room, item(16384), none)] == [1]
    # there is no request left for it
    assert len(prompts_of(replace(limits, requests=1), room, item(16384), smaller)) == 1


def test_prompts_have_their_items_before_the_text() -> None:
    prompt = Prompt([1, 2, 3], (item(4), item(4)))
    assert prompt.tokens[:12] == [7] * 12
    assert len(prompt.tokens) == 15
    assert prompt.new_tokens == 1


@settings(max_examples=80)
@given(limits=SIZES, room=ROOMS, embeds=st.integers(1, 5000), around=st.integers(0, 9))
def test_a_batch_is_within_the_limits(limits: Limits, room: Room, embeds: int, around: int) -> None:
    made = prompts_of(limits, room, item(embeds, around), none)
    assert len(made) <= limits.requests
    counts = [len(each.items) for each in made]
    for each in made:
        assert 1 <= len(each.items) <= room.per_prompt
        assert len(each.tokens) <= limits.longest()
    assert sum(counts) * embeds <= max(room.encoder_tokens, embeds)
    held = sum(limits.in_blocks(count * (embeds + around) + 1) for count in counts)
    assert held <= max(limits.cached_tokens, limits.in_blocks(limits.longest() + 1))
    assert bool(made) == (embeds + around <= limits.longest())


def test_a_processor_that_cannot_be_made_is_a_reason_and_no_error() -> None:
    config = SimpleNamespace(model_config=SimpleNamespace(is_multimodal_model=True))
    [batch] = largest(config, None, ROOMY)  # there is no engine here to import
    assert isinstance(batch, Batch)
    assert (batch.prompts, batch.largest_item()) == ([], 0)
    assert batch.not_run is not None
    assert batch.not_run.startswith("the model's processor: ModuleNotFoundError: ")
    assert not list(largest(SimpleNamespace(model_config=SimpleNamespace()), None, ROOMY))
