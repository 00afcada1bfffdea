"""The same model under two releases, live: the causes of the other KV cache add up to the byte on every rank."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.integration.test_stacks import plan
from tests.support.engine import MEMPROF, OLD_STACK, STACK

pytestmark = [pytest.mark.sim, pytest.mark.timeout(300)]


@pytest.mark.full
def test_two_releases_differ_by_their_causes_to_the_byte(run_memprof):
    arguments = (
        "--enforce-eager",
        "--max-model-len=4096",
        "-tp=2",
        "--gpu-memory-utilization=0.95",
    )
    runs = [plan(run_memprof, stack, "memprof/tiny", *arguments) for stack in (OLD_STACK, STACK)]

    done = subprocess.run(
        [*MEMPROF, "diff", *(str(run.run_dir) for run in runs), "--format", "json"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    diff = json.loads(done.stdout)
    assert {(row["a_label"], row["b_label"]) for row in diff["ranks"]} == {
        ("TP0", "TP0"),
        ("TP1", "TP1"),
    }
    for row in [diff["served"], *diff["ranks"]]:
        difference = row["difference_bytes"]
        assert difference is not None
        assert sum(cause["bytes"] for cause in row["causes"]) == difference
        assert (row["a_equation"], row["b_equation"]) == ("E2", "E4")
        assert not {"unknown", "residual", "mixed"} & {cause["kind"] for cause in row["causes"]}
        by_one = {cause["names"][0] for cause in row["causes"] if cause["kind"] == "method"}
        own = {"initial_non_torch", "persistent_torch", "reserved_not_allocated"}
        assert by_one - {"other_processes_at_start"} == own
    assert (
        sum(cause["kv_tokens"] for cause in diff["served"]["causes"]) == diff["difference_tokens"]
    )
    granted = [
        min(rank["budget"]["engine_kv_cache_bytes"] for rank in run.report["ranks"]) for run in runs
    ]
    served = diff["served"]
    assert [served["a_granted"], served["b_granted"]] == granted
    assert served["difference_bytes"] == granted[1] - granted[0]
    assert not any("read apart" in note for note in diff["notes"])
