"""What computes on the simulated device, against torch on the CPU: in the types, shapes and strides it may meet."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import vllm_memprof.sim
from tests.shim.conftest import Sim
from vllm_memprof.sim.stand_ins import BODIES_DIR

SITE = Path(vllm_memprof.sim.__file__).parent / "site"

#: `check` compares what the device has with the same in float64 on the CPU, rounded once to the
#: type of the result.
PRELUDE = """
import math, torch.nn.functional as F
torch.manual_seed(7)
bad = []
ran = []
STEP = {torch.float32: 2.0**-18, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
def check(name, got, want):
    got = got.cpu()
    ran.append(name)
    step = STEP.get(got.dtype)
    if got.shape != want.shape:
        bad.append(f"{name}: shape {tuple(got.shape)}, not {tuple(want.shape)}")
    elif step is None:
        if not torch.equal(got.to(want.dtype), want):
            bad.append(f"{name}: {got.flatten()[:8].tolist()}, not {want.flatten()[:8].tolist()}")
    else:
        want = want.double()
        off = ((got.double() - want).abs() - step * want.abs()).nan_to_num(9.0 if got.isnan().ne(want.isnan()).any() else 0.0)
        if off.numel() and off.max().item() > (2e-6 if got.dtype == torch.float32 else step * 0.05):
            bad.append(f"{name}: off by {off.max().item():.3g}")
def pair(*shape, dtype=torch.float32, low=-2.0, high=2.0):
    # The values on the device, and the same (as they were rounded) in float64.
    host = (torch.rand(*shape) * (high - low) + low).to(dtype)
    return host.npu(), host.double()
def finish():
    print("RESULT", json.dumps({"bad": bad, "ran": len(ran)}))
"""

ELEMENTWISE = """
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    a, A = pair(3, 1, 5, dtype=dtype); b, B = pair(4, 5, dtype=dtype); p, P = pair(6, 7, dtype=dtype, low=0.1, high=3.0)
    s, S = a.squeeze(1).t(), A.squeeze(1).t()                       # not contiguous
    for name, function in {
        "add": lambda x, y: x + y, "subtract": lambda x, y: x - y, "multiply": lambda x, y: x * y, "divide": lambda x, y: x / y,
        "add with a factor": lambda x, y: torch.add(x, y, alpha=3), "larger": torch.maximum, "smaller": torch.minimum,
    }.items():
        check(f"{name} {dtype}", function(a, b), function(A, B))
        check(f"{name} of a transposed {dtype}", function(s, s), function(S, S))
    for name, function in {
        "scalar": lambda x: (x * 2.5), "from a scalar": lambda x: 1.5 - x, "reciprocal": lambda x: 1.0 / x, "power": lambda x: x ** 2.0,
        "power of a scalar": lambda x: 10.0 ** x, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "exp": torch.exp, "log": torch.log, "sin": torch.sin,
        "cos": torch.cos, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "silu": F.silu, "relu": lambda x: F.relu(x - 1), "negative": lambda x: -x,
        "absolute": lambda x: (x - 1).abs() if x.dtype == torch.float64 else x.sub(1).abs(), "gelu": F.gelu,
        "clamp": lambda x: x.clamp(0.5, 1.5), "mean": lambda x: x.mean(-1),
        "mean of all": lambda x: x.mean(), "sum": lambda x: x.sum(0), "sum, axis kept": lambda x: x.sum(1, keepdim=True),
        "softmax": lambda x: x.softmax(-1), "softmax of columns": lambda x: x.softmax(0), "log softmax": lambda x: x.log_softmax(-1),
        "running sum": lambda x: x.cumsum(1), "largest": lambda x: x.amax(1), "upper triangle": lambda x: x.triu(1), "lower": lambda x: x.tril(),
    }.items():
        if "absolute" in name or name == "relu":   # two roundings: exact in a type of more digits only
            if dtype != torch.float32: continue
        check(f"{name} {dtype}", function(p), function(P))
        check(f"{name} of a transposed {dtype}", function(p.t()), function(P.t()))
    check(f"where {dtype}", torch.where(p > 1, p, -p), torch.where(P > 1, P, -P))
    check(f"compare {dtype}", p >= 1.0, P >= 1.0)
    q = p.clone(); q.mul_(2).add_(p); check(f"in place {dtype}", q, (P * 2).to(dtype).double() + P)
    check(f"no elements {dtype}", p[:0] + 1, P[:0] + 1)
    c = p[:, 2].clone(); c /= 3; check(f"in place, divided {dtype}", c, P[:, 2] / 3)
e = torch.tensor([float("inf"), -float("inf"), 0.0, float("nan")])
check("softmax of a row with -inf", torch.tensor([[0.0, -float("inf")]]).npu().softmax(-1), torch.tensor([[1.0, 0.0]]))
check("infinities", e.npu() * 2, e.double() * 2); check("finite", e.npu().isfinite(), e.isfinite())
finish()
"""

CASTS = """
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
whole = torch.tensor([-1, -300, 5, 300, 2**32 - 1, 2**31, -(2**40) - 7, 2**63 - 1, -(2**63)])
for to in INTEGERS:
    check(f"{to} of int64", whole.npu().to(to), whole.to(to))
    small = whole.to(to)
    for name, function in {"not": lambda x: ~x, "minus": lambda x: -x, "less 7": lambda x: x - 7, "and 7": lambda x: x + 7, "thrice": lambda x: x * 3}.items():
        if name == "thrice" and to == torch.int64: continue     # more bits than numbers have here
        check(f"{name} {to}", function(small.npu()), function(small))
floats = [-1.5, 200.7, -0.5, 300.2, -300.9, 70000.5, -70000.5, 2.0**31 - 200, 3e9, -3e9, 1e10, -(2.0**31), 2.0**40 + 513,
          2.0**63, -(2.0**63), 1.7e19, -1e19, 3e20, math.inf, -math.inf, math.nan, 0.0]
for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
    values = torch.tensor(floats, dtype=torch.float64).to(dtype)
    for to in (torch.bool, *INTEGERS):
        check(f"{to} of {dtype}", values.npu().to(to), values.to(to))
        target = torch.zeros(len(floats), dtype=to).npu(); target.copy_(values.npu())
        check(f"{to} of {dtype}, copied", target, values.to(to))
    lines = torch.randn(6, 5, 22); lines[2, 1] = torch.tensor(floats); lines = lines.to(dtype)
    for to in (torch.float32, torch.bfloat16, torch.float16):
        check(f"lines of {to} of {dtype}", lines.npu()[:, 1:4, 3:].to(to), lines[:, 1:4, 3:].to(to))
        target = torch.zeros(6, 5, 22, dtype=to).npu(); target[1:4, :, 2:7] = lines.npu()[2:3, :, 4:9]
        check(f"lines of {to} of {dtype}, copied", target[1:4, :, 2:7].contiguous(), lines[2, :, 4:9].expand(3, 5, 5).to(to))
finish()
"""

PRODUCTS = """
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    x, X = pair(5, 24, dtype=dtype); w, W = pair(40, 24, dtype=dtype); bias, BIAS = pair(40, dtype=dtype)
    check(f"linear {dtype}", F.linear(x, w), X @ W.t())
    check(f"linear with bias {dtype}", F.linear(x, w, bias), X @ W.t() + BIAS)
    check(f"linear of three axes {dtype}", F.linear(x.view(5, 1, 24), w), (X @ W.t()).view(5, 1, 40))
    check(f"mm of a transposed {dtype}", torch.mm(w, x.t()), W @ X.t())
    check(f"slice times slice {dtype}", x[1:4, ::2] @ w[:, ::2].t(), X[1:4, ::2] @ W[:, ::2].t())
    check(f"vector times matrix {dtype}", x[0] @ w.t(), X[0] @ W.t())
    check(f"matrix times vector {dtype}", w @ x[0], W @ X[0])
    check(f"addmm {dtype}", torch.addmm(bias, x, w.t(), beta=0.5, alpha=2), 0.5 * BIAS + 2 * (X @ W.t()))
    u, U = pair(3, 4, 6, dtype=dtype); v, V = pair(3, 6, 2, dtype=dtype)
    check(f"bmm {dtype}", torch.bmm(u, v), torch.bmm(U, V))
    check(f"batches broadcast {dtype}", torch.matmul(u.unsqueeze(1), v[0]), torch.matmul(U.unsqueeze(1), V[0]))
    check(f"einsum {dtype}", torch.einsum("i,j->ij", x[0], x[1]), torch.einsum("i,j->ij", X[0], X[1]))
    check(f"nothing to sum {dtype}", x[:, :0] @ w[:, :0].t(), X[:, :0] @ W[:, :0].t())

    def norm(x, weight, eps):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight
    g, G = pair(24, dtype=dtype); r, R = pair(5, 24, dtype=dtype)
    y, rstd = torch_npu.npu_rms_norm(x, g, 1e-3)
    check(f"rms norm {dtype}", y, norm(X, G, 1e-3))
    check(f"rms norm, factor {dtype}", rstd, 1 / torch.sqrt((X * X).mean(-1, keepdim=True) + 1e-3))
    heads, HEADS = pair(2, 3, 24, dtype=dtype)
    check(f"rms norm of heads {dtype}", torch_npu.npu_rms_norm(heads, g, 1e-6)[0], norm(HEADS, G, 1e-6))
    y, _, total = torch_npu.npu_add_rms_norm(x, r, g, 1e-6)
    check(f"sum before the norm {dtype}", total, X + R)
    check(f"norm of the sum {dtype}", y, norm(X + R, G, 1e-6))
    check(f"layer norm {dtype}", F.layer_norm(x, (24,), g, r[0], 1e-3), F.layer_norm(X, (24,), G, R[0], 1e-3))
    check(f"layer norm without weights {dtype}", F.layer_norm(x, (24,), eps=1e-3), F.layer_norm(X, (24,), eps=1e-3))
    check(f"swiglu {dtype}", torch_npu.npu_swiglu(x), F.silu(X[:, :12]) * X[:, 12:])
    ids = torch.tensor([3, 0, 39, 3]); check(f"embedding {dtype}", F.embedding(ids.npu(), w), F.embedding(ids, W))
    check(f"index select {dtype}", w.index_select(0, ids.npu()), W.index_select(0, ids))
    check(f"index select of slices {dtype}", w[:, 3:9].index_select(0, ids.npu()), W[:, 3:9].index_select(0, ids))
    check(f"index select of a transposed {dtype}", w.t().index_select(1, ids.npu()), W.t().index_select(1, ids))
    check(f"rows {dtype}", w[:, 3:9][ids.npu()], W[:, 3:9][ids]); check(f"columns {dtype}", w.t()[ids.npu() // 2], W.t()[ids // 2])
    check(f"repeat {dtype}", w[:3, 2:7].repeat(2, 1, 3), W[:3, 2:7].repeat(2, 1, 3)); check(f"repeat a transposed {dtype}", w.t().repeat(1, 2), W.t().repeat(1, 2))
    check(f"index {dtype}", w[ids.npu()], W[ids])
    check(f"gather {dtype}", w.gather(1, ids.view(4, 1).npu() // 2), W.gather(1, ids.view(4, 1) // 2))
finish()
"""

PICKS = """
x = torch.randn(4, 33); x[1, 7] = 9.0; x[2, 5] = float("nan"); d = x.npu()
ties = torch.tensor([[2, 2, 1], [0, 5, 5]]); t = ties.npu()
for name, function in {
    "argmax": lambda v: v.argmax(-1), "argmax of all": lambda v: v.argmax(), "argmax, axis kept": lambda v: v.argmax(0, keepdim=True), "argmin": lambda v: v.argmin(1),
    "max": lambda v: v.max(-1).values, "max, where": lambda v: v.max(0).indices, "min": lambda v: v.min(1, keepdim=True).values,
    "topk": lambda v: v.topk(5, -1).values, "topk, where": lambda v: v.topk(2, 1).indices, "topk of columns": lambda v: v.topk(2, 0).indices,
    "smallest": lambda v: v[:2].topk(3, 1, largest=False).indices, "sort": lambda v: v.sort(-1).values, "sort down": lambda v: v.sort(0, descending=True).indices,
    "argsort": lambda v: torch.argsort(v, dim=-1),
}.items():
    check(name, function(d), function(x))
    check(name + " of a transposed", function(d.t().contiguous().t()), function(x))
check("the first of equals", t.argmax(-1), torch.tensor([0, 1]))
check("equals stay in order", torch.sort(t, stable=True, dim=-1, descending=True).indices, torch.sort(ties, stable=True, dim=-1, descending=True).indices)
half = x[:2].to(torch.bfloat16)
check("topk of halves", half.npu().topk(4, -1).indices, half.topk(4, -1).indices)
n = torch.tensor([1, 5, 1, 0, 2, 5, 5])
check("bincount", torch.bincount(n.npu(), minlength=9), torch.bincount(n, minlength=9))
check("histc", torch.histc(n.float().npu(), bins=6, min=0, max=6), torch.histc(n.float(), bins=6, min=0, max=6))
check("one hot", F.one_hot(n.npu(), 7), F.one_hot(n, 7))
check("nonzero", torch.nonzero(n.npu() == 5), torch.nonzero(n == 5))
grid = torch.tensor([[1, 5, 2], [3, 1, 4]])
check("product", grid.npu().prod(dim=-1), grid.prod(dim=-1))
check("product, axis kept", grid.npu().prod(0, keepdim=True), grid.prod(0, keepdim=True))
check("running count", (n.npu() == 5).cumsum(0), (n == 5).cumsum(0))
scores = torch.randn(6, 8)
weights, experts, rows = torch_npu.npu_moe_gating_top_k_softmax(scores.npu(), None, 2)
want = scores.double().softmax(-1).topk(2, -1)
check("routing, weights", weights, want.values); check("routing, experts", experts, want.indices)
check("routing, rows", rows, (torch.arange(2).view(1, 2) * 6 + torch.arange(6).view(6, 1)))
noise = torch.rand(3, 50).softmax(-1)
check("sampling picks the likeliest", noise.npu().div_(torch.rand(3, 50).npu().exponential_()).argmax(-1), noise.argmax(-1))
finish()
"""

ATTENTION = """
def reference(q, k, v, scale):      # [queries, heads, width], [keys, key heads, width], causal from the end
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    unseen = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).triu(k.shape[0] - q.shape[0] + 1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(unseen, -math.inf).softmax(-1), v)
mask = torch.ones(2048, 2048, dtype=torch.int8, device="npu")
BLOCK, HEADS, KEY_HEADS, WIDTH = 16, 4, 2, 32
def attend(q, k, v, ends, lengths, **more):
    return torch_npu.npu_fused_infer_attention_score(
        query=q, key=k, value=v, atten_mask=mask, input_layout="TND", block_size=BLOCK, actual_seq_lengths=ends, actual_seq_lengths_kv=lengths,
        num_key_value_heads=KEY_HEADS, num_heads=HEADS, scale=0.3, sparse_mode=3, **more)[0]
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    # Two prompts in one row, of 5 and of 21 tokens.
    q, Q = pair(26, HEADS, WIDTH, dtype=dtype); fused, FUSED = pair(26, 3 * KEY_HEADS * WIDTH, dtype=dtype)
    k, v = (fused[:, i * 64:(i + 1) * 64].reshape(26, KEY_HEADS, WIDTH) for i in (0, 2))
    K, V = (FUSED[:, i * 64:(i + 1) * 64].reshape(26, KEY_HEADS, WIDTH) for i in (0, 2))
    want = torch.cat([reference(Q[a:b], K[a:b], V[a:b], 0.3) for a, b in ((0, 5), (5, 26))])
    check(f"prompts {dtype}", attend(q, k, v, [5, 26], [5, 26]), want)
    # The same keys in a cache of blocks, at slots out of order, with one padded token.
    keys, values = (torch.zeros(9, BLOCK, KEY_HEADS, WIDTH, dtype=dtype, device="npu") for _ in range(2))
    table = torch.tensor([[7, 0, 0], [2, 5, 0]], dtype=torch.int32)
    slots = torch.tensor([7 * BLOCK + i for i in range(5)] + [int(table[1, i // BLOCK]) * BLOCK + i % BLOCK for i in range(21)], dtype=torch.int32)
    padded = slots.clone(); padded[-1] = -1
    torch_npu._npu_reshape_and_cache(key=k, value=fused[:, 128:].view(26, KEY_HEADS, WIDTH), key_cache=keys, value_cache=values, slot_indices=padded.npu())
    check(f"the padded token is nowhere {dtype}", keys[5, 4], torch.zeros(KEY_HEADS, WIDTH))
    torch_npu._npu_reshape_and_cache(key=k, value=fused[:, 128:].view(26, KEY_HEADS, WIDTH), key_cache=keys, value_cache=values, slot_indices=slots.npu())
    check(f"cache {dtype}", keys[2], K[5:21])
    check(f"cache of values {dtype}", values[5, :5], V[21:26])
    paged = lambda q, ends, lengths: attend(q, keys.view(9, BLOCK, -1), values.view(9, BLOCK, -1), ends, lengths, block_table=table.npu())
    check(f"paged prompts {dtype}", paged(q, [5, 26], [5, 21]), want)
    check(f"decode {dtype}", paged(q[[4, 25]], [1, 2], [5, 21]), want[[4, 25]])
    # One query of each sequence in a tensor of its own, as a decode step of SGLang has them.
    each = torch_npu.npu_fused_infer_attention_score(
        query=q[[4, 25]].unsqueeze(1), key=keys.view(9, BLOCK, -1), value=values.view(9, BLOCK, -1), input_layout="BSND", block_size=BLOCK,
        block_table=table.npu(), actual_seq_lengths_kv=[5, 21], num_key_value_heads=KEY_HEADS, num_heads=HEADS, scale=0.3)[0]
    check(f"decode, a query each {dtype}", each, want[[4, 25]].unsqueeze(1))
    check(f"rest of a prompt {dtype}", paged(q[[4] + list(range(15, 26))], [1, 12], [5, 21]), want[[4] + list(range(15, 26))])
# A table with fewer blocks than the keys ask for is no step, and nothing is read behind it.
for table in (torch.zeros(2, 0, dtype=torch.int32, device="npu"), torch.zeros(2, 1, dtype=torch.int32, device="npu")):
    out = attend(q[[4, 25]], keys.view(9, BLOCK, -1), values.view(9, BLOCK, -1), [1, 2], [21, 21], block_table=table)
    check(f"{table.shape[1]} blocks for 21 keys", torch.tensor(out.shape), torch.tensor([2, HEADS, WIDTH]))
finish()
"""

SGLANG = """
import acl, triton
from sgl_kernel_npu.mem_cache.allocator import alloc_extend_kernel
from sgl_kernel_npu.norm.l1_norm import l1_norm
from sgl_kernel_npu.norm.split_qkv_rmsnorm_rope import split_qkv_rmsnorm_rope
check("architecture", torch.tensor(acl.rt.get_device_info(0, 601)), torch.tensor([2201, 0]))
check("no such attribute", torch.tensor(acl.rt.get_device_info(0, 9)[1] != 0), torch.tensor(True))
numbers = lambda *values: torch.tensor(values).npu()

# Pages of 4: request 0 is new, 6 tokens; request 1 has 5 of 7 tokens, the last at slot 33; request 2 has 4 and gets 5.
slots = torch.full((13,), -1).npu()
before = torch.npu.memory_allocated()
alloc_extend_kernel[(3,)](numbers(0, 5, 4), numbers(6, 7, 9), numbers(-1, 33, 43), numbers(3, 20, 7, 1, 2), slots, 4, 4, 16)
check("slots", slots, torch.tensor([12, 13, 14, 15, 80, 81, 34, 35, 28, 29, 30, 31, 4]))
check("nothing is allocated", torch.tensor(torch.npu.memory_allocated()), torch.tensor(before))

@triton.jit
def write_req_to_token_pool_triton(req_to_token_ptr, req_pool_indices, prefix_tensors, pre_lens, seq_lens, extend_lens, out_cache_loc, req_to_token_ptr_stride): pass
@triton.jit
def compute_position_kernel(positions, extend_start_loc, extend_prefix_lens, extend_seq_lens, has_prefix): pass
pool, prefix = torch.zeros(4, 8, dtype=torch.int32).npu(), numbers(50, 51)
write_req_to_token_pool_triton[(2,)](pool, numbers(2, 0), numbers(prefix.data_ptr(), 0), numbers(2, 0), numbers(5, 3), numbers(3, 3),
    torch.tensor([60, 61, 62, 70, 71, 72], dtype=torch.int32).npu(), 8)
check("slots of a request", pool, torch.tensor([[70, 71, 72, 0, 0, 0, 0, 0], [0] * 8, [50, 51, 60, 61, 62, 0, 0, 0], [0] * 8]))
for dtype in (torch.int32, torch.int64):
    positions, starts = torch.full((5,), 9, dtype=dtype).npu(), torch.full((2,), 9, dtype=torch.int32).npu()
    compute_position_kernel[(2,)](positions, starts, numbers(4, 0), numbers(2, 3), True)
    check(f"positions {dtype}", positions, torch.tensor([4, 5, 0, 1, 2])); check(f"starts {dtype}", starts, torch.tensor([0, 2]))
    compute_position_kernel[(2,)](positions, starts, numbers(4, 0), numbers(2, 3), False)
    check(f"positions without prefix {dtype}", positions, torch.tensor([0, 1, 0, 1, 2]))

for dtype in (torch.float32, torch.bfloat16):
    x, X = pair(5, 4, dtype=dtype, low=0.1, high=1.0)
    check(f"shares {dtype}", l1_norm(x), X / X.sum(-1, keepdim=True))
    check(f"shares in float32 {dtype}", torch.tensor(l1_norm(x).dtype == torch.float32), torch.tensor(True))
    fused, FUSED = pair(5, 16 * 8, dtype=dtype); sin, SIN = pair(5, 1, 16, dtype=dtype); cos, COS = pair(5, 1, 16, dtype=dtype)
    (qw, QW), (kw, KW) = pair(16, dtype=dtype), pair(16, dtype=dtype); bias, BIAS = pair(16, dtype=dtype)
    for width in (16, 8):       # whole heads turned, and half of each
        for shift, SHIFT in ((None, 0), (bias, BIAS)):
            got = split_qkv_rmsnorm_rope(fused, sin[..., :width].contiguous(), cos[..., :width].contiguous(), 64, 32, 16, 1e-3, qw, kw, shift, shift)
            for name, result, part, weight in (("q", got[0], FUSED[:, :64], QW), ("k", got[1], FUSED[:, 64:96], KW)):
                h = part.view(5, -1, 16); h = h / (h.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight + SHIFT
                turned, rest = h[..., :width], h[..., width:]; a, b = turned.chunk(2, -1)
                turned = turned * COS[..., :width] + torch.cat((-b, a), -1) * SIN[..., :width]
                check(f"{name} {width} {dtype}", result, torch.cat((turned, rest), -1).view(5, -1))
            check(f"v {width} {dtype}", got[2], FUSED[:, 96:])
    plain = split_qkv_rmsnorm_rope(fused, torch.zeros_like(sin), torch.ones_like(cos), 64, 32, 16)
    check(f"not normed, not turned {dtype}", torch.cat(plain, 1), FUSED)
    # rows of a cache by number, of one axis and of two; a padded row is nowhere
    cache = torch.zeros(3, 4, 2, dtype=dtype).npu(); rows, ROWS = pair(3, 2, dtype=dtype); want = torch.zeros(12, 2).double(); want[5], want[11] = ROWS[0], ROWS[2]
    torch_npu.npu_scatter_nd_update_(cache.view(12, 2), torch.tensor([[5], [-1], [11]]).npu(), rows)
    check(f"rows {dtype}", cache.view(12, 2), want)
    cache.zero_(); torch_npu.npu_scatter_nd_update_(cache, torch.tensor([[1, 1], [9, 0], [2, 3]], dtype=torch.int32).npu(), rows)
    check(f"rows by two numbers {dtype}", cache.view(12, 2), want)
    targets = [torch.zeros(3, 2, dtype=dtype).npu(), torch.zeros(2, dtype=dtype).npu()]
    torch._foreach_copy_(targets, [rows, rows[1]])
    check(f"copies {dtype}", targets[0], ROWS); check(f"copies of a row {dtype}", targets[1], ROWS[1])
finish()
"""

VLLM_ASCEND = """
import triton, triton.language as tl
from vllm_ascend.ops.triton.rope import rope_forward_triton
from vllm_ascend.ops.triton.triton_utils import init_device_properties_triton
from vllm.v1.worker.block_table import _compute_slot_mapping_kernel
init_device_properties_triton()
positions = torch.tensor([3, 0, 9, 1]); table, TABLE = pair(12, 16)
for dtype in (torch.float32, torch.bfloat16):
    for neox in (True, False):
        q, Q = pair(4, 3, 24, dtype=dtype); k, K = pair(4, 1, 24, dtype=dtype)
        rope_forward_triton(q, k, cos_sin_cache=table, positions=positions.npu(), rope_dim=16, is_neox_style=neox)
        for name, got, want in (("queries", q, Q), ("keys", k, K)):
            cos, sin = (half[:, None] for half in TABLE[positions].chunk(2, -1))
            first, second = (want[..., :8], want[..., 8:16]) if neox else (want[..., 0:16:2], want[..., 1:16:2])
            turned = (first * cos - second * sin, second * cos + first * sin)
            want = torch.cat([torch.cat(turned, -1) if neox else torch.stack(turned, -1).flatten(-2), want[..., 16:]], -1)
            check(f"rotary {name} {dtype} {neox}", got, want)
blocks = torch.tensor([[4, 6], [1, 9]], dtype=torch.int32); slots = torch.full((12,), 7, dtype=torch.int32).npu()
_compute_slot_mapping_kernel[(3,)](7, 12, torch.tensor([0, 5, 7, 99], dtype=torch.int32).npu(), torch.tensor([0, 1, 2, 3, 4, 6, 7]).npu(), blocks.npu(), 2, 4, slots,
    TOTAL_CP_WORLD_SIZE=1, TOTAL_CP_RANK=0, CP_KV_CACHE_INTERLEAVE_SIZE=1, PAD_ID=-1, BLOCK_SIZE=1024)
check("slots", slots, torch.tensor([16, 17, 18, 19, 24, 38, 39, -1, -1, -1, -1, -1]))
from vllm_ascend.ops.triton import reject_sample as R
ints = lambda *values: torch.tensor(values, dtype=torch.int32).npu()
none = lambda width=3: torch.full((3, width), -1, dtype=torch.int32).npu()
# requests with two, two and no drafted tokens; the model would have chosen the first two, and not the third
ends, drafted, more, recovered = ints(2, 4, 4), ints(5, 6, 7, 8), ints(20, 21, 22).view(3, 1), ints(1, 2, 3, 4)
out = none(); R.rejection_greedy_sample_with_triton(out, [2, 2, 0], ends, drafted, ints(5, 6, 1, 8), more, None, 2, 3, 1)
check("greedy", out, torch.tensor([[5, 6, 20], [1, -1, -1], [22, -1, -1]]))
out = none(); R.rejection_greedy_sample_with_triton(out, [2, 2, 0], ends, drafted, ints(5, 6, 1, 8), more, torch.tensor([False, True, True]).npu(), 2, 3, 1)
check("greedy, some requests", out, torch.tensor([[-1, -1, -1], [1, -1, -1], [22, -1, -1]]))
out = none(2); R.rejection_greedy_sample_with_triton(out, [1, 1, 1], ints(1, 2, 3), ints(5, 6, 7), ints(5, 1, 7), more, None, 1, 3, 1)
check("greedy, one each", out, torch.tensor([[5, 20], [1, -1], [7, 22]]))
chances = torch.full((4, 10), 0.01)
for at, (token, chance) in enumerate(((5, .9), (6, .2), (7, .6), (8, .1))): chances[at, token] = chance
chances[:, 2] = torch.tensor([0.3, 0.3, 0.0, 0.0]); chances[:, 9] = torch.tensor([0.0, 0.0, 0.4, 0.4])
numbers, greedy = torch.tensor([0.5, 0.5, 0.5, 0.05]).npu(), torch.tensor([False, False, True]).npu()
flags = dict(NO_ORI_TARGET_PROBS=True, NO_DRAFT_PROBS=True, ENABLE_REDUCE_SAMPLING=False, BLOCK_SIZE=1)
for kernel in (R.rejection_random_sample_kernel, R.rejection_random_sample_block_verify_kernel):
    for factor, want in ((False, [[5, 2, -1], [7, 8, 21], [-1] * 3]), (True, [[5, 6, 20], [7, 8, 21], [-1] * 3])):
        out = none(); kernel[(3,)](out, ends, drafted, None, chances.npu(), None, more, recovered, numbers, greedy, 2, 10, 10, 3, None,
            ENTROPY_VERIFY=factor, POSTERIOR_ALPHA=9.0, **flags)
        check(f"random {factor}", out, torch.tensor(want))
for drafter, want in ((None, [2, 2, 9, 9]), (chances.roll(1, 1), [5, 2, 7, 9])):
    out = ints(-1, -1, -1, -1)
    R.sample_recovered_tokens_kernel[(3, 2)](out, ends, drafted, None if drafter is None else drafter.npu(), chances.npu(), None, torch.ones(3, 10).npu(), 10, 10,
        NO_DRAFT_PROBS=drafter is None, ENABLE_REDUCE_SAMPLING=False, SUB_BLOCK=4096)
    check(f"in place of a rejected token {drafter is None}", out, torch.tensor(want))
each = torch.zeros(4).npu(); R.expand_triton(3, each, torch.tensor([0.0, 2.0, 3.0]).npu(), ends, 0, 1, 32)
check("of a request's tokens", each, torch.tensor([1.0, 1.0, 2.0, 2.0]))
from vllm_ascend.utils import enable_custom_op
assert enable_custom_op()
for dtype in (torch.float32, torch.bfloat16):
    x, X = pair(5, 24, dtype=dtype); r, R = pair(5, 24, dtype=dtype); g, G = pair(24, dtype=dtype); b, B = pair(24, dtype=dtype)
    for shift, SHIFT in ((None, 0), (b, B)):
        y, _, total = torch.ops._C_ascend.npu_add_rms_norm_bias(x, r, g, shift, 1e-2)
        check(f"sum before the norm {dtype}", total, X + R)
        check(f"norm of the sum {dtype}", y, (X + R) / ((X + R).square().mean(-1, keepdim=True) + 1e-2).sqrt() * G + SHIFT)
scores = torch.randn(6, 8)
for renorm in (0, 1):
    weights, experts, _ = torch.ops._C_ascend.moe_gating_top_k(scores.npu(), k=2, k_group=1, group_count=1, group_select_mode=1, renorm=renorm,
        norm_type=0, out_flag=False, routed_scaling_factor=1.0, eps=1e-20, bias_opt=None)
    want = scores.double().softmax(-1).topk(2, -1)
    check(f"routing, experts {renorm}", experts, want.indices)
    check(f"routing, weights {renorm}", weights, want.values / (want.values.sum(-1, keepdim=True) if renorm else 1))
for dtype in (torch.float32, torch.bfloat16):
    x, X = pair(6, 24, dtype=dtype); w, W = pair(4, 10, 24, dtype=dtype); p, P = pair(6, 2, dtype=dtype, low=0.1, high=0.9)
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(6)]).int(); chosen[chosen == 2] = 3  # one expert gets nothing
    by_expert = chosen.flatten().long().argsort(stable=True); of_rows = chosen.flatten().long()[by_expert]
    route = lambda first, last: torch.ops._C_ascend.npu_moe_init_routing_custom(x, chosen.npu(), scale=None, active_num=12, expert_num=4,
        expert_tokens_num_type=1, expert_tokens_num_flag=True, active_expert_range=[first, last], quant_mode=-1)[:3]
    rows, places, counts = route(0, 4)
    check(f"rows by expert {dtype}", rows, X[by_expert // 2])
    check(f"their places {dtype}", places, by_expert.argsort())
    check(f"rows of each expert {dtype}", counts, torch.bincount(of_rows, minlength=4))
    _, some, count = route(1, 4)
    check(f"places of other ranks {dtype}", some, (by_expert.argsort() - (of_rows < 1).sum()).clamp(min=-1))
    products = torch_npu.npu_grouped_matmul([rows], [w.transpose(1, 2)], split_item=2, group_type=0, group_list_type=1, group_list=counts)[0]
    want = torch.stack([X[at // 2] @ W[expert].t() for at, expert in zip(by_expert.tolist(), of_rows.tolist())])
    check(f"a product for each expert {dtype}", products, want)
    back = torch_npu.npu_moe_token_unpermute(products, places, probs=p)
    rounded = want.to(dtype).double()
    check(f"back to the tokens {dtype}", back, (rounded[by_expert.argsort()].view(6, 2, 10) * P[..., None]).sum(1))
finish()
"""


@pytest.mark.parametrize(
    ("script", "least"),
    [(ELEMENTWISE, 200), (CASTS, 99), (PRODUCTS, 88), (PICKS, 35), (ATTENTION, 26)],
    ids=["element", "cast", "product", "pick", "attend"],
)
def test_results_are_those_of_the_cpu(sim: Sim, script: str, least: int) -> None:
    figures = sim.run_torch(PRELUDE + script)
    assert not figures["bad"], "\n".join(figures["bad"])
    assert figures["ran"] >= least


def test_operators_and_triton_kernels_of_vllm_ascend(sim: Sim) -> None:
    figures = sim.run_torch(PRELUDE + VLLM_ASCEND, PYTHONPATH=str(SITE))
    assert not figures["bad"], "\n".join(figures["bad"])
    assert figures["ran"] == 9 + 10 + 8 + 4 + 12


def test_stand_ins_and_triton_kernels_of_sglang(sim: Sim, tmp_path: Path) -> None:
    """The bodies of sgl_kernel_npu and the rows beside them: no SGLang is needed."""
    bodies = tmp_path / "bodies"
    shutil.copytree(BODIES_DIR, bodies)
    for root in [path for path in bodies.iterdir() if path.is_dir()]:  # as sim setup lays it out
        root.with_suffix(".py").rename(root / "__init__.py")
    figures = sim.run_torch(PRELUDE + SGLANG, PYTHONPATH=f"{SITE}:{bodies}")
    assert not figures["bad"], "\n".join(figures["bad"])
    assert figures["ran"] == 4 + 1 + 2 * 3 + 2 * (2 + 4 * 3 + 1 + 2 + 2)


def test_nothing_is_computed_above_the_limit(sim: Sim, change_profile: Callable[..., None]) -> None:
    change_profile(host_compute_bytes=1024)
    figures = sim.run_torch("""
def left(value):
    return value.cpu().unique().tolist()
steps = {}
sums, products, later = (torch.zeros(*shape, device="npu") for shape in ((32, 32), (16, 64), (16, 16)))
big, small = torch.ones(32, 32, device="npu"), torch.ones(16, 16, device="npu")
steps["small sum"] = left(small + small)
steps["big sum"] = left(torch.add(big, big, out=sums))
steps["product"] = left(small @ small)
weights = torch.ones(16, 64, device="npu")
steps["product with big weights"] = left(torch.mm(small, weights, out=products))
steps["floats from then on"] = left(torch.add(small, small, out=later))
steps["integers from then on"] = left(small.int() + 1)
print("RESULT", json.dumps(steps))
""")
    assert figures == {
        "small sum": [2.0],
        "big sum": [0.0],
        "product": [16.0],
        "product with big weights": [0.0],
        "floats from then on": [0.0],  # with one product missing, a model's floats mean nothing
        "integers from then on": [2],
    }
