"""Poison mode: every read by the host of a value that nobody computed is reported, and no other.

With the answers of ``test_choices.py`` taken out (``MEMPROF_SIM_WITHOUT``), each defect that they
mend is found. A function's name is the name of its case: reads are told by their call site.
"""

from __future__ import annotations

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

Poison = Callable[..., dict[str, PoisonedRead]]


@pytest.fixture
def poison(sim: Sim) -> Poison:
    """Run code in poison mode; return its reads by the function that read."""

    def run(code: str, without: str = "") -> dict[str, PoisonedRead]:
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
        reads = load_poisoned_reads(path)
        found = {read.call_site.split(" < ")[0].split()[-1]: read for read in reads}
        assert len(found) == len(reads), reads
        return found

    return run


MENDS = """
def balance(tokens, experts):
    order = torch.argsort(torch.rand(tokens, experts, device="npu"), dim=1)
    chosen = order[:, :6].to(torch.int32)
    return torch.histc(chosen, bins=experts, min=0, max=experts)
def two(size):
    return [torch.zeros(size, device="npu") for _ in range(2)]

def random(): balance(1000, 64).cpu()
def choices(): balance(32768, 256).cpu()
def counts(): torch.histc(torch.zeros(1 << 21, device="npu"), bins=16, min=0, max=16).cpu()
def equal(): torch.equal(*two(1 << 20))
def isclose(): torch.allclose(*two(100)), torch.allclose(*two(1 << 20))
for case in (random, choices, counts, equal, isclose): case()
"""


def test_each_defect_is_found_when_its_mend_is_taken_out(poison: Poison) -> None:
    mended = poison(MENDS)
    assert {read.kind for read in mended.values()} == {ANSWERED}
    found = poison(MENDS, "random,choices,counts,equal,isclose")
    assert {case: (read.kind, read.left_by) for case, read in found.items()} == {
        "random": (UNWRITTEN, "aclnnInplaceUniform"),
        "choices": (UNWRITTEN, "aclnnSort"),  # all tokens to expert 0: what sized the all-to-all
        "counts": (UNWRITTEN, "aclnnHistc"),
        "equal": (UNWRITTEN, "aclnnEqual"),
        "isclose": (UNWRITTEN, "aclnnIsClose"),
    }
    for case, read in found.items():
        assert read.read_by.startswith("aclrtMemcpy"), case
        assert read.call_site.startswith("<string>:"), case


WAYS = """
x = torch.arange(64, device="npu").view(8, 8).float()
half = torch.empty(8, 8, device="npu")
half[:4].fill_(2)
known = torch.ones(8, device="npu")
lost = known.erfinv()                                  # no kernel of the device for it

def computed(): (x @ x + 1).cpu(), x.sum().item(), x.max().item(), x.topk(2).indices.cpu()
def moved(): torch.zeros(4, 4).npu().cpu(), x.clone().cpu(), x.nonzero().cpu()
def written(): half[:4].cpu(), half[:, 2:4][:3].cpu()
def rows(): half.index_select(0, torch.tensor([0, 3], device="npu")).cpu()
def zeros(): torch.zeros(1 << 20).npu().cpu(), torch.zeros(1 << 21, device="npu")[-8:].cpu()

def row(): half.index_select(0, torch.tensor([0, 4], device="npu")).cpu()
def product(): (lost * 2).clone().cpu()
def part(): torch.cat([known, lost + 1]).cpu()
def cast(): lost.int().tolist()
def item(): lost.sum().item()
def decision(): bool((lost > 0).any())
def fresh(): torch.empty(8, device="npu").cpu()
def dropped(): torch.equal(torch.ones(1 << 20).npu().cpu(), torch.zeros(1 << 20))
def size(): lost.nonzero()
def most(): torch.ones(1 << 20, device="npu").nonzero()
def token(): torch.zeros(8, 151936, device="npu").argmax(-1).cpu()

for case in (computed, moved, written, rows, zeros): case()
for case in (row, product, part, cast, item, decision, fresh, dropped, size, most, token): case()
lost.copy_(known)
computed(), lost.cpu()
"""


def test_a_value_is_followed_to_the_host(poison: Poison) -> None:
    found = poison(WAYS)
    lost = (UNWRITTEN, "aclnnErfinv")
    assert {case: (read.kind, read.left_by) for case, read in found.items()} == {
        "row": (UNWRITTEN, "no operator"),
        "product": lost,
        "part": lost,
        "cast": lost,
        "item": lost,
        "decision": lost,
        "fresh": (UNWRITTEN, "no operator"),
        "dropped": (UNWRITTEN, "a copy to the device that is not kept"),
        "size": lost,
        "most": (ANSWERED, "aclnnNonzero"),
        "token": (ANSWERED, "aclnnArgMax"),
    }
    assert found["part"].bytes == 64
    assert found["size"].read_by == "size of the result of aclnnNonzero"


def test_the_mode_changes_no_value(sim: Sim) -> None:
    code = """
torch.manual_seed(0)
x = torch.rand(64, 64).npu()
values = [(x @ x).sum().item(), x.argsort()[:4].tolist(), x.nonzero().shape[0],
          torch.rand(100, 10, device="npu").argsort()[:, :2].tolist(), x.topk(3).values.tolist(),
          torch.equal(torch.zeros(1 << 20, device="npu"), torch.zeros(1 << 20, device="npu"))]
print("RESULT", json.dumps({"values": values}))
"""
    assert sim.run_torch(code) == sim.run_torch(code, **poison_env(sim.folder / "reads"))
