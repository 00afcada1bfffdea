"""A snapshot that torch_npu writes on a simulated device says what torch_npu itself says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_memprof.accounting.build import build_report
from vllm_memprof.logs.memory_files import beside
from vllm_memprof.logs.to_record import read_log

pytestmark = [pytest.mark.sim, pytest.mark.timeout(300)]

RUN = [sys.executable, "-m", "vllm_memprof", "sim", "run"]
WRITES = """
import json, sys, torch, torch_npu
memory = torch_npu.npu.memory
memory._record_memory_history("all", context="alloc", stacks="python")
def load_model():
    return [torch.empty(8 << 20, dtype=torch.float16, device="npu") for _ in range(4)]
def initialize_kv_cache():
    return torch.zeros(64 << 20, dtype=torch.int8, device="npu")
def capture_model():
    graph = torch_npu.npu.NPUGraph()
    with torch_npu.npu.graph(graph):
        return graph, torch.empty(3 << 20, dtype=torch.int8, device="npu")
kept = [load_model(), initialize_kv_cache(), capture_model()]
pieces = [torch.empty(5 << 20, dtype=torch.int8, device="npu") for _ in range(6)]
del pieces[1::2]
try:
    torch.empty(1 << 40, dtype=torch.int8, device="npu")
except RuntimeError as error:
    assert "out of memory" in str(error)
torch_npu.npu.synchronize()
memory._dump_snapshot(sys.argv[1] + "/snapshot.pickle")
print(json.dumps([torch_npu.npu.memory_reserved(), torch_npu.npu.memory_allocated()]))
"""


def test_a_snapshot_has_the_sums_of_torch_npu(sim_stack, tmp_path: Path) -> None:
    """torch_npu writes the runtime's counters with it; both files are one rank."""
    run = subprocess.run(
        [*RUN, "python", "-c", WRITES, str(tmp_path)],
        env={**os.environ, "OOM_SNAPSHOT_PATH": str(tmp_path)},
        capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    reserved, allocated = json.loads(run.stdout.splitlines()[-1])
    snapshot, counters = tmp_path / "snapshot.pickle", next(tmp_path.glob("device_0_mem*.csv"))
    (report,) = map(build_report, beside([*read_log(str(snapshot)), *read_log(str(counters))]))
    (rank,) = report.ranks
    (span,) = rank.phases
    assert span.after is not None
    assert (span.after.reserved_bytes, span.after.allocated_bytes) == (reserved, allocated)
    rows = {(row.table, row.name): row for file in rank.files for row in file.rows}
    assert sum(row.bytes or 0 for (table, _), row in rows.items() if table == "owners") == reserved
    idle = sum(row.bytes or 0 for (table, _), row in rows.items() if table == "free")
    assert idle == reserved - allocated
    assert rows["owners", "weights"].bytes == 4 * ((16 << 20) + 512)
    assert rows["owners", "kv_cache"].bytes == (64 << 20) + 512
    assert (rows["owners", "graph"].bytes or 0) >= 3 << 20
    assert (rows["modules", "APP"].bytes or 0) >= reserved
    assert rows["modules", "RUNTIME"].bytes
