"""The options that ``--fit`` can search for, as a table, and the values of each to try."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from vllm_memprof.errors import UsageError
from vllm_memprof.plans.bisection import HOLDS, TOO_LITTLE, TOO_MUCH
from vllm_memprof.plans.wants import Miss

#: Sizes of tensor parallelism that are tried unless --between says otherwise.
MOST_DEVICES = 64
#: ``config.json`` of a model; None where only the engine knows it.
ModelConfig = Mapping[str, object] | None
_RANGE = re.compile(r"([0-9.]+)\s*:\s*([0-9.]+)")


@dataclass(frozen=True)
class Space:
    """The values of one search in the order of ambition, the most ambitious last."""

    values: list[str]
    low: str
    high: str
    step: str


@dataclass(frozen=True)
class FitKnob:
    """One option that can be searched for."""

    name: str
    option: str  # of the engine
    goal: str  # smallest | largest
    more: tuple[str, ...]  # kinds of misses that ask for a more ambitious value
    #: (model, low, high, step) -> values to try
    space: Callable[[ModelConfig, Decimal | None, Decimal | None, Decimal | None], Space]
    each: bool = False  # every value before the answer is tried

    def verdict(self, missing: list[Miss]) -> int:
        """Return the verdict on a value, from what its plan lacks."""
        if not missing:
            return HOLDS
        return TOO_LITTLE if all(miss.kind in self.more for miss in missing) else TOO_MUCH


def parse_range(text: str | None) -> tuple[Decimal | None, Decimal | None]:
    """Return (low, high) of ``LOW:HIGH``.

    Raises:
        UsageError: it is something else.
    """
    if text is None:
        return None, None
    match = _RANGE.fullmatch(text.strip())
    low, high = (_number(part, "--between") for part in match.groups()) if match else (None, None)
    if low is None or high is None or low > high:
        raise UsageError(
            f"--between {text!r} is not a range", hint="LOW:HIGH, e.g. --between 1024:65536"
        )
    return low, high


def parse_step(text: str | None) -> Decimal | None:
    """Return a number above 0.

    Raises:
        UsageError: it is something else.
    """
    return None if text is None else _number(text, "--step")


def _number(text: str, option: str) -> Decimal:
    try:
        number = Decimal(text)
    except InvalidOperation:
        number = Decimal(0)
    if number <= 0 or not number.is_finite():
        raise UsageError(f"{option}: {text!r} is not a number above 0")
    return number


def _text_config(config: ModelConfig) -> Mapping[str, object]:
    """Return the configuration of a model's language model."""
    if config is None:
        return {}
    for name in ("text_config", "llm_config"):
        inner = config.get(name)
        if isinstance(inner, dict):
            return {**config, **inner}
    return config


def _positive(config: Mapping[str, object], name: str) -> int | None:
    value = config.get(name)
    return value if isinstance(value, int) and value > 0 else None


def tensor_parallel_sizes(config: ModelConfig, most: int = MOST_DEVICES) -> list[int]:
    """Return the sizes that the attention and KV heads allow; powers of 2 if they are unknown.

    (vllm/config/model.py::ModelConfig.verify_with_parallel_config;
    vllm/model_executor/models/qwen3.py::Qwen3Attention)
    """
    text = _text_config(config)
    heads = _positive(text, "num_attention_heads")
    kv_heads = _positive(text, "num_key_value_heads") or heads
    sizes = range(1, most + 1)
    if heads is None or kv_heads is None:
        return [size for size in sizes if size & (size - 1) == 0]
    return [
        size
        for size in sizes
        if heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)
    ]


def _devices(
    config: ModelConfig, low: Decimal | None, high: Decimal | None, step: Decimal | None
) -> Space:
    if step is not None:
        hint = "the sizes are those that the heads allow"
        raise UsageError("--step means nothing with --fit devices", hint=hint)
    least, most = int(low or 1), int(high or MOST_DEVICES)
    sizes = [str(size) for size in tensor_parallel_sizes(config, most) if size >= least]
    if not sizes:
        raise UsageError(
            f"--between {least}:{most} has no tensor-parallel size that the model's heads allow"
        )
    return Space(sizes, sizes[0], sizes[-1], f"the sizes that the heads allow: {', '.join(sizes)}")


def _max_model_len(
    config: ModelConfig, low: Decimal | None, high: Decimal | None, step: Decimal | None
) -> Space:
    text = _text_config(config)
    longest = _positive(text, "max_position_embeddings") or 131072
    each = step or Decimal(1024 if longest > 8192 else 128)
    return _grid(low or min(each, Decimal(longest)), high or Decimal(longest), each)


def _max_num_seqs(
    config: ModelConfig, low: Decimal | None, high: Decimal | None, step: Decimal | None
) -> Space:
    each = step or Decimal(8)
    return _grid(low or each, high or Decimal(1024), each)


def _utilization(
    config: ModelConfig, low: Decimal | None, high: Decimal | None, step: Decimal | None
) -> Space:
    if high is not None and high > 1:
        raise UsageError(f"--between: gpu-memory-utilization is at most 1, got {high}")
    return _grid(
        low or Decimal("0.10"), high or Decimal("0.99"), step or Decimal("0.01"), whole=False
    )


def _grid(low: Decimal, high: Decimal, step: Decimal, whole: bool = True) -> Space:
    """Return the values from ``low`` by ``step``, and ``high`` itself."""
    if whole and any(number != int(number) for number in (low, high, step)):
        raise UsageError("--between and --step take whole numbers here")
    if (high - low) / step > 1_000_000:
        raise UsageError(f"--step {step} is too small for a range from {low} to {high}")
    count = int((high - low) / step)
    numbers = [low + step * i for i in range(count + 1)]
    numbers += [high] if numbers[-1] < high else []
    values = [f"{number.normalize():f}" for number in numbers]
    return Space(values, values[0], values[-1], f"{step.normalize():,f}")


KNOBS = (
    FitKnob("devices", "--tensor-parallel-size", "smallest", (), _devices, each=True),
    FitKnob("max-model-len", "--max-model-len", "largest", ("length",), _max_model_len),
    FitKnob("max-num-seqs", "--max-num-seqs", "largest", (), _max_num_seqs),
    FitKnob(
        "gpu-memory-utilization",
        "--gpu-memory-utilization",
        "largest",
        ("tokens", "concurrency", "kv-cache", "room"),
        _utilization,
    ),
)


def find_knob(name: str) -> FitKnob:
    """Return the knob of that name.

    Raises:
        UsageError: there is none.
    """
    asked = name.strip().lower().replace("_", "-").removeprefix("--")
    asked = {"tensor-parallel-size": "devices", "tp": "devices"}.get(asked, asked)
    found = next((knob for knob in KNOBS if knob.name == asked), None)
    if found is None:
        raise UsageError(
            f"--fit {name!r} is not known", hint=", ".join(knob.name for knob in KNOBS)
        )
    return found
