"""Steps, stages and requests of a worker: a fake allocator and scheduler enter, events leave."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.capture.conftest import fake_torch
from vllm_memprof.capture.hooks.table import HOOKS, rows_in_force
from vllm_memprof.capture.probe import Probe
from vllm_memprof.capture.sampler import Pace, Sampler, parse_pace
from vllm_memprof.capture.writer import EventWriter
from vllm_memprof.record.samples import Served, load_samples


@dataclass
class Device:
    """Counters as torch's allocator keeps them."""

    allocated: int = 0
    peak: int = 0
    total: int = 0

    def take(self, size: int) -> None:
        self.allocated += size
        self.total += max(size, 0)
        self.peak = max(self.peak, self.allocated)

    def stats(self, index: int) -> dict[str, Any]:
        counters = {"current": self.allocated, "peak": self.peak, "allocated": self.total}
        return {
            "allocated_bytes": {"all": counters},
            "reserved_bytes": {"all": dict(counters)},
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }


def output(
    scheduled: dict[str, int],
    new: tuple[Any, ...] = (),
    finished: tuple[str, ...] = (),
    encoder: dict[str, list[int]] | None = None,
) -> Any:
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_new_reqs=list(new),
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        finished_req_ids=set(finished),
        scheduled_encoder_inputs=encoder or {},
        free_encoder_mm_hashes=[],
    )


def new(name: str, tokens: int = 4, features: tuple[Any, ...] = ()) -> Any:
    return SimpleNamespace(
        req_id=name,
        prompt_token_ids=[0] * tokens,
        mm_features=list(features),
        num_computed_tokens=0,
    )


@dataclass
class Worker:
    """A worker that takes memory as it is told."""

    tmp_path: Path
    pace: Pace = field(default_factory=lambda: Pace(steps=1))
    device: Device = field(default_factory=Device)
    runner: Any = field(default_factory=lambda: SimpleNamespace(encoder_cache=None))

    def __post_init__(self) -> None:
        losses = EventWriter(self.tmp_path)
        self.sampler = Sampler(self.tmp_path, Probe(backend="npu"), self.pace, losses)

    def step(self, scheduled: Any, *sizes: int) -> None:
        self.sampler.begin_step(scheduled, self.runner)
        for size in sizes:
            self.device.take(size)
        self.sampler.leave_call(True, None)

    def served(self) -> Served:
        [process] = (self.tmp_path / "samples").iterdir()
        return load_samples(self.tmp_path, process.name)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    fake_torch(monkeypatch, found.stats)
    return found


@pytest.fixture
def worker(tmp_path: Path, device: Device) -> Worker:
    return Worker(tmp_path, device=device)


def test_a_peak_is_exact_where_it_rose_and_unknown_where_it_did_not(worker: Worker) -> None:
    worker.device.take(100)
    worker.step(output({"a": 4}, new=(new("a"),)), 50, -50)  # to 150
    worker.step(output({"a": 1}), 20, -20)  # below what was seen: unknown
    worker.step(output({"a": 1}), 60, -60)  # to 160
    served = worker.served()
    peaks = [sample.figures["allocated_peak_bytes"] for sample in served.samples]
    assert peaks == [150, None, 160]
    assert [s.figures["allocated_run_peak_bytes"] for s in served.samples] == [150, 150, 160]


def test_a_request_has_its_peak_what_it_left_and_its_stage(worker: Worker) -> None:
    worker.device.take(100)
    scheduled = output({"a": 4}, new=(new("a"),))
    worker.sampler.begin_step(scheduled, worker.runner)
    stage = worker.sampler.begin_stage("mm_merge")
    assert stage is not None
    worker.device.take(70)
    worker.device.take(-60)
    worker.sampler.end_stage(stage, None)
    worker.sampler.leave_call(True, None)
    worker.step(output({}, finished=("a",)))
    [request] = worker.served().request_memory
    assert (request.allocated_peak_bytes, request.peak_exact) == (170, True)
    assert request.peak_stage == "mm_merge"
    assert request.left_allocated_bytes == 10
    assert (request.others, request.finished, request.prompt_tokens) == (0, True, 4)


def test_a_later_smaller_request_claims_no_more_than_its_readings(worker: Worker) -> None:
    worker.step(output({"a": 4}, new=(new("a"),)), 500, -500)
    worker.step(output({}, finished=("a",)))
    worker.step(output({"b": 4}, new=(new("b"),)), 30, -10)
    worker.step(output({}, finished=("b",)))
    first, second = worker.served().request_memory
    assert (first.allocated_peak_bytes, first.peak_exact) == (500, True)
    assert (second.allocated_peak_bytes, second.peak_exact) == (20, False)
    assert second.allocated_run_peak_bytes == 500


def test_requests_that_overlap_say_so(worker: Worker) -> None:
    worker.step(output({"a": 4}, new=(new("a"),)), 10)
    worker.step(output({"a": 1, "b": 4, "c": 4}, new=(new("b"), new("c"))), 10)
    worker.step(output({"b": 1}, finished=("a", "c")))
    worker.step(output({}, finished=("b",)))
    worker.step(output({"d": 4}, new=(new("d"),)))
    worker.step(output({}, finished=("d",)))
    others = {each.id: each.others for each in worker.served().request_memory}
    assert others == {"a": 2, "b": 2, "c": 2, "d": 0}


def test_what_the_next_step_takes_is_not_left_by_the_request_before(worker: Worker) -> None:
    worker.step(output({"a": 4}, new=(new("a"),)), 10)
    worker.step(output({"b": 4}, new=(new("b"),), finished=("a",)), 1000)
    worker.sampler.close()
    left = {each.id: each.left_allocated_bytes for each in worker.served().request_memory}
    assert left == {"a": 10, "b": 1000}


def test_a_failed_step_writes_every_open_request_and_says_what_was_under_way(
    worker: Worker,
) -> None:
    sampler = worker.sampler
    sampler.begin_step(output({"a": 4}, new=(new("a"),), encoder={"a": [0]}), worker.runner)
    stage = sampler.begin_stage("mm_encoder")
    moment = sampler.moment()
    assert moment is not None
    assert (moment["stage"], moment["requests"]) == ("mm_encoder", [["a", 4]])
    assert stage is not None
    sampler.end_stage(stage, RuntimeError("out of memory"))
    sampler.leave_call(False, RuntimeError("out of memory"))
    served = worker.served()
    assert [each.finished for each in served.request_memory] == [False]
    assert served.stages[0].error == "RuntimeError: out of memory"
    assert sampler.moment() is None


def test_every_nth_step_is_sampled_and_a_peak_in_between_is_not_lost(
    tmp_path: Path, device: Device
) -> None:
    worker = Worker(tmp_path, Pace(steps=4), device)
    worker.step(output({"a": 4}, new=(new("a"),)))
    worker.step(output({"a": 1}), 90, -90)
    for _ in range(6):
        worker.step(output({"a": 1}))
    samples = worker.served().samples
    assert [(each.step, each.steps) for each in samples] == [(4, 4), (8, 4)]
    assert [each.figures["allocated_peak_bytes"] for each in samples] == [90, None]


def test_a_stage_outside_of_a_step_is_none(worker: Worker) -> None:
    assert worker.sampler.begin_stage("mm_encoder") is None


def test_a_call_below_an_override_is_the_same_step(worker: Worker) -> None:
    scheduled = output({"a": 4}, new=(new("a"),))
    assert worker.sampler.begin_step(scheduled, worker.runner)
    assert not worker.sampler.begin_step(scheduled, worker.runner)
    worker.sampler.leave_call(True, None)
    assert [sample.step for sample in worker.served().samples] == [1]


def test_the_size_of_an_image_and_the_cache_are_read(worker: Worker) -> None:
    tensor = SimpleNamespace(numel=lambda: 100, element_size=lambda: 2)
    grid = SimpleNamespace(tolist=lambda: [1, 8, 6], device=SimpleNamespace(type="cpu"), shape=(3,))
    feature = SimpleNamespace(
        modality="image",
        identifier="h1",
        data={"image_grid_thw": SimpleNamespace(data=grid)},
        mm_position=SimpleNamespace(length=12),
    )
    worker.runner.encoder_cache = {}
    worker.runner.requests = {"a": SimpleNamespace(mm_features=[feature])}
    config = SimpleNamespace(vision_config=SimpleNamespace(patch_size=16))
    worker.runner.model_config = SimpleNamespace(hf_config=config)
    scheduled = output({"a": 14}, new=(new("a", 14, (feature,)),), encoder={"a": [0]})
    worker.sampler.begin_step(scheduled, worker.runner)
    worker.runner.encoder_cache["h1"] = tensor
    worker.sampler.leave_call(True, None)
    later = output({}, finished=("a",))
    later.free_encoder_mm_hashes = ["h1"]
    worker.sampler.begin_step(later, worker.runner)
    del worker.runner.encoder_cache["h1"]
    worker.sampler.leave_call(True, None)
    served = worker.served()
    insert, evict = served.stages
    assert (insert.stage, evict.stage) == ("mm_cache_insert", "mm_cache_evict")
    [item] = insert.items
    assert (item.size, item.tokens) == ([96, 128], 12)
    assert evict.items == insert.items
    assert served.samples[0].figures["encoder_cache_bytes"] == 200
    assert served.request_memory[0].items[0].size == [96, 128]


@pytest.mark.parametrize(("text", "pace"), [("16", Pace(steps=16)), ("5s", Pace(ns=5 * 10**9))])
def test_how_often(text: str, pace: Pace) -> None:
    assert parse_pace(text) == pace


@pytest.mark.parametrize("text", ["0", "-1", "0s", "often"])
def test_a_rate_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"not above 0|could not convert|invalid literal"):
        parse_pace(text)


def test_rows_in_the_path_of_a_token_are_in_force_only_where_asked() -> None:
    sampled = {row.id for row in HOOKS if row.sampling}
    assert {"s.execute", "s.core_step", "s.mm_merge"} <= sampled
    assert not sampled & {row.id for row in rows_in_force("npu", "0.23.0")}
    assert sampled & {row.id for row in rows_in_force("npu", "0.23.0", sampling=True)}
