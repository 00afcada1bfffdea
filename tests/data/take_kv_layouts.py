"""Prints what a vLLM release says of its KV cache specs, for ``kv_layouts.json``; runs under the engine's interpreter.

    TORCH_DEVICE_BACKEND_AUTOLOAD=0 VLLM_PLUGINS= ENGINE_PYTHON tests/data/take_kv_layouts.py

No device is needed: the specs compute from their own fields and from a configuration that is given
here.
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

MAX_MODEL_LEN, STEP = 5000, 2048


def configuration(mode: str) -> SimpleNamespace:
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=MAX_MODEL_LEN),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=STEP),
        cache_config=SimpleNamespace(mamba_cache_mode=mode),
        max_in_flight_tokens=STEP,
    )


def make(kind: Any, **fields: Any) -> Any:
    """A spec with those of the fields that the release has."""
    known = set(inspect.signature(kind).parameters)
    return kind(**{name: value for name, value in fields.items() if name in known})


def main() -> None:
    import torch
    from vllm.v1 import kv_cache_interface as specs

    from vllm_memprof.capture.kv_plan import describe_group

    half, full = torch.bfloat16, torch.float32
    heads: dict[str, Any] = {"num_kv_heads": 4, "head_size": 128, "dtype": half}
    latent: dict[str, Any] = {"num_kv_heads": 1, "head_size": 576}
    state: dict[str, Any] = {
        "block_size": 400,
        "shapes": ((3, 1024), (8, 64, 128)),
        "dtypes": (half, full),
    }
    small: dict[str, Any] = {
        "block_size": 16,
        "num_kv_heads": 2,
        "head_size": 64,
        "dtype": torch.float16,
    }
    made = [
        make(specs.FullAttentionSpec, block_size=128, **heads),
        make(specs.FullAttentionSpec, block_size=16, head_size_v=64, **heads),
        make(specs.MLAAttentionSpec, block_size=128, dtype=half, **latent),
        make(
            specs.MLAAttentionSpec,
            block_size=64,
            dtype=torch.uint8,
            cache_dtype_str="fp8_ds_mla",
            **latent,
        ),
        make(specs.SlidingWindowSpec, sliding_window=1024, **small),
        make(specs.ChunkedLocalAttentionSpec, attention_chunk_size=1024, **small),
        make(specs.MambaSpec, **state),
        make(specs.MambaSpec, page_size_padded=300_000, num_speculative_blocks=2, **state),
    ]
    rows = []
    for spec in made:
        (group,) = describe_group(SimpleNamespace(kv_cache_spec=spec, layer_names=["layer"]))
        for mode in ("none", "align") if isinstance(spec, specs.MambaSpec) else ("none",):
            size = spec.max_memory_usage_bytes(configuration(mode))
            rows.append({"group": group, "mamba_cache_mode": mode, "max_bytes_per_request": size})
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
