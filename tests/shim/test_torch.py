"""The real torch_npu on the simulated device: what its allocator does, to the byte."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable

from tests.shim.conftest import Sim, results_of
from vllm_memprof.sim.profiles import load_profile
from vllm_memprof.sim.runtime import engine_env

MIB = 1 << 20
CONTEXT = 375_809_638
HCCL_BASE = 2 * 1_048_576  # a page, taken with a communicator's first collective

ALLOCATOR = """
npu = torch.npu
def state():
    free, total = npu.mem_get_info()
    return [npu.memory_allocated(), npu.memory_reserved(), total - free]
steps = {}
steps["start"] = state()
small = torch.empty(1000, dtype=torch.uint8, device="npu")
# 1000 + 32 bytes, in blocks of 512, from a segment of 2 MiB
steps["small"] = state()
medium = torch.empty(3 << 20, dtype=torch.uint8, device="npu")
steps["medium"] = state()                      # over 1 MiB: from a segment of 20 MiB
large = torch.empty(30 << 20, dtype=torch.uint8, device="npu")
# 10 MiB and more: a segment of its own, in steps of 2 MiB
steps["large"] = state()
peak = npu.max_memory_allocated()
del small, medium, large
steps["deleted"] = state()
npu.empty_cache()
steps["emptied"] = state()
print("RESULT", json.dumps({**steps, "peak": peak}))
"""


HOOK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
int aclrtMallocAlign32(void **pointer, unsigned long bytes, int policy) {
  int (*next)(void **, unsigned long, int) = dlsym(RTLD_NEXT, "aclrtMallocAlign32");
  fprintf(stderr, "hooked %lu\\n", bytes);
  return next ? next(pointer, bytes, policy) : -1;
}
"""


def test_preloaded_library_comes_before_the_runtime(sim: Sim) -> None:
    """As tools that watch CANN do: it sees each allocation, and hands it on."""
    source, library = sim.folder / "hook.c", sim.folder / "hook.so"
    source.write_text(HOOK)
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True, timeout=60
    )
    process = sim.start_torch(
        "torch.empty(1000, dtype=torch.uint8, device='npu')\n"
        "print('RESULT', json.dumps(torch.npu.memory_reserved()))",
        LD_PRELOAD=str(library),
    )
    out, err = process.communicate(timeout=120)
    assert results_of(out)[-1] == 2 * MIB, err[-2000:]
    assert f"hooked {2 * MIB}" in err


def test_operators_of_the_older_interface_decide_sizes(sim: Sim) -> None:
    shapes = sim.run_torch("""
torch.npu.set_compile_mode(jit_compile=True)
values = torch.ones(3, 4).npu()
print("RESULT", json.dumps([list(values.nonzero().shape), list(values[values > 0].shape)]))
""")
    assert shapes == [[12, 2], [12]]


def test_allocator_segments(sim: Sim) -> None:
    figures = sim.run_torch(ALLOCATOR)
    small, medium, large = 1536, (3 << 20) + 512, (30 << 20) + 512
    assert figures["start"] == [0, 0, CONTEXT]
    assert figures["small"] == [small, 2 * MIB, 2 * MIB + CONTEXT]
    assert figures["medium"] == [small + medium, 22 * MIB, 22 * MIB + CONTEXT]
    assert figures["large"] == [small + medium + large, 54 * MIB, 54 * MIB + CONTEXT]
    assert figures["peak"] == small + medium + large
    assert figures["deleted"] == [0, 54 * MIB, 54 * MIB + CONTEXT]
    assert figures["emptied"] == [0, 0, CONTEXT]


def test_expandable_segments(sim: Sim) -> None:
    figures = sim.run_torch(ALLOCATOR, PYTORCH_NPU_ALLOC_CONF="expandable_segments:True")
    allocated, reserved, used = figures["large"]
    assert allocated == figures["peak"] == 1536 + (3 << 20) + 512 + (30 << 20) + 512
    assert reserved + CONTEXT == used
    assert (
        reserved == 2 * MIB + 40 * MIB
    )  # pages of 2 and of 20 MiB, no hole between medium and large
    assert figures["emptied"] == [0, 0, CONTEXT]


def test_out_of_memory_is_torch_npus_own(sim: Sim, change_profile: Callable[..., None]) -> None:
    change_profile(total_bytes=4 << 30)
    code = """
keep = torch.empty(1 << 30, dtype=torch.uint8, device="npu")
try:
    torch.empty(3 << 30, dtype=torch.uint8, device="npu")
except RuntimeError as error:  # torch.OutOfMemoryError in newer releases
    text = str(error)
again = torch.empty(2 << 30, dtype=torch.uint8, device="npu")
print("RESULT", json.dumps({"text": text}))
"""
    for configuration in ("", "expandable_segments:True"):
        text = sim.run_torch(code, PYTORCH_NPU_ALLOC_CONF=configuration)["text"]
        assert "NPU out of memory. Tried to allocate 3.00 GiB" in text
        assert "4.00 GiB total capacity" in text


def test_small_tensors_compute(sim: Sim) -> None:
    figures = sim.run_torch("""
x = torch.tensor([[3, 1, 2], [9, 8, 7]])
d = x.npu()
checks = {
    "round trip": torch.equal(d.cpu(), x),
    "cast": torch.equal(d.to(torch.bfloat16).cpu(), x.to(torch.bfloat16)),
    "transpose": torch.equal(d.t().contiguous().cpu(), x.t()),
    "arange": torch.arange(3, 30, 4, device="npu").tolist() == list(range(3, 30, 4)),
    "arithmetic": torch.equal((d * 2 + d % 4 - 1).cpu(), x * 2 + x % 4 - 1),
    "compare": torch.equal((d > 2).cpu(), x > 2),
    "cumsum": torch.equal(torch.cumsum(d, 1).cpu(), torch.cumsum(x, 1)),
    "nonzero": torch.equal(torch.nonzero(d > 2).cpu(), torch.nonzero(x > 2)),
    "where": torch.equal(
        torch.where(d > 2, d, torch.zeros_like(d)).cpu(), torch.where(x > 2, x, 0)),
    "cat": torch.equal(torch.cat([d, d], 1).cpu(), torch.cat([x, x], 1)),
    "equal": torch.equal(d, d),
    "item": d.max().item() == 9 and d.sum().item() == 30,
}
d[torch.tensor([1]).npu()] = 5
checks["index put"] = d.cpu().tolist() == [[3, 1, 2], [5, 5, 5]]
logits = torch.full((4, 151936), float("nan"), device="npu", dtype=torch.float32)
checks["token ids"] = logits.argmax(-1).to(torch.int32).cpu().tolist() == [0] * 4
print("RESULT", json.dumps(checks))
""")
    assert [name for name, right in figures.items() if not right] == []


def test_graph_capture(sim: Sim) -> None:
    figures = sim.run_torch("""
npu = torch.npu
static = torch.zeros(1024, device="npu")
npu.synchronize()
before = npu.mem_get_info()[0]
reserved = npu.memory_reserved()
graph = npu.NPUGraph()
with npu.graph(graph):
    out = static + 1
    scratch = torch.empty(4 << 20, device="npu")
during = npu.memory_reserved() - reserved
charged = before - npu.mem_get_info()[0]
graph.replay()
npu.synchronize()
graph.reset()
print("RESULT", json.dumps({"pool": during, "charged": charged}))
""")
    assert figures["pool"] > 16 * MIB  # the graph's private pool is torch's
    assert figures["charged"] == figures["pool"] + 2 * MIB  # the runtime's share is not


def test_fractal_format_rounds_up(sim: Sim) -> None:
    figures = sim.run_torch("""
torch.npu.config.allow_internal_format = True
plain = torch.zeros(100, 50, dtype=torch.float16, device="npu")
before = torch.npu.memory_allocated()
fractal = torch_npu.npu_format_cast(plain, 29)
grown = torch.npu.memory_allocated() - before
sizes = [torch_npu.get_npu_format(fractal), grown, list(fractal.shape)]
print("RESULT", json.dumps({"sizes": sizes}))
""")
    rounded = (112 * 64 * 2 + 32 + 511) // 512 * 512
    assert figures["sizes"] == [29, rounded, [100, 50]]


def test_atb_takes_its_pool_at_the_first_operation(
    sim: Sim, change_profile: Callable[..., None]
) -> None:
    change_profile(operator_binary_bytes=0)
    figures = sim.run_torch("""
def used():
    torch.npu.synchronize()
    free, total = torch.npu.mem_get_info()
    return total - free - torch.npu.memory_reserved()
key = torch.zeros(4, 8, 128, dtype=torch.float16, device="npu")
cache = torch.zeros(10, 128, 8, 128, dtype=torch.float16, device="npu")
slots = torch.arange(4, dtype=torch.int32, device="npu")
steps = [used()]
for _ in range(2):
    torch_npu._npu_reshape_and_cache(
        key=key, value=key, key_cache=cache, value_cache=cache, slot_indices=slots)
    steps.append(used())
print("RESULT", json.dumps({"steps": steps}))
""")
    assert figures["steps"] == [CONTEXT, CONTEXT + 96 * MIB, CONTEXT + 96 * MIB]


def test_default_device_makes_no_context(sim: Sim) -> None:
    figures = sim.run_torch("""
soc = torch_npu.npu.get_soc_version()      # initialises torch_npu
torch.npu.set_device(1)
free = [torch.npu.mem_get_info(1)[0]]
print("RESULT", json.dumps({"soc": soc, "free": free}))
""")
    assert figures["soc"] == 223
    assert figures["free"] == [65_452_113_920 - CONTEXT]


HCCL = """
import os, torch.distributed as dist
rank = int(os.environ["RANK"])
npu = torch.npu
npu.set_device(rank)
npu.init()
def used():
    free, total = npu.mem_get_info()
    return total - free - npu.memory_reserved()
steps = {"start": used()}
dist.init_process_group("hccl")
steps["group"] = used()
x = torch.ones(8, device="npu")
dist.all_reduce(x)
npu.synchronize()
steps["first collective"] = used()
dist.all_reduce(x)
out = [torch.empty(8, device="npu") for _ in range(2)]
dist.all_gather(out, x)
steps["later"] = used()
pair = dist.new_group([0, 1])
steps["second group"] = used()
dist.all_reduce(x, group=pair)
npu.synchronize()
steps["its collective"] = used()
fused = dist.new_group([0, 1])
name = fused._get_backend(torch.device("npu")).get_hccl_comm_name(rank)
steps["named"] = used()
half = torch.zeros(64, 64, dtype=torch.float16, device="npu")
torch_npu.npu_mm_all_reduce_base(half, half, name)
npu.synchronize()
steps["fused operator"] = used()
gathered = [t.cpu().tolist() == x.cpu().tolist() for t in out]
dist.destroy_process_group()
print("RESULT", json.dumps({"steps": steps, "gathered": gathered, "end": used()}))
"""


def test_communicators_are_charged_at_their_first_collective(
    sim: Sim, change_profile: Callable[..., None]
) -> None:
    change_profile(operator_binary_bytes=0)
    for figures in sim.run_ranks(HCCL):
        each = 2 * 200 * MIB + HCCL_BASE
        assert figures["steps"] == {
            "start": CONTEXT,
            "group": CONTEXT,
            "first collective": CONTEXT + each,
            "later": CONTEXT + each,
            "second group": CONTEXT + each,
            "its collective": CONTEXT + 2 * each,
            "named": CONTEXT + 2 * each,
            # A product that reduces uses the communicator that it is given by name.
            "fused operator": CONTEXT + 3 * each,
        }
        assert figures["end"] == CONTEXT


def test_a_worker_stays_small(sim: Sim) -> None:
    figures = sim.run_torch("""
import resource
keep = [torch.empty(1 << 30, dtype=torch.uint8, device="npu").zero_() for _ in range(55)]
torch.npu.synchronize()
print("RESULT", json.dumps({"mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10}))
""")
    assert figures["mib"] < 2048
    assert os.cpu_count()


def test_torch_names_the_cann_of_the_profile(sim: Sim) -> None:
    profile = load_profile("910b")
    env = engine_env(profile, sim.folder / "prefix")
    figures = sim.run_torch(
        'print("RESULT", json.dumps({"cann": torch.version.cann}))',
        **{name: env[name] for name in ("ASCEND_HOME_PATH", "ASCEND_OPP_PATH")},
    )
    # The engine parses it as a version (vllm_ascend/attention/sfa_v1.py).
    assert figures == {"cann": profile.device.cann_version}


def test_a_tensor_is_shared_with_another_process(sim: Sim) -> None:
    """As a trainer hands weights to a server on its own NPU; and pinned tensors are known."""
    exporter = sim.start(
        """
import base64, json, pickle, torch, torch_npu
from torch.multiprocessing.reductions import reduce_tensor
pinned = torch.arange(8).pin_memory()
tensor = torch.arange(1 << 17, dtype=torch.int32).npu()[4:]
print(base64.b64encode(pickle.dumps(reduce_tensor(tensor))).decode(), flush=True)
input()
print("RESULT", json.dumps({
    "pinned": [pinned.is_pinned(), pinned[3:].is_pinned(), torch.arange(8).is_pinned(),
               pinned.pin_memory().data_ptr() == pinned.data_ptr()],
    "written": tensor[0].item()}))
""",
        sim.engine_python,
    )
    assert exporter.stdout is not None
    words = next(line for line in exporter.stdout if "arning" not in line)
    seen = sim.run_torch(f"""
import base64, pickle
torch.zeros(1, device="npu")
before = torch.npu.mem_get_info()[0]
rebuild, arguments = pickle.loads(base64.b64decode({words!r}))
tensor = rebuild(*arguments)
values = tensor[:3].tolist()
charged = before - torch.npu.mem_get_info()[0]
tensor[0] = 77
torch.npu.synchronize()
print("RESULT", json.dumps([values, charged, torch.npu.memory_allocated()]))
""")
    out, err = exporter.communicate("\n", timeout=60)
    figures = json.loads(out.split("RESULT ")[1])
    assert figures == {"pinned": [True, True, False, True], "written": 77}, err
    assert seen[:2] == [[4, 5, 6], 0]
    assert seen[2] < 4 << 20
