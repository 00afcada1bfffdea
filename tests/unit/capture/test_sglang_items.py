"""Images of SGLang's requests: its objects enter, items and stages of the sampler leave."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.capture.conftest import fake_torch
from tests.unit.capture.test_sampler import Device, Worker
from vllm_memprof.capture import steps
from vllm_memprof.capture.hook import Call, Hook
from vllm_memprof.capture.items import describe
from vllm_memprof.engines.sglang import items as sglang_items
from vllm_memprof.engines.sglang.kept import kept
from vllm_memprof.engines.sglang.steps import batch_of, sampled
from vllm_memprof.record.samples import MediaStage

CONFIG = SimpleNamespace(vision_config=SimpleNamespace(patch_size=16))
ROW = Hook("row", None, ())


class Tensor:
    """As many bytes as it was made of."""

    def __init__(self, size: int) -> None:
        self.size = size

    def numel(self) -> int:
        return self.size

    def element_size(self) -> int:
        return 1


def image(
    grid: list[int], *offsets: tuple[int, int], hash_: int = 0, modality: str = "IMAGE"
) -> Any:
    return SimpleNamespace(
        modality=SimpleNamespace(name=modality),
        model_specific_data={"image_grid_thw": [grid]},
        offsets=list(offsets),
        hash=hash_,
    )


def request(rid: str, *images: Any) -> Any:
    held = SimpleNamespace(mm_items=list(images)) if images else None
    return SimpleNamespace(
        rid=rid, origin_input_ids=[0] * 9, prefix_indices=[], multimodal_inputs=held
    )


def test_an_item_has_its_pixels_and_its_tokens() -> None:
    pictures = [image([1, 4, 8], (3, 10)), image([1, 2, 2], (12, 12), modality="MULTI_IMAGES")]
    features = sglang_items.features_of(request("a", *pictures)) or []
    described = [describe(feature, CONFIG) for feature in features]
    assert described == [
        {"modality": "image", "tokens": 8, "size": [128, 64], "frames": None},
        {"modality": "image", "tokens": 1, "size": [32, 32], "frames": None},
    ]
    [unplaced] = sglang_items.features_of(request("a", image([1, 2, 2]))) or []
    assert describe(unplaced, CONFIG)["tokens"] is None, "unknown is no 0"
    assert sglang_items.features_of(request("a")) is None


class Scene:
    """A scheduler's process with two requests in a step: one of two images, one of text."""

    def __init__(self, tmp_path: Path, device: Device) -> None:
        self.worker = Worker(tmp_path, device=device)
        self.sampler, self.device = self.worker.sampler, self.worker.device
        self.images = [image([1, 4, 4], (1, 4), hash_=7), image([1, 2, 2], (6, 6), hash_=8)]
        self.requests = {"a": request("a", *self.images), "b": request("b")}
        self.recorder: Any = SimpleNamespace(
            sampler=self.sampler, requests=self.requests, kept=None, serving=True
        )

    def begin(self) -> None:
        batch = batch_of([])
        for name, each in self.requests.items():
            batch.num_scheduled_tokens[name] = 9
            batch.scheduled_new_reqs.append(sampled(each))
        batch.total_num_scheduled_tokens = 18
        model = SimpleNamespace(hf_config=CONFIG)
        self.sampler.begin_step(batch, SimpleNamespace(model_config=model))

    def call(self, *args: Any, **kwargs: Any) -> Call:
        return Call(ROW, "function", args, kwargs)

    def encode(self, *images: Any) -> None:
        call = self.call(None, list(images))
        sglang_items.enter_encoder(self.recorder, call)
        self.device.take(100)
        self.device.take(-90)
        steps.leave_stage(self.recorder, call)

    def embed(self, begin: int, length: int, result: Any, *encoded: Any) -> None:
        call = self.call(
            embedding_items=self.images, items_size=[0, 2], prefix_length=[begin],
            extend_length=[length],
        )  # fmt: skip
        sglang_items.enter_embedding(self.recorder, call)
        if encoded:
            self.encode(*encoded)
        call.result = result
        sglang_items.leave_embedding(self.recorder, call)

    def stages(self) -> list[MediaStage]:
        self.sampler.leave_call(True, None)
        return self.worker.served().stages


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    device = Device()
    fake_torch(monkeypatch, device.stats)
    made = Scene(tmp_path, device)
    made.begin()
    return made


def test_the_encoder_s_stage_names_what_it_was_called_with(scene: Scene) -> None:
    scene.encode(scene.images[1])
    [stage] = scene.stages()
    assert (stage.stage, list(stage.requests)) == ("mm_encoder", ["a"])
    assert [(item.tokens, item.size) for item in stage.items] == [(1, [32, 32])]
    assert stage.figures["allocated_peak_bytes"] == 100
    assert stage.figures["allocated_bytes"] == 10


@pytest.mark.parametrize(
    ("begin", "length", "tokens"), [(0, 9, [4, 1]), (0, 6, [4]), (5, 4, [1]), (7, 2, [])]
)
def test_a_merge_is_of_the_items_in_the_part_of_the_prompt(
    scene: Scene, begin: int, length: int, tokens: list[int]
) -> None:
    scene.embed(begin, length, (object(), None, None))
    scene.device.take(30)
    sglang_items.leave_embed(scene.recorder, scene.call())
    [stage] = scene.stages()
    assert stage.stage == "mm_merge"
    assert [item.tokens for item in stage.items] == tokens
    assert stage.figures["allocated_total_bytes"] == 30


def test_without_embeddings_nothing_is_merged(scene: Scene) -> None:
    scene.embed(7, 2, (None, None, None))
    sglang_items.leave_embed(scene.recorder, scene.call())
    assert scene.stages() == []


def test_another_modality_s_encoder_is_no_part_of_a_merge(scene: Scene) -> None:
    for each in scene.images:
        scene.embed(0, 9, (object(), None, None), each)
    scene.device.take(30)
    sglang_items.leave_embed(scene.recorder, scene.call())
    stages = [(stage.stage, stage.figures["allocated_total_bytes"]) for stage in scene.stages()]
    assert stages == [("mm_encoder", 100), ("mm_merge", 0), ("mm_encoder", 100), ("mm_merge", 30)]
    assert kept(scene.recorder).mm_merge is None


def test_the_cache_of_embeddings_says_what_it_takes_and_gives_up(scene: Scene) -> None:
    entries: dict[int, Any] = {}
    cache = SimpleNamespace(mm_cache=entries)

    def put(key: int, size: int) -> None:
        entries[key] = SimpleNamespace(embedding=Tensor(size))
        sglang_items.leave_cache_set(scene.recorder, scene.call(cache, key))

    put(7, 40)
    put(7, 40)  # it had that one already
    put(99, 5)  # of no request that is known
    del entries[7]
    put(8, 10)
    stages = scene.stages()
    assert [stage.stage for stage in stages] == [
        "mm_cache_insert", "mm_cache_insert", "mm_cache_evict", "mm_cache_insert",
    ]  # fmt: skip
    assert [[item.tokens for item in stage.items] for stage in stages] == [[4], [None], [4], [1]]
    assert [stage.figures["encoder_cache_bytes"] for stage in stages] == [40, 45, 15, 15]
