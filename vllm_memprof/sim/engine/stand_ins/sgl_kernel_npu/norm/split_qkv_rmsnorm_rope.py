"""A fused projection split into queries, keys and values, normed per head, with their rotary
embedding."""

import torch
import triton


@triton.jit
def split_qkv_rmsnorm_rope_kernel(
    input, sin, cos, q, k, v, q_weight, q_bias, k_weight, k_bias, head_dim, eps
):
    """Computed on the host where the outputs are small."""


def split_qkv_rmsnorm_rope(
    input,
    sin,
    cos,
    q_hidden_size,
    kv_hidden_size,
    head_dim,
    eps=None,
    q_weight=None,
    k_weight=None,
    q_bias=None,
    k_bias=None,
):
    """Allocates three tensors in the type of ``input``: [tokens, q_hidden_size], and two of
    [tokens, kv_hidden_size]."""
    q, k, v = (
        torch.empty(input.shape[0], width, device=input.device, dtype=input.dtype)
        for width in (q_hidden_size, kv_hidden_size, kv_hidden_size)
    )
    split_qkv_rmsnorm_rope_kernel[(input.shape[0],)](
        input, sin, cos, q, k, v, q_weight, q_bias, k_weight, k_bias, head_dim, eps
    )
    return q, k, v
