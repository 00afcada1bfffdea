"""What torch has allocated by owner: the draft model, LoRA, the KV connector, the drafter's cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.accounting.builders import TOTAL, gib, process, run_of
from vllm_memprof.accounting import Report, build_report
from vllm_memprof.accounting.model import RankReport
from vllm_memprof.record.schema import Snapshot
from vllm_memprof.record.spans import ComponentRow, Span
from vllm_memprof.report.documents.report import report_document
from vllm_memprof.units import MIB

TARGET, DRAFT, LORA, CONNECTOR, KV = 1000 * MIB, 40 * MIB, 12 * MIB, 3 * MIB, 500 * MIB
LAYER = "draft_model.model.layers.0.self_attn.attn"
#: Time and allocated bytes: (phase, order, parent, begin, end).
Passage = tuple[str, int, int | None, tuple[int, int], tuple[int, int] | None]
BASE = 8 * MIB
LOADED = BASE + TARGET + DRAFT + LORA
PASSAGES: tuple[Passage, ...] = (
    ("weight_load", 0, None, (10, BASE), (40, LOADED)),
    ("draft_load", 1, 0, (20, BASE + TARGET), (25, BASE + TARGET + DRAFT)),
    ("lora_load", 2, 0, (30, BASE + TARGET + DRAFT), (35, LOADED)),
    ("kv_cache_alloc", 3, None, (50, LOADED), (60, LOADED + CONNECTOR + KV)),
    ("kv_connector", 4, 3, (51, LOADED), (52, LOADED + CONNECTOR)),
    ("warm_up", 5, None, (70, LOADED + CONNECTOR + KV), (80, LOADED + CONNECTOR + KV + MIB)),
)


def at(moment: tuple[int, int]) -> Snapshot:
    t_ns, allocated = moment
    reserved = allocated + 2 * MIB
    return Snapshot(
        t_ns=t_ns,
        device_total_bytes=TOTAL,
        device_free_bytes=TOTAL - reserved - gib(0.4),
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        non_torch_bytes=gib(0.4),
    )


def span(passage: Passage, **fields: Any) -> Span:
    phase, order, parent, begin, end = passage
    values = {
        "parent": parent,
        "depth": int(parent is not None),
        "start_t_ns": begin[0],
        "end_t_ns": None if end is None else end[0],
        **fields,
    }
    return Span(phase, order, before=at(begin), after=None if end is None else at(end), **values)


def start_up(without: tuple[str, ...] = (), **fields: dict[str, Any]) -> list[Span]:
    return [span(each, **fields.get(each[0], {})) for each in PASSAGES if each[0] not in without]


def report_of(spans: list[Span], weights: int = LOADED - BASE, plan: Any = None) -> Report:
    worker = replace(process(spans, {"weights_bytes": weights}), kv_plan=plan)
    return build_report(run_of(worker, engine="vllm-ascend", engine_version="0.23.0"))


def parts_of(rank: RankReport, phase: str, side: str = "after") -> dict[str, ComponentRow]:
    row = next(each for each in rank.phases if each.phase == phase)
    return {part.component: part for part in row.owners[side].parts if part.part_of == "allocated"}


def sizes(rank: RankReport, phase: str, side: str = "after") -> dict[str, int | None]:
    return {name: row.bytes for name, row in parts_of(rank, phase, side).items()}


def weight_parts(report: Report) -> dict[str, tuple[int, str]]:
    terms = report.ranks[0].budget.terms
    parts = next(term.parts for term in terms if term.name == "weights")
    return {part.name: (part.bytes, part.how) for part in parts}


def test_the_weights_are_divided_and_stay_the_engine_s() -> None:
    engine = LOADED - BASE - 4096  # garbage that the engine collected before its reading
    report = report_of(start_up(), engine)
    assert weight_parts(report) == {
        "target_weights": (engine - DRAFT - LORA, "derived"),
        "draft_weights": (DRAFT, "measured"),
        "lora": (LORA, "measured"),
    }
    whole, audited = report.ranks[0].budget.term("weights"), report.ranks[0].budget.audit
    assert whole == engine == sum(size for size, _ in weight_parts(report).values())
    assert next(row.engine_bytes for row in audited if row.name == "weights") == engine
    alone = report_of(start_up(("draft_load", "lora_load")), engine).ranks[0].budget
    divided = report.ranks[0].budget
    assert [replace(term, parts=()) for term in divided.terms] == alone.terms
    assert replace(divided, terms=[]) == replace(alone, terms=[])
    titles = [row.cells[0] for part in report_document(report, 100).sections for row in part.rows]
    at_weights = titles.index("weights")
    assert titles[at_weights + 1 : at_weights + 4] == [
        "of which target model",
        "of which draft model",
        "of which LoRA slots",
    ]


def test_what_the_v2_runner_makes_after_loading_is_no_model() -> None:
    """Its model_state lies in the phase, and the engine's figure ends before it."""
    state = span(("model_state", 6, 0, (36, LOADED), (39, LOADED + 5 * MIB)))
    spans = start_up(weight_load={"end_t_ns": 40})
    spans[0] = replace(spans[0], before=at((10, BASE)), after=at((40, LOADED + 5 * MIB)))
    report = report_of([*spans, state])
    assert weight_parts(report)["target_weights"] == (TARGET, "derived")
    assert sizes(report.ranks[0], "weight_load")["target_weights"] == TARGET
    assert sizes(report.ranks[0], "model_state")["target_weights"] == TARGET


def test_owners_divide_allocated_and_nothing_else() -> None:
    """Rows and unexplained are those of the same run without the phases."""
    found = report_of(start_up()).ranks[0]
    plain = report_of(start_up(("draft_load", "lora_load", "kv_connector"))).ranks[0]
    assert sizes(plain, "warm_up") == {}
    assert sizes(found, "weight_load") == {
        "target_weights": TARGET,
        "draft_weights": DRAFT,
        "lora": LORA,
    }
    late = {**sizes(found, "weight_load"), "kv_connector": CONNECTOR}
    assert sizes(found, "warm_up") == late
    assert {row.how for row in parts_of(found, "warm_up").values()} == {"derived"}
    own = parts_of(found, "draft_load")["draft_weights"]
    assert (own.bytes, own.how) == (DRAFT, "measured")
    assert "draft_load" in own.source
    memory = {
        name: next(each for each in rank.phases if each.phase == "warm_up").owners["after"]
        for name, rank in (("found", found), ("plain", plain))
    }
    divided, whole = memory["found"], memory["plain"]
    assert divided.rows == whole.rows
    assert divided.unexplained_bytes == whole.unexplained_bytes


def test_an_owner_is_there_from_its_phase_on() -> None:
    rank = report_of(start_up()).ranks[0]
    assert sizes(rank, "weight_load", "before") == {}
    assert sizes(rank, "draft_load", "before") == {"target_weights": TARGET}
    assert sizes(rank, "draft_load") == {"target_weights": TARGET, "draft_weights": DRAFT}


@pytest.mark.parametrize("phase", ["draft_load", "lora_load"])
def test_a_start_without_one_has_no_such_owner(phase: str) -> None:
    """A drafter of ngram loads nothing and has no phase: no row, and not 0."""
    report = report_of(start_up((phase,)))
    gone = "draft_weights" if phase == "draft_load" else "lora"
    assert gone not in sizes(report.ranks[0], "warm_up")
    assert gone not in weight_parts(report)
    assert "target_weights" in weight_parts(report)


def test_a_start_with_neither_has_no_parts() -> None:
    report = report_of(start_up(("draft_load", "lora_load", "kv_connector")))
    assert not any(term.parts for term in report.ranks[0].budget.terms)


def test_figures_that_are_not_of_the_whole_phase_are_not_divided() -> None:
    """The engine's figure may leave out what was loaded beside its model."""
    report = report_of(start_up(), TARGET)
    assert weight_parts(report) == {}
    assert sizes(report.ranks[0], "warm_up")["draft_weights"] == DRAFT


def test_a_phase_that_failed_leaves_nothing_that_is_known() -> None:
    report = report_of(start_up(lora_load={"error": "boom"}))
    assert weight_parts(report) == {}
    assert "lora" not in sizes(report.ranks[0], "weight_load")


@pytest.mark.parametrize("phase", ["sleep", "weight_update", "shutdown"])
def test_after_the_weights_may_have_been_replaced_they_are_unknown(phase: str) -> None:
    held = LOADED + CONNECTOR + KV
    later = span((phase, 6, None, (90, held), (95, held)))
    rank = report_of([*start_up(), later]).ranks[0]
    assert set(sizes(rank, phase, "before").values()) == {TARGET, DRAFT, LORA, CONNECTOR}
    assert set(sizes(rank, phase).values()) == {None}


def test_more_than_is_allocated_is_unknown() -> None:
    later = span(("empty_cache", 6, None, (90, TARGET), (95, TARGET)))
    assert set(sizes(report_of([*start_up(), later]).ranks[0], "empty_cache").values()) == {None}


def kv_plan(**layer_bytes: int | None) -> dict[str, Any]:
    sizes_by_layer = {"model.layers.0.self_attn.attn": KV - 100 * MIB, **layer_bytes}
    return {"blocks": 10, "planned_bytes": [KV], "groups": [], "layer_bytes": [sizes_by_layer]}


DRAFTER = {"draft_load": {"detail": {"layers": [LAYER, "draft_model.model.layers.0.mlp.experts"]}}}


def test_the_drafter_s_layers_have_a_share_of_the_kv_cache() -> None:
    report = report_of(start_up(**DRAFTER), plan=kv_plan(**{LAYER: 100 * MIB}))
    rank = report.ranks[0]
    assert (rank.kv.draft_layers, rank.kv.draft_bytes) == (1, 100 * MIB)
    assert "draft_kv_cache" not in sizes(rank, "kv_cache_alloc", "before")
    own = parts_of(rank, "kv_cache_alloc")["draft_kv_cache"]
    assert (own.bytes, own.how) == (100 * MIB, "derived")
    cells = [row.cells for part in report_document(report, 100).sections for row in part.rows]
    assert ["of which layers of the drafter, GiB", "0.0977"] in cells


def test_a_tensor_that_others_share_leaves_the_share_unknown() -> None:
    rank = report_of(start_up(**DRAFTER), plan=kv_plan(**{LAYER: None})).ranks[0]
    assert (rank.kv.draft_layers, rank.kv.draft_bytes) == (1, None)
    assert "draft_kv_cache" not in sizes(rank, "kv_cache_alloc")


def test_what_the_connector_allocates_is_no_kv_cache() -> None:
    """The plan is held against what was allocated for it alone."""

    def check(spans: list[Span]) -> int | None:
        checks = report_of(spans, plan=kv_plan()).ranks[0].kv.checks
        return next(each.found for each in checks if each.name.startswith("allocated for"))

    assert check(start_up()) == KV
    assert check(start_up(("kv_connector",))) == KV + CONNECTOR
