"""The operators that importing the package registers with torch, as ``torch.ops.npu``: those that
SGLang calls and that have a body."""

from typing import Any

import torch  # noqa: TID251
import triton

#: Tokens of the vocabulary that the kernel takes at once; both of its inputs are padded to it.
_TOKENS_AT_ONCE = 256


@triton.jit  # type: ignore[untyped-decorator]
def apply_token_bitmask_kernel(logits: Any, bitmask: Any) -> None:
    """Computed on the host, whatever its size: the grammar of a request refuses other tokens."""


def apply_token_bitmask(logits: Any, bitmask: Any, indices: Any = None) -> Any:
    """Set the logits of the tokens whose bit is 0 to -inf, in place, and return them.

    Args:
        logits: [rows, tokens of the vocabulary], float32, float16 or bfloat16.
        bitmask: [rows, words], int32; token t of a row is bit t % 32 of its word t // 32.
        indices: the rows it is applied to; SGLang gives none.

    Allocates for the time of the call an int64 a row and, where the vocabulary is no multiple
    of 256, logits and bitmask once more, padded to one.
    (sgl-kernel-npu, csrc/apply_token_bitmask/op_host/apply_token_bitmask.cpp)
    """
    if indices is not None:
        raise NotImplementedError("memprof sim: apply_token_bitmask of some rows is not simulated")
    if logits.dim() != 2 or bitmask.dim() != 2 or logits.shape[0] != bitmask.shape[0]:
        raise RuntimeError(
            "apply_token_bitmask: logits and bitmask must be 2D and of as many rows, got "
            f"{tuple(logits.shape)} and {tuple(bitmask.shape)}"
        )
    if not logits.is_contiguous() or not bitmask.is_contiguous() or bitmask.dtype != torch.int32:
        raise RuntimeError(
            "apply_token_bitmask: logits and bitmask must be contiguous, bitmask of int32"
        )
    rows, tokens = logits.shape
    padded = -(-tokens // _TOKENS_AT_ONCE) * _TOKENS_AT_ONCE
    held = [torch.empty(rows, dtype=torch.int64, device=logits.device)]
    if padded != tokens:
        held.append(torch.empty(rows, padded, dtype=logits.dtype, device=logits.device))
    if padded // 32 > bitmask.shape[1]:
        held.append(torch.empty(rows, padded // 32, dtype=torch.int32, device=logits.device))
    apply_token_bitmask_kernel[(rows,)](logits, bitmask)
    del held
    return logits


_LIBRARY = torch.library.Library("npu", "FRAGMENT")
_LIBRARY.define(
    "apply_token_bitmask(Tensor logits, Tensor bitmask, Tensor? indices=None) -> Tensor"
)
_LIBRARY.impl("apply_token_bitmask", apply_token_bitmask, "PrivateUse1")
