"""Sentences that remember their template and parameters."""

from __future__ import annotations

import pickle

import pytest

from vllm_memprof.text import Text, join, text, translate

GIB = 1 << 30
CHINESE = {
    "{size:gib} GiB are free": "空闲 {size:gib} GiB",
    "in {phase}: {what}": "{phase} 阶段：{what}",
    ", ": "，",
    "weights": "权重",
}


def test_quantities_are_formatted_by_their_spec() -> None:
    assert text("{size:gib} GiB are free", size=3 * GIB) == "3.00 GiB are free"
    assert (
        text("{size:bytes} bytes, {seconds:ms} ms", size=None, seconds=0.5) == "- bytes, 500.00 ms"
    )
    assert text("{count:,} tokens", count=1234) == "1,234 tokens"


def test_a_quantity_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="takes a number"):
        text("{size:gib}", size="3")


def test_braces_without_parameters() -> None:
    assert text("--config '{{}}'") == "--config '{}'"


def test_translation_goes_by_the_template_and_into_texts() -> None:
    inner = text("{size:gib} GiB are free", size=GIB)
    outer = text("in {phase}: {what}", phase="profile_run", what=inner)
    assert outer == "in profile_run: 1.00 GiB are free"
    assert translate(outer, CHINESE) == "profile_run 阶段：空闲 1.00 GiB"


def test_parts_of_a_list_are_translated_and_somebody_elses_words_stay() -> None:
    joined = join(", ", ["weights", text("weights")])
    assert joined == "weights, weights"
    assert translate(joined, CHINESE) == "weights，权重"


def test_what_a_catalogue_lacks_stays_english() -> None:
    assert translate(text("requested"), CHINESE) == "requested"


@pytest.mark.parametrize("value", [text("{n:,}", n=1234), join(", ", [text("weights"), "x"])])
def test_a_text_survives_pickling(value: Text) -> None:
    again = pickle.loads(pickle.dumps(value))
    assert again == value
    assert translate(again, CHINESE) == translate(value, CHINESE)
