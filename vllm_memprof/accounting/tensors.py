"""Tensors: classes by name, sizes by dtype, and those that a model's configuration stands for."""

from __future__ import annotations

import json
import math
import re
from contextlib import suppress
from fractions import Fraction
from functools import cache

from vllm_memprof.files import read_own
from vllm_memprof.layout import list_weights, text_config
from vllm_memprof.record.weights import TensorRow, fold, folded

TABLE = read_own(__file__, "tensors.toml")


@cache
def class_of(name: str) -> str:
    """Return the class of tensors by their name, with * for numbers."""
    classes = TABLE["classes"].items()
    return next((cls for cls, pattern in classes if re.search(pattern, name)), "other")


def unwrapped(name: str) -> str:
    """Return a tensor's name without what a wrapping model puts before it."""
    return re.sub(TABLE["outer"], "", name)


def size_of(dtype: str) -> Fraction:
    """Return the bytes of one value."""
    bits = re.search(r"\d+", dtype)
    return Fraction(int(bits[0]) if bits else 8, 8)


@cache
def laid_out(model: str) -> list[TensorRow]:
    """Return the tensors that a configuration stands for; none where its kind is not known.

    Args:
        model: JSON of its configuration and of ``Loaded.quantized``.
    """
    (made, types), rows = json.loads(model), []
    types = {unwrapped(name): kinds for name, kinds in types.items()}
    whole = text_config(made)
    usual = str(whole.get("dtype") or whole.get("torch_dtype") or "bfloat16")
    fp8 = (made.get("quantization_config") or {}).get("quant_method") == "fp8"
    with suppress(KeyError, TypeError, IndexError):  # a configuration without what its kind has
        for name, shape in (list_weights(made, draft=True) or {}).items():
            pattern, layer = folded(name)
            dtype = usual.removeprefix("torch.")
            if fp8 and len(shape) > 1 and class_of(pattern) in TABLE["fp8"]:
                dtype = "float8_e4m3fn"
            for kind, layers in types.get(unwrapped(pattern), {}).items():
                if {*layer} <= {*layers}:
                    dtype = "int4" if "W4" in kind else "int8"
            size = math.ceil(math.prod(shape) * size_of(dtype))
            rows.append((name, {"dtype": dtype, "shape": list(shape)}, {"bytes": size}))
    return [TensorRow(**row) for row in fold(rows)]
