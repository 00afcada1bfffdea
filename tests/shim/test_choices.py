"""What the device answers for values that it does not compute, where the answer steers the engine:
choices of experts, counts, comparisons. torch on the device asks; nothing of vLLM is involved."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from tests.shim.conftest import Sim
from vllm_memprof.launch.engine_log import ANSWER_LINE

#: How often each of the `experts` is among the first `k` of every row, by what the host reads.
COUNT = """
def loads(chosen, experts):
    return torch.bincount(chosen.cpu().flatten().long(), minlength=experts).tolist()
"""


def spread(loads: list[int], ranks: int) -> float:
    """The largest share of a rank against an even one: 1.0 is even, `ranks` all on one rank."""
    experts = len(loads) // ranks
    shares = [sum(loads[rank * experts : (rank + 1) * experts]) for rank in range(ranks)]
    return max(shares) * ranks / sum(loads)


def test_experts_by_random_order_are_chosen_evenly(sim: Sim) -> None:
    """As the profile run chooses them (vllm_ascend/ops/fused_moe/fused_moe.py), below and above the
    limit, whatever the numbers of tokens and experts."""
    figures = sim.run_torch(f"""{COUNT}
cases = {{}}
for tokens in (1000, 4096, 9001, 32768):
    for experts in (64, 144, 256):
        order = torch.argsort(torch.rand(tokens, experts, device="npu"), dim=1)
        first = order[:, :6].to(torch.int32)
        cases[f"{{tokens}} of {{experts}}"] = [
            torch.equal(order[[0, 1, -1]].cpu().sort(dim=1).values,
                        torch.arange(experts).expand(3, -1)),
            loads(first, experts),
            torch.histc(first, bins=experts, min=0, max=experts).cpu().int().tolist(),
        ]
print("RESULT", json.dumps(cases))
""")
    assert len(figures) == 12
    for case, (orders, chosen, counts) in figures.items():
        assert orders, case  # a row has every position once
        assert sum(chosen) == 6 * int(case.split()[0])
        assert spread(chosen, 16) < 1.03, case
        assert counts == chosen, case


def test_counts_above_the_limit_are_even(sim: Sim) -> None:
    figures = sim.run_torch("""
chosen = torch.zeros(2_000_001, dtype=torch.int32, device="npu")
print("RESULT", json.dumps({
    "histc": torch.histc(chosen, bins=16, min=0, max=16).cpu().int().tolist(),
    "bincount": torch.bincount(chosen, minlength=16).cpu().tolist(),
}))
""")
    for name, counts in figures.items():
        assert sum(counts) == 2_000_001, name
        assert max(counts) - min(counts) == 1, name


def test_a_sort_and_the_largest_of_scores_are_spread(sim: Sim) -> None:
    figures = sim.run_torch(f"""{COUNT}
scores = torch.zeros(8192, 64, device="npu")
print("RESULT", json.dumps({{
    "sort": loads(scores.sort(dim=-1, descending=True).indices[:, :4], 64),
    "columns": loads(scores.t().sort(dim=0).indices[:4], 64),
    "topk": loads(scores.topk(4, dim=-1).indices, 64),
    "one": loads(scores.argmax(-1), 64),
}}))
""")
    for name in ("sort", "columns", "topk"):
        assert spread(figures[name], 16) < 1.01, name
    assert max(figures["topk"]) - min(figures["topk"]) <= 1
    assert figures["one"][0] == 8192  # a choice of one is a token, which must exist


@pytest.mark.parametrize("rows", [8192, 100], ids=["above", "floats-given-up"])
def test_gates_spread_tokens_over_the_experts(
    sim: Sim, change_profile: Callable[..., None], rows: int
) -> None:
    change_profile(host_compute_bytes=1 << 18)
    figures = sim.run_torch(f"""{COUNT}
x = torch.zeros(4, 512, device="npu")
torch.mm(x, torch.zeros(512, 512, device="npu"))      # weights above the limit
scores = torch.zeros({rows}, 64, device="npu")
print("RESULT", json.dumps({{
    "softmax": loads(torch_npu.npu_moe_gating_top_k_softmax(scores, None, 4)[1], 64),
    "topk": loads(torch_npu.npu_moe_gating_top_k(scores, 4)[1], 64),
    "plain": loads(scores.topk(4, dim=-1).indices, 64),
}}))
""")
    for name, loads in figures.items():
        assert sum(loads) == rows * 4, name
        assert max(loads) - min(loads) <= 1, name


def test_scores_that_are_known_choose(sim: Sim) -> None:
    figures = sim.run_torch("""
scores = torch.zeros(100, 64)
scores[:, 7], scores[:, 9] = 2, 1
print("RESULT", json.dumps({
    "gate": torch_npu.npu_moe_gating_top_k_softmax(scores.npu(), None, 2)[1].cpu().unique(dim=0).tolist(),
    "sort": scores.npu().sort(descending=True, dim=-1).indices[:, :2].cpu()
        .unique(dim=0).tolist(),
}))
""")
    assert figures == {"gate": [[7, 9]], "sort": [[7, 9]]}


COMPARISONS = """
stale = torch.full((1 << 22,), 1, dtype=torch.uint8, device="npu")
del stale                                              # what a result finds in its memory
big, same = (torch.zeros(1 << 20, device="npu") for _ in range(2))
small = torch.ones(16, device="npu")
verdicts = {
    "equal": torch.equal(big, same),
    "equal to itself": torch.equal(big, big),
    "equal to a view of itself": torch.equal(big.view(1024, 1024)[:512], big.view(1024, 1024)[:512]),
    "other half": torch.equal(big[:1 << 19], big[1 << 19:]),
    "small": torch.equal(small, small.clone()),
    "small, different": torch.equal(small, small + 1),
    "shapes": torch.equal(small, small[:8]),
    "allclose": torch.allclose(big, same),
    "all": bool(torch.ones(1 << 22, dtype=torch.bool, device="npu").all()),
    "any": bool(torch.ones(1 << 22, dtype=torch.bool, device="npu").any()),
    "sum": int(torch.ones(1 << 21, dtype=torch.int64, device="npu").sum()),
    "sum of fewer": int(torch.ones(1 << 20, dtype=torch.int64, device="npu").sum()),
}
print("RESULT", json.dumps(verdicts))
"""


@pytest.mark.parametrize("alike", [False, True])
def test_comparisons_above_the_limit_are_defined(sim: Sim, alike: bool) -> None:
    weights = {"MEMPROF_SIM_ALIKE": "1"} if alike else {}  # of a model that nobody has rotated
    assert sim.run_torch(COMPARISONS, **weights) == {
        "equal": alike,  # of memory of its own each
        "equal to itself": True,
        "equal to a view of itself": True,
        "other half": alike,
        "small": True,
        "small, different": False,
        "shapes": False,
        "allclose": True,  # a check of consistency passes
        "all": True,
        "any": False,
        "sum": 0,
        "sum of fewer": 1 << 20,  # 8 MiB: integers are limited by their number
    }


def test_the_log_names_a_comparison_that_was_not_computed(sim: Sim) -> None:
    process = sim.start_torch("""
def pair(size):
    return torch.zeros(size, device="npu"), torch.zeros(size, device="npu")
torch.equal(*pair(16)), torch.equal(*pair(1 << 20)), torch.equal(*pair(1 << 21))
""")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    found = ANSWER_LINE.findall(err)  # as the launcher finds it, for the report
    assert len(found) == 1, err
    assert "aclnnEqual of tensors of 4194304 bytes" in found[0][1]
    assert "different" in found[0][1]


def test_what_is_found_is_the_most_above_the_limit(sim: Sim) -> None:
    figures = sim.run_torch("""
values = torch.zeros(1 << 21, dtype=torch.int64, device="npu")
print("RESULT", json.dumps({
    "nonzero": torch.nonzero(values).shape[0], "select": values.masked_select(values > 0).numel(),
    "unique": values.unique().numel(),
}))
""")
    assert set(figures.values()) == {1 << 21}, figures


def test_closeness_is_computed(sim: Sim) -> None:
    figures = sim.run_torch("""
a = torch.tensor([1.0, 1.0, 1.0, float("inf"), float("inf"), float("nan"), 0.0, float("inf")])
b = torch.tensor([1.0, 1.0 + 1e-6, 1.1, float("inf"), -float("inf"), float("nan"), 1e-9, 1.0])
def both(**options):
    return [torch.isclose(x, y, **options).tolist() for x, y in ((a.npu(), b.npu()), (a, b))]
print("RESULT", json.dumps({
    "default": both(),
    "wide": both(rtol=0.2),
    "narrow": both(rtol=0, atol=0),
    "nan": both(equal_nan=True),
    "all": [torch.allclose(a[:2].npu(), b[:2].npu()), torch.allclose(a[:3].npu(), b[:3].npu())],
    "integers": torch.isclose(torch.arange(3).npu(), torch.tensor([0, 1, 3]).npu()).tolist(),
}))
""")
    assert figures.pop("all") == [True, False]
    assert figures.pop("integers") == [True, True, False]
    for name, (device, host) in figures.items():
        assert device == host, name


def test_what_nobody_computed_is_close(sim: Sim) -> None:
    """A model's check that two ways to compute its shared expert agree, with neither computed."""
    figures = sim.run_torch("""
left, right = torch.zeros(10, 64, device="npu"), torch.ones(10, 64, device="npu")
known = torch.allclose(left, right)
left.erfinv()                                          # no kernel of the device for it
print("RESULT", json.dumps({
    "known": known, "unknown": torch.allclose(left, right),
    "integers": torch.allclose(left.int(), right.int()),
}))
""")
    assert figures == {"known": False, "unknown": True, "integers": False}


def test_the_range_of_random_numbers(sim: Sim) -> None:
    figures = sim.run_torch("""
drawn = torch.rand(100, 100, device="npu").cpu()
weights = torch.zeros(100, device="npu").uniform_(-1e-3, 1e-3).cpu()
print("RESULT", json.dumps({
    "least": drawn.min().item(), "most": drawn.max().item(), "mean": drawn.mean().item(),
    "different": drawn[7].unique().numel(), "weights": weights.unique().tolist(),
}))
""")
    assert 0 <= figures["least"] < 0.01
    assert 0.99 < figures["most"] < 1
    assert math.isclose(figures["mean"], 0.5, abs_tol=1e-5)
    assert figures["different"] == 100
    assert figures["weights"] == [0.0]


def test_there_is_something_in_floats_that_are_not_computed(sim: Sim) -> None:
    """DeepSeek-OCR takes an image whose pixels are 0 in all for none (vLLM 0.23,
    deepseek_ocr.py::_parse_and_validate_image_input)."""
    figures = sim.run_torch("""
pixels = torch.ones(1, 3, 1024, 1024).to("npu", torch.bfloat16)
counts = torch.ones(2_000_001, dtype=torch.int32, device="npu")
print("RESULT", json.dumps({
    "floats": torch.sum(pixels).item(), "integers": torch.sum(counts).item(),
    "few": torch.sum(torch.zeros(4, device="npu")).item(),
}))
""")
    assert figures == {"floats": 1.0, "integers": 0, "few": 0.0}
