"""Operators of linear attention that vllm-ascend calls, from 0.30 on: outputs, and no values.

Each allocates what its caller takes from it, and nothing else: the scratch of the real kernels is
not known. What has no function here fails with its own name when it is called; the operators for
which vllm-ascend has a path of its own are not there at all, and it takes that path.
(``vllm_ascend/ops/gdn.py``, ``ops/kda.py``, ``ops/kimi_kda.py``, 0.30.0rc2)
"""

from __future__ import annotations

from typing import Any


def causal_conv1d_fn(x: Any, weight: Any, bias: Any = None, **_: Any) -> Any:
    """Return a tensor like the input: the convolution of a prefill, tokens first."""
    return x.new_empty(x.shape)


def causal_conv1d_update(x: Any, conv_state: Any, weight: Any, out: Any = None, **_: Any) -> Any:
    """Return ``out``, else a tensor like the input: the convolution of a decode step."""
    return x.new_empty(x.shape) if out is None else out


def recurrent_gated_delta_rule(query: Any, key: Any, value: Any, state: Any, **_: Any) -> Any:
    """Return a tensor like ``value``; the state is updated in place."""
    return value.new_empty(value.shape)


def _absent(name: str) -> Any:
    def fail(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"memprof sim: fla_npu.ops.ascendc.{name} is not simulated")

    return fail


chunk_kda_fwd = _absent("chunk_kda_fwd")
recurrent_kda = _absent("recurrent_kda")
