"""The packages on the engine's path: null Triton and ``acl``, in a Python of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vllm_memprof.sim.runtime import SITE_DIR


def run(code: str, **env: str) -> str:
    """Runs code with the site folder first on the path; its output. The interpreter reads nothing
    of the user's."""
    done = subprocess.run(
        [sys.executable, "-S", "-B", "-c", code],
        env={"PYTHONPATH": str(SITE_DIR), **env},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def profile(tmp_path):
    def write(**values: object) -> str:
        path = tmp_path / "profile.txt"
        path.write_text("".join(f"{key}={value}\n" for key, value in values.items()))
        return str(path)

    return write


def test_vllm_takes_it_for_usable():
    """The question of vllm/triton_utils/importing.py (0.23.0): exactly one active driver."""
    code = (
        "from triton.backends import backends as b; "
        "print([x.driver.is_active() for x in b.values()], 'cpu' in b)"
    )
    assert run(code) == "[True] False"


def test_a_device_without_triton_support_has_no_active_driver(profile):
    code = (
        "from triton.backends import backends as b; "
        "print([x.driver.is_active() for x in b.values()])"
    )
    assert run(code, MEMPROF_SIM_PROFILE=profile(soc_name="Ascend310P3")) == "[False]"


def test_core_counts_come_from_the_profile(profile):
    code = """
import triton
properties = triton.runtime.driver.active.utils.get_device_properties(0)
print(properties["num_aicore"], properties["num_vectorcore"])
"""
    path = profile(soc_name="Ascend910_93", ai_core_count=24, vector_core_count=48)
    assert run(code, MEMPROF_SIM_PROFILE=path) == "24 48"


def test_launches_do_nothing_and_wrappers_run():
    code = """
import triton, triton.language as tl

@triton.autotune(
    configs=[triton.Config({"BLOCK": 64}, num_warps=2), triton.Config({"BLOCK": 128})], key=["n"]
)
@triton.heuristics({"EVEN": lambda args: args["n"] % 2 == 0})
@triton.jit(do_not_specialize=["n"])
def kernel(x, out, n, BLOCK: tl.constexpr = 4):
    tl.store(out + tl.program_id(0), tl.load(x))

@triton.jit
def plain(x, out): pass

def wrapper(n):
    out = [None] * n
    assert kernel[(triton.cdiv(n, 4),)](None, out, n, BLOCK=4) is None
    assert kernel[lambda meta: (meta["BLOCK"],)](None, out, n) is None
    assert plain[1, 2](None, out) is None
    assert plain.run(None, out, grid=(1,), warmup=False) is None
    return len(out)

print(wrapper(7), kernel.arg_names, plain.__name__, kernel.base_fn.__name__, kernel.best_config)
params = kernel.fn.fn.params[2:]
print([(p.name, p.is_constexpr, p.has_default, p.do_not_specialize) for p in params])
"""
    assert run(code).splitlines() == [
        "7 ['x', 'out', 'n', 'BLOCK'] plain kernel "
        "BLOCK: 64, num_warps: 2, num_ctas: 1, num_stages: 2",
        "[('n', False, False, True), ('BLOCK', True, True, False)]",
    ]


def test_a_kernel_of_a_known_name_with_other_arguments_is_left_alone():
    """vllm-ascend and sgl_kernel_npu have a kernel of one name each, with arguments of its own."""
    code = """
import triton

@triton.jit
def split_qkv_rmsnorm_rope_kernel(input_gm_ptr, q_gm_ptr): pass

print(split_qkv_rmsnorm_rope_kernel[(1,)](None, None))
"""
    assert run(code) == "None"


def test_what_a_kernel_writes_to_is_read_from_its_source(tmp_path):
    (tmp_path / "kernels.py").write_text("""
import triton, triton.language as tl

@triton.jit
def keep(target, source, n):
    for step in range(n):
        target += step
        tl.store(target, tl.load(source))

@triton.jit
def kernel(q_ptr, k_ptr, table, out, index, counter, n, BLOCK: tl.constexpr):
    q_ptr = q_ptr + tl.program_id(0) * n
    row = k_ptr + BLOCK
    offset = tl.load(index)
    if n > 1:
        tl.store(q_ptr + offset, tl.load(table))
    keep(row, table, n=n)
    tl.atomic_add(pointer=counter, val=1)
    pair = (tl.make_block_ptr(base=out), 0)
    pair[0].store(1)
""")
    code = """
import kernels
from triton.compiler import ASTSource
from triton.compiler.writes import written_parameters
print(sorted(written_parameters(kernels.kernel)))
tensors = ["q_ptr", "k_ptr", "table", "out", "index", "counter"]
source = ASTSource(kernels.kernel, dict.fromkeys([*tensors, "n"], "*fp32"), {"n": 2})
module = source.make_ir(None, None)
names = []
module.walk(lambda op: names.append(op.get_name()))
body = module.operations[0].get_block()
places = {body.get_argument(i).id(): tensors[i] for i in range(body.get_num_arguments())}
stores = [op for op in module.operations if op.get_name() == "tt.store"]
print(names, [places[op.get_operand(0).id()] for op in stores])
"""
    out = run(code, PYTHONPATH=f"{SITE_DIR}:{tmp_path}").splitlines()
    assert out[0] == "['BLOCK', 'counter', 'k_ptr', 'n', 'out', 'q_ptr']"
    stores = ["tt.store"] * 4
    assert (
        out[1] == f"{[*stores, 'tt.return', 'tt.func', 'builtin.module']} "
        "['q_ptr', 'k_ptr', 'out', 'counter']"
    )


def test_host_helpers_compute():
    code = """
import triton
powers = [triton.next_power_of_2(n) for n in (0, 1, 2, 3, 1000, 1024)]
print([triton.cdiv(n, 128) for n in (0, 1, 128, 129)], powers)
"""
    assert run(code) == "[0, 1, 1, 2] [0, 1, 2, 4, 1024, 1024]"


def test_types_and_constexpr_are_real():
    code = """
import triton.language as tl
width, eight = tl.bfloat16.primitive_bitwidth, str(tl.float8e4nv)
print(tl.float32 == tl.core.float32, width, eight, tl.constexpr(3) == 3)
print(isinstance(tl.float32, tl.dtype), tl.pointer_type(tl.int8).element_ty)
"""
    assert run(code).splitlines() == ["True 16 fp8e4nv True", "True int8"]


@pytest.mark.parametrize(
    "expression",
    [
        "tl.load(0)",
        "tl.extra.cann.extension.insert_slice()",
        "tldevice.fast_expf(1.0)",
        "kernel(1)",
    ],
)
def test_device_functions_fail_by_name_outside_a_kernel(expression):
    code = f"""
import triton, triton.language as tl, triton.language.extra.libdevice as tldevice
@triton.jit
def kernel(x): pass
try:
    {expression}
except RuntimeError as error:
    print(error)
"""
    name = expression.split("(")[0].rsplit(".", 1)[-1]
    assert name in run(code)


def test_feature_tests_are_answered_as_by_triton_3_2():
    code = """
import inspect, triton, triton.language as tl
print(hasattr(tl, "gather"), hasattr(tl, "make_tensor_descriptor"))
print("_semantic" in inspect.signature(tl.core.view).parameters)
print(triton.__version__)
"""
    assert run(code).splitlines() == ["True False", "False", "3.2.0"]


def test_no_compiler():
    code = """
import triton
try:
    triton.compile(None)
except triton.CompilationError as error:
    print("does not compile" in str(error))
"""
    assert run(code) == "True"


def test_names_that_torch_and_vllm_import():
    run(
        """
import triton.backends.compiler, triton.compiler.compiler, triton.language.extra.ascend.libdevice
from triton import Config, JITFunction, knobs, set_allocator
from triton.backends import BaseBackend, backends
from triton.backends.compiler import AttrsDescriptor, GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.compiler.compiler import make_backend, triton_key
from triton.compiler.errors import CompilationError
from triton.language import core
from triton.language.extra import libdevice
from triton.language.extra.cann import extension
from triton.language.standard import _log2
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner, Heuristics, OutOfResources, PTXASError, autotune
from triton.runtime.cache import _base32, _base64
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import KernelInterface
from triton.testing import do_bench
assert knobs.runtime.jit_post_compile_hook is None and knobs.autotuning.print is False
assert driver.active.get_current_target().backend == "npu"
"""
    )


def test_acl_imports_without_a_library():
    assert run("from acl.rt import memcpy; print(memcpy.__module__)") == "acl.rt"


def test_bytes_move_between_the_registered_memory_of_two_processes():
    """The stand-in for Mooncake's transfer engine: reads, writes, and what it refuses."""
    peer = subprocess.Popen(
        [sys.executable, "-S", "-B", "-c", _PEER],
        env={"PYTHONPATH": str(SITE_DIR)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert peer.stdout
    port, address = peer.stdout.readline().split()
    out = run(_OWN.format(peer=f"127.0.0.1:{port}", address=address))
    assert out.split("\n") == ["-1", "0 b'xxxx'", "-1", "0", "-1"]
    assert peer.communicate("\n", 20)[0].strip() == "b'yyyyxx'"


_PEER = """
import ctypes, sys
from mooncake.engine import TransferEngine
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "ascend", "") == 0
room = ctypes.create_string_buffer(b"x" * 4096, 4096)
engine.register_memory(ctypes.addressof(room), 4096)
print(engine.get_rpc_port(), ctypes.addressof(room), flush=True)
sys.stdin.readline()
print(room.raw[:6])
"""
_OWN = """
import ctypes
from mooncake.engine import TransferEngine
engine = TransferEngine()
engine.initialize("127.0.0.1", "P2PHANDSHAKE", "ascend", "")
room = ctypes.create_string_buffer(4096)
own = ctypes.addressof(room)
print(engine.transfer_sync_read("{peer}", own, {address}, 4))  # not registered here
engine.register_memory(own, 4096)
print(engine.batch_transfer_sync_read("{peer}", [own], [{address}], [4]), room.raw[:4])
print(engine.transfer_sync_read("{peer}", own, {address} + 4000, 200))  # not registered there
room.raw = b"y" * 4096
print(engine.transfer_sync_write("{peer}", own, {address}, 4))
print(engine.transfer_sync_read("127.0.0.1:1", own, {address}, 4))  # nobody there
"""
