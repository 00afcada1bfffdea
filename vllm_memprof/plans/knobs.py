"""The options that ``memprof fit`` can search for, as a table, and the values of each to try."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial
from typing import NamedTuple

from vllm_memprof.errors import UsageError
from vllm_memprof.options import long_name, value_of
from vllm_memprof.plans.bisection import HOLDS, TOO_LITTLE, TOO_MUCH
from vllm_memprof.plans.rows import Miss
from vllm_memprof.text import text

#: Sizes of tensor parallelism that are tried unless --between says otherwise.
MOST_DEVICES = 64
DEVICES = "devices"
#: Types of a KV cache's elements, most bytes per element first. "auto" is that of the model. Those
#: of one accelerator or one model alone are left out.
#: (vllm 0.23.0, vllm/config/cache.py::CacheDType; a release without one of them refuses it)
KV_DTYPES = (
    "auto",
    "bfloat16",
    "float16",
    "fp8",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_per_token_head",
    "int8_per_token_head",
    "nvfp4",
)
#: ``config.json`` of a model; None where only the engine knows it.
ModelConfig = Mapping[str, object] | None
_NUMBER = r"-?\d+(?:\.\d+)?"
_NAME = re.compile(r"[a-z][a-z0-9-]*(\.[A-Za-z0-9_.-]+)?")

#: How the values of a knob are searched: by bisection; from the first on until one passes; each of
#: them, the first that passes.
BISECT, UNTIL_ONE, EACH = "bisect", "until one", "each"
SMALLEST, LARGEST = "smallest", "largest"


class SearchRequest(NamedTuple):
    """What the values of a search are made of, None where it was not given."""

    low: Decimal | None = None
    high: Decimal | None = None
    step: Decimal | None = None
    config: ModelConfig = None


class SearchRange(NamedTuple):
    """The values of one search from the lowest on, and what lies between them, in words."""

    values: list[str]
    step: str


@dataclass(frozen=True)
class FitKnob:
    """One option that can be searched for."""

    name: str  # devices, or the option; behind a dot the key of a JSON value
    #: Kinds of misses that a larger value mends; None: which way a miss points is not known, a more
    #: modest value is tried.
    larger_mends: tuple[str, ...] | None
    space: Callable[[SearchRequest], SearchRange]  # the values to try
    goal: str = LARGEST
    search: str = BISECT
    needless_with: str | None = None  # an option that leaves nothing to search for

    @property
    def option(self) -> str:
        """The option of the engine."""
        return "--tensor-parallel-size" if self.name == DEVICES else f"--{self.name}"

    def verdict(self, missing: Sequence[Miss]) -> int:
        """Return the verdict on a value, from what its plan lacks."""
        if not missing:
            return HOLDS
        if self.larger_mends is None:
            return TOO_MUCH
        too_small = all(miss.kind in self.larger_mends for miss in missing)
        return TOO_LITTLE if too_small is (self.goal == LARGEST) else TOO_MUCH


def search_request(between: str | None, step: str | None) -> SearchRequest:
    """Return what ``--between LOW:HIGH`` and ``--step`` ask for.

    Raises:
        UsageError: they are something else.
    """
    low, high, each = None, None, None
    if between is not None:
        match = re.fullmatch(rf"\s*({_NUMBER})\s*:\s*({_NUMBER})\s*", between)
        low, high = map(Decimal, match.groups() if match else ("1", "0"))
        if low > high:
            hint = "LOW:HIGH, e.g. --between 1024:65536"
            raise UsageError(f"--between {between!r} is not a range", hint)
    if step is not None:
        each = Decimal(step if re.fullmatch(_NUMBER, step) else 0)
        if each <= 0:
            raise UsageError(f"--step: {step!r} is not a number above 0")
    return SearchRequest(low, high, each)


def _in_config(config: ModelConfig, name: str) -> int | None:
    """Return a whole number of a configuration, first of its language model's."""
    config = config or {}
    for part in (config.get("text_config"), config.get("llm_config"), config):
        value = part.get(name) if isinstance(part, Mapping) else None
        if isinstance(value, int) and value > 0:
            return value
    return None


def tensor_parallel_sizes(config: ModelConfig, most: int) -> list[int]:
    """Return the sizes that the attention and KV heads allow; powers of 2 if they are unknown.

    (vllm/config/model.py::ModelConfig.verify_with_parallel_config;
    vllm/model_executor/models/qwen3.py::Qwen3Attention)
    """
    heads = _in_config(config, "num_attention_heads") or 1 << 20
    kv_heads = _in_config(config, "num_key_value_heads") or heads
    return [
        size
        for size in range(1, most + 1)
        if heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)
    ]


def _devices(asked: SearchRequest) -> SearchRange:
    if asked.step is not None:
        raise UsageError("--step means nothing with --find devices")
    low, high = int(asked.low or 1), int(asked.high or MOST_DEVICES)
    sizes = tensor_parallel_sizes(asked.config, high)
    return _listed(sizes, low, high, text("the sizes that the heads allow"))


def _kv_dtypes(asked: SearchRequest) -> SearchRange:
    if asked[:3] != (None, None, None):
        hint = "its values are names: memprof sweep --over kv-cache-dtype=auto,fp8"
        raise UsageError("--between and --step mean nothing with --find kv-cache-dtype", hint)
    return SearchRange([*KV_DTYPES], text("each of them, most bytes per element first"))


def _max_model_len(asked: SearchRequest) -> SearchRange:
    longest = _in_config(asked.config, "max_position_embeddings") or 131072
    step = 1024 if longest > 8192 else 128
    return _grid(asked, min(step, longest), longest, step)


def _capture_sizes(asked: SearchRequest) -> SearchRange:
    """Return the largest sizes that the engine captures: between two of them it takes the lower.

    (vllm 0.13.0 and 0.23.0, vllm/config/vllm.py::VllmConfig._set_cudagraph_sizes)
    """
    if asked.step is not None:
        return _grid(asked, 8, 512, 1)
    low, high = int(asked.low or 8), int(asked.high or 512)
    sizes = (1, 2, 4, *range(8, 256, 8), *range(256, high + 1, 16))
    return _listed(sizes, low, high, text("sizes that the engine captures"))


def _other(asked: SearchRequest) -> SearchRange:
    """Return the values of an option that the table does not have: ``--between`` was given."""
    whole = all(number is None or number % 1 == 0 for number in asked[:3])
    return _grid(asked, 0, 0, 1 if whole else "0.01")


def _listed(sizes: Iterable[int], low: int, high: int, step: str) -> SearchRange:
    """Return those of the sizes that lie within a range."""
    values = [str(size) for size in sizes if low <= size <= high]
    if not values:
        raise UsageError(f"--between {low}:{high} has none of {step}")
    return SearchRange(values, step)


def _grid(asked: SearchRequest, low: int | str, high: int | str, step: int | str) -> SearchRange:
    """Return the values from the lowest by a step, and the highest itself.

    Args:
        asked: what replaces the following three.
        low, high, step: unless they were asked for.
    """
    bottom, top, each = (
        Decimal(own) if given is None else given
        for given, own in zip(asked[:3], (low, high, step), strict=True)
    )
    numbers = [bottom + each * i for i in range(int((top - bottom) / each) + 1)]
    numbers += [top] if numbers[-1] < top else []
    values = [f"{number.normalize():f}" for number in numbers]
    return SearchRange(values, text("step {step}", step=f"{each.normalize():,f}"))


KNOBS = (
    FitKnob(DEVICES, None, _devices, SMALLEST, UNTIL_ONE),
    FitKnob("max-model-len", ("length",), _max_model_len),
    FitKnob("max-num-seqs", (), partial(_grid, low=8, high=1024, step=8)),
    FitKnob("max-num-batched-tokens", ("small",), partial(_grid, low=1024, high=131072, step=1024)),
    FitKnob(
        "gpu-memory-utilization",
        ("tokens", "concurrency", "kv-cache", "room"),
        partial(_grid, low="0.10", high="0.99", step="0.01"),
    ),
    FitKnob("limit-mm-per-prompt.image", (), partial(_grid, low=1, high=64, step=1)),
    FitKnob("max-cudagraph-capture-size", (), _capture_sizes, needless_with="--enforce-eager"),
    FitKnob("kv-cache-dtype", (), _kv_dtypes, search=EACH),
)
#: Other names of the same options.
_ALIASES = {"tensor-parallel-size": DEVICES, "tp": DEVICES}


def find_knob(
    name: str,
    between: str | None = None,
    goal: str | None = None,
    engine_args: Sequence[str] = (),
) -> FitKnob:
    """Return the knob of that name: a row of the table, or any option with a range.

    Args:
        name: as typed.
        between: ``LOW:HIGH`` as typed; an option that the table does not have needs it.
        goal: smallest or largest; None: that of the row, else largest.
        engine_args: the command, in which another option may switch this one off.

    Raises:
        UsageError: no such goal; an option that is not in the table, and no range; or one that has
            no effect.
    """
    option, dot, key = long_name(name.strip()).removeprefix("--").partition(".")
    asked = option.lower() + dot + key
    asked = _ALIASES.get(asked, asked)
    found = next((knob for knob in KNOBS if knob.name == asked), None)
    if found is None:
        if between is None or not _NAME.fullmatch(asked):
            known = ", ".join(knob.name for knob in KNOBS)
            raise UsageError(
                f"--find {name}: which values to try is not known; a numeric option of the engine "
                "takes --between LOW:HIGH",
                hint=f"known without it: {known}; names instead of numbers: memprof sweep --over "
                "OPTION=A,B",
            )
        found = FitKnob(asked, None, _other)
    goals = (SMALLEST, LARGEST) if found.search == BISECT else (found.goal,)
    if goal is not None and goal not in goals:
        hint = " or ".join(goals)
        raise UsageError(f"--goal {goal} does not go with --find {found.name}", hint)
    if found.needless_with and value_of(engine_args, found.needless_with) is not None:
        raise UsageError(f"--find {found.name} has no effect with {found.needless_with}")
    return replace(found, goal=goal or found.goal)
