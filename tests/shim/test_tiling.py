"""Workspace that follows from the shapes of an operator, with the real torch_npu on top, to the byte."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.shim.conftest import Sim

MIB = 1 << 20
#: The peak of one product beyond its result: the operator's workspace, in torch's unit of 512 bytes.
PRODUCT = """
npu = torch.npu
def workspace(left, right):
    npu.synchronize()
    npu.reset_peak_memory_stats()
    before = npu.memory_allocated()
    out = torch.mm(left, right)
    npu.synchronize()
    held, peak = npu.memory_allocated() - before, npu.max_memory_allocated() - before
    del out
    return peak - held
def matrix(rows, columns, transposed=False, dtype=torch.bfloat16):
    if transposed:
        return torch.empty(columns, rows, dtype=dtype, device="npu").t()
    return torch.empty(rows, columns, dtype=dtype, device="npu")
"""


def blocks(size: int) -> int:
    """A request in torch's caching allocator: 32 bytes more, in units of 512."""
    return -(-(size + 32) // 512) * 512


@pytest.mark.parametrize(
    ("left", "right", "copies"),
    [
        # A vision encoder's second product: 2,152 columns are no whole unit of 256 bytes, and both
        # are copied with 2,160. The weight is transposed: its columns are the rows of the product.
        ("4096, 2152", "2152, 1152, True", (4096 + 1152) * 2160 * 2),
        ("4096, 2048", "2048, 1152, True", 0),
        ("4096, 1152", "1152, 2152, True", 0),  # its rows are whole units, whatever the result's
        ("4096, 1152", "1152, 2152", 1152 * 2160 * 2),  # not transposed: the result's count
        ("4096, 2152, False, torch.float32", "2152, 1152, True, torch.float32", 0),
        ("4096, 100", "100, 1152, True", 0),  # so few columns go without
    ],
)
def test_matrices_whose_rows_are_no_whole_units_are_copied(
    sim: Sim, change_profile: Callable[..., None], left: str, right: str, copies: int
) -> None:
    change_profile(workspace=f"M* {MIB} 0 0 matmul_v3")
    figures = sim.run_torch(
        PRODUCT + f'print("RESULT", json.dumps(workspace(matrix({left}), matrix({right}))))\n'
    )
    assert figures == blocks(MIB + copies)


def test_a_rule_without_a_tiling_asks_for_its_base_alone(
    sim: Sim, change_profile: Callable[..., None]
) -> None:
    change_profile(workspace=f"M* {MIB} 0 0")
    figures = sim.run_torch(
        PRODUCT
        + 'print("RESULT", json.dumps(workspace(matrix(64, 2152), matrix(2152, 64, True))))\n'
    )
    assert figures == blocks(MIB)
