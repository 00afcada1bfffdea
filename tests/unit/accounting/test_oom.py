"""The allocation that failed."""

from __future__ import annotations

import pytest

from tests.unit.accounting.builders import process, run_of, span
from vllm_memprof.accounting import build_report
from vllm_memprof.accounting.oom.remedies import with_values
from vllm_memprof.record.cause import Cure, NamedFailure


def test_oom_is_copied_from_its_phase() -> None:
    oom = span("oom", None, None, detail={"requested_bytes": 5, "device": 0, "more": 1})
    found = build_report(run_of(process([oom]))).ranks[0].oom
    assert found is not None
    assert (found.requested_bytes, found.free_bytes) == (5, None)
    assert "more" not in vars(found)


@pytest.mark.parametrize(
    ("engine", "kept"),
    [
        ("vllm-ascend", ["--enforce-eager", "--any"]),
        ("sglang", ["--mem-fraction-static", "--any"]),
        (None, ["--enforce-eager", "--mem-fraction-static", "--any"]),
    ],
)
def test_cures_are_those_of_the_engine(engine: str | None, kept: list[str]) -> None:
    of = {"--enforce-eager": "vllm", "--mem-fraction-static": "sglang", "--any": None}
    cures = [Cure("why", argument=argument, engine=name) for argument, name in of.items()]
    failure = NamedFailure("other", True, "it failed", "certain", cures=cures)
    found = with_values(failure, [], engine)
    assert found is not None
    assert [cure.argument for cure in found.cures] == kept
