"""Figures of the weights that a configuration stands for."""

from __future__ import annotations

import math
from typing import Any

from vllm_memprof.layout import ModelConfig, list_weights


def count_parameters(config: ModelConfig, **draft: Any) -> int | None:
    """The number of a model's parameters; None for a model type without a row."""
    weights = list_weights(config, **draft)
    return None if weights is None else sum(map(math.prod, weights.values()))
