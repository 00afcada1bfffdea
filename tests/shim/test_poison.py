"""Poison mode: every read by the host of a value that nobody computed is reported, and no other.

The answers of ``test_choices.py`` are taken out one by one (``MEMPROF_SIM_WITHOUT``): each defect
that they mend is found.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.shim.conftest import Sim
from vllm_memprof.sim.poison import (
    ANSWERED,
    CALL_SITE_DIR,
    UNWRITTEN,
    PoisonedRead,
    load_poisoned_reads,
    poison_env,
)

Poison = Callable[..., list[PoisonedRead]]


@pytest.fixture
def poison(sim: Sim) -> Poison:
    def run(code: str, without: str = "") -> list[PoisonedRead]:
        path = sim.folder / "reads"
        path.unlink(missing_ok=True)
        process = sim.start_torch(
            code,
            PYTHONPATH=str(CALL_SITE_DIR),
            MEMPROF_SIM_WITHOUT=without,
            **poison_env(path),
        )
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err[-3000:]
        return load_poisoned_reads(path)

    return run


BALANCE = """
def balance(tokens, experts):
    order = torch.argsort(torch.rand(tokens, experts, device="npu"), dim=1)
    chosen = order[:, :6].to(torch.int32)
    return torch.histc(chosen, bins=experts, min=0, max=experts).cpu()
balance({tokens}, {experts})
"""
EQUAL = """
def share(left, right):
    return torch.equal(left, right)
share(*(torch.zeros(1 << 20, device="npu") for _ in range(2)))
"""
CLOSE = """
def check(left, right):
    return torch.allclose(left, right)
check(*(torch.zeros(100, device="npu") for _ in range(2)))
check(*(torch.zeros(1 << 20, device="npu") for _ in range(2)))
"""


@pytest.mark.parametrize(
    ("code", "without", "left_by", "where"),
    [
        (BALANCE.format(tokens=1000, experts=64), "random", "aclnnInplaceUniform", "balance"),
        (BALANCE.format(tokens=32768, experts=256), "choices", "aclnnSort", "balance"),
        (
            "chosen = torch.empty(2_000_001, dtype=torch.int32, device='npu')\n"
            "torch.histc(chosen, bins=16, min=0, max=16).cpu()",
            "counts",
            "aclnnHistc",
            "<module>",
        ),
        (EQUAL, "equal", "aclnnEqual", "share"),
        (CLOSE, "isclose", "aclnnIsClose", "check"),
    ],
    ids=["random", "choices", "counts", "equal", "isclose"],
)
def test_a_defect_is_found_when_its_mend_is_taken_out(
    poison: Poison, code: str, without: str, left_by: str, where: str
) -> None:
    mended = poison(code)
    assert [read for read in mended if read.kind == UNWRITTEN] == []
    found = [read for read in poison(code, without) if read.kind == UNWRITTEN]
    assert {read.left_by for read in found} == {left_by}
    assert all(read.read_by.startswith("aclrtMemcpy") for read in found)
    assert all(read.call_site.startswith("<string>:") for read in found), found
    assert all(read.call_site.split(" < ")[0].endswith(f" {where}") for read in found)


def test_what_is_computed_is_not_reported(poison: Poison) -> None:
    reads = poison("""
x = torch.arange(64, device="npu").view(8, 8).float()
(x @ x + 1).cpu(), x.sum().item(), x.max().item(), torch.topk(x, 2).indices.cpu()
torch.zeros(4, 4).npu().cpu(), x.clone().cpu(), x.nonzero().cpu(), torch.equal(x, x + 1)
half = torch.empty(8, 8, device="npu")
half[:4].fill_(2)
half[:4].cpu(), half[:, 2:4][:3].cpu()
half.index_select(0, torch.tensor([0, 3], device="npu")).cpu()     # rows that are written
""")
    assert reads == []


def test_a_value_is_followed_from_operator_to_operator(poison: Poison) -> None:
    reads = poison("""
known = torch.ones(8, device="npu")
lost = known.erfinv()                                  # no kernel of the device for it
(lost * 2).clone().cpu()
torch.cat([known, lost + 1]).cpu()
lost.int().tolist()
lost.sum().item()
bool((lost > 0).any())
lost.copy_(known)
lost.cpu()                                             # written since
""")
    assert [(read.kind, read.left_by) for read in reads] == [(UNWRITTEN, "aclnnErfinv")] * 5
    assert [read.bytes for read in reads] == [32, 64, 32, 4, 1]


def test_other_ways_to_a_value_that_nobody_wrote(poison: Poison) -> None:
    reads = poison("""
def fresh(): torch.empty(8, device="npu").cpu()
def dropped(): torch.equal(torch.ones(1 << 20).npu().cpu(), torch.zeros(1 << 20))
def zeros(): torch.zeros(1 << 20).npu().cpu()
def size(): torch.empty(100, device="npu").erfinv().nonzero()
def most(): torch.zeros(1 << 20, device="npu").nonzero()
def token(): torch.zeros(8, 151936, device="npu").argmax(-1).cpu()
for each in (fresh, dropped, zeros, size, most, token): each()
""")
    found = {read.call_site.split(" < ")[0].split()[-1]: read for read in reads}
    kinds = {name: (read.kind, read.left_by) for name, read in found.items()}
    assert kinds == {
        "fresh": (UNWRITTEN, "no operator"),
        "dropped": (UNWRITTEN, "a copy to the device that is not kept"),
        "size": (UNWRITTEN, "aclnnErfinv"),
        "most": (ANSWERED, "aclnnNonzero"),
        "token": (ANSWERED, "aclnnArgMax"),
    }
    assert found["size"].read_by == found["most"].read_by
    assert found["size"].read_by.startswith("size of the result of aclnnNonzero")


def test_the_mode_changes_no_value(sim: Sim, poison: Poison) -> None:
    code = """
torch.manual_seed(0)
x = torch.rand(64, 64).npu()
values = [(x @ x).sum().item(), x.argsort()[:4].tolist(), x.nonzero().shape[0],
          torch.rand(100, 10, device="npu").argsort()[:, :2].tolist(), x.topk(3).values.tolist(),
          torch.equal(torch.zeros(1 << 20, device="npu"), torch.zeros(1 << 20, device="npu"))]
print("RESULT", json.dumps({"values": values}))
"""
    plain = sim.run_torch(code)
    poisoned = sim.run_torch(code, **poison_env(sim.folder / "reads"))
    assert json.dumps(plain) == json.dumps(poisoned)
