"""The host reads nothing of a tiny model that the device never computed: poison mode finds it."""

from __future__ import annotations

import pytest

from tests.support.engine import OLD_STACK, STACK, require_stack
from vllm_memprof.sim.poison import ANSWERED, UNWRITTEN
from vllm_memprof.sim.selftest import run_selftest

pytestmark = [pytest.mark.sim, pytest.mark.timeout(300)]


@pytest.mark.parametrize("stack", [STACK, pytest.param(OLD_STACK, marks=pytest.mark.full)])
def test_a_tiny_model_reads_what_was_written(stack):
    reads = run_selftest(require_stack(stack), "memprof/tiny", "910b")
    assert [read for read in reads if read.kind == UNWRITTEN] == []
    # Its weights are zeros instead of random numbers, so its tokens are answers.
    tokens = [read for read in reads if read.kind == ANSWERED]
    assert {read.left_by for read in tokens} == {"aclnnInplaceUniform"}
