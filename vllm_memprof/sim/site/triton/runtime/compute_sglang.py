"""Kernels of SGLang and of sgl_kernel_npu that compute on the host.

Those without a limit write numbers that steer the scheduler: slots of the KV cache, positions, and
the tokens that a grammar allows.
Read in SGLang 0.5.23. Imports nothing but ``marks`` until one of them runs.
"""

import ctypes

from .marks import writes


@writes("out_indices", any_size=True)
def _alloc_extend(prefix_lens, seq_lens, last_loc, free_pages, out_indices, page_size, **_):
    """Slots of each request's new tokens: the rest of the page that its last slot lies in, then
    pages from the front of ``free_pages``. (NPUPagedTokenToKVPoolAllocator.alloc_extend)"""
    import torch

    columns = prefix_lens.tolist(), seq_lens.tolist(), last_loc.tolist()
    pages = sum(
        -(-end // page_size) + -begin // page_size for begin, end, _ in zip(*columns, strict=True)
    )
    free = iter(free_pages[:pages].tolist())
    slots = []
    for begin, end, slot in zip(*columns, strict=True):
        for position in range(begin, end):
            slot = next(free) * page_size if position % page_size == 0 else slot + 1
            slots.append(slot)
    out_indices.copy_(torch.tensor(slots, dtype=out_indices.dtype, device="cpu"))


@writes("req_to_token_ptr", any_size=True)
def _write_req_to_token_pool(
    req_to_token_ptr,
    req_pool_indices,
    prefix_tensors,
    pre_lens,
    seq_lens,
    extend_lens,
    out_cache_loc,
    **_,
):
    """A request's row of slots: those of its prefix, then the new ones.
    (sglang/kernels/ops/memory/common.py)"""
    import torch

    begin = 0
    columns = (req_pool_indices, prefix_tensors, pre_lens, seq_lens)
    for row, address, before, after in zip(*(each.tolist() for each in columns), strict=True):
        if before:  # the prefix comes as the address of its int64 slots
            memory = (ctypes.c_char * (before * 8)).from_address(address)
            prefix = torch.frombuffer(memory, dtype=torch.int64)
            req_to_token_ptr[row, :before] = prefix.to(req_to_token_ptr.dtype)
        end = begin + after - before
        req_to_token_ptr[row, before:after] = out_cache_loc[begin:end].to(req_to_token_ptr.dtype)
        begin = end


@writes("positions", "extend_start_loc", any_size=True)
def _compute_position(
    positions, extend_start_loc, extend_prefix_lens, extend_seq_lens, has_prefix, **_
):
    """Positions of the new tokens of each request, and where each begins.
    (sglang/kernels/ops/attention/position.py)"""
    import torch

    begin = 0
    lengths = extend_seq_lens.tolist()
    before = extend_prefix_lens.tolist() if has_prefix else [0] * len(lengths)
    for request, (prefix, length) in enumerate(zip(before, lengths, strict=True)):
        new = torch.arange(prefix, prefix + length, device="cpu")
        positions[begin : begin + length] = new.to(positions.dtype)
        extend_start_loc[request] = begin
        begin += length


@writes("logits", any_size=True)
def _apply_token_bitmask(logits, bitmask, **_):
    """-inf for the tokens whose bit is 0, and for those past the last word of the mask.
    (xgrammar/kernels/apply_token_bitmask_inplace_cpu.py)"""
    import torch

    bits = (bitmask.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device="cpu")) & 1
    allowed = bits.flatten(1)[:, : logits.shape[1]].bool()
    logits[:, : allowed.shape[1]].masked_fill_(~allowed, float("-inf"))
    logits[:, allowed.shape[1] :] = float("-inf")


@writes("output")
def _l1_norm(input, output, **_):
    values = input.float()
    output.copy_(values / values.sum(-1, keepdim=True))


@writes("q", "k", "v")
def _split_qkv_rmsnorm_rope(
    input, sin, cos, q, k, v, q_weight, q_bias, k_weight, k_bias, head_dim, eps, **_
):
    """Norm and rotation in float32; the rotation turns the first elements of a head, as many as
    ``cos`` has."""
    import torch

    tokens, width = input.shape[0], cos.shape[-1]
    sine, cosine = (table.float().reshape(tokens, 1, width) for table in (sin, cos))
    parts = input.float().split([q.shape[1], k.shape[1], v.shape[1]], dim=-1)
    for out, part, weight, bias in (
        (q, parts[0], q_weight, q_bias),
        (k, parts[1], k_weight, k_bias),
    ):
        heads = part.reshape(tokens, -1, head_dim)
        if eps is not None:
            heads = heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
            heads = heads if bias is None else heads + bias.float()
        turned, rest = heads[..., :width], heads[..., width:]
        first, second = turned.chunk(2, dim=-1)
        turned = turned * cosine + torch.cat((-second, first), dim=-1) * sine
        out.copy_(torch.cat((turned, rest), dim=-1).reshape(tokens, -1))
    v.copy_(parts[2])


ROWS = {
    "alloc_extend_kernel": _alloc_extend,
    "write_req_to_token_pool_triton": _write_req_to_token_pool,
    "compute_position_kernel": _compute_position,
    "apply_token_bitmask_kernel": _apply_token_bitmask,
    "l1_norm_kernel": _l1_norm,
    "split_qkv_rmsnorm_rope_kernel": _split_qkv_rmsnorm_rope,
}
