"""Communicators as a rank created them."""

from __future__ import annotations

from tests.unit.accounting.builders import span
from tests.unit.accounting.findings.test_outside_torch import communicators, report
from tests.unit.accounting.test_owners import BUFFERS, taken
from vllm_memprof.accounting.owners.outside_torch import communicators_of
from vllm_memprof.units import MIB


def test_communicators_say_who_what_when_and_how_much_was_seen() -> None:
    inside = communicators(("tp:0", BUFFERS, "hccl_config"))[0]
    detail = {**inside.detail, "names": ["tp:0", "dcp:0"], "ranks": [0, 1], "op": "allreduce"}
    spans = [
        span("profile_run", taken(0), taken(9, HCCL=BUFFERS + 76 * MIB), 0),
        span(
            "communicator",
            taken(1),
            taken(2, HCCL=BUFFERS + 76 * MIB),
            1,
            parent=0,
            depth=1,
            detail=detail,
        ),
        span("communicator", taken(3), None, 2, detail={"group": "x", "names": ["x"], "p2p": True}),
    ]
    [first, second] = communicators_of(report(spans).ranks[0])
    assert (first.names, first.ranks, first.phase, first.op) == (
        ["tp:0", "dcp:0"],
        [0, 1],
        "profile_run",
        "allreduce",
    )
    assert (first.buffer_bytes, first.buffer_source, first.seen_bytes) == (
        BUFFERS,
        "hccl_config",
        BUFFERS + 76 * MIB,
    )
    assert (second.names, second.phase, second.seen_bytes) == (["x", "p2p"], None, None)
