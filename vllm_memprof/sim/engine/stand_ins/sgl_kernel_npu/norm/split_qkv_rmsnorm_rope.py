"""A fused projection split into queries, keys and values, normed per head, with their rotary
embedding."""

from typing import Any

import torch  # noqa: TID251
import triton


@triton.jit  # type: ignore[untyped-decorator]
def split_qkv_rmsnorm_rope_kernel(
    input: Any,
    sin: Any,
    cos: Any,
    q: Any,
    k: Any,
    v: Any,
    q_weight: Any,
    q_bias: Any,
    k_weight: Any,
    k_bias: Any,
    head_dim: int,
    eps: float | None,
) -> None:
    """Computed on the host where the outputs are small."""


def split_qkv_rmsnorm_rope(
    input: Any,
    sin: Any,
    cos: Any,
    q_hidden_size: int,
    kv_hidden_size: int,
    head_dim: int,
    eps: float | None = None,
    q_weight: Any = None,
    k_weight: Any = None,
    q_bias: Any = None,
    k_bias: Any = None,
) -> tuple[Any, Any, Any]:
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
