"""The options that ``memprof fit`` can search for, as a table, and the values of each to try."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation

from vllm_memprof.errors import UsageError
from vllm_memprof.options import long_name, value_of
from vllm_memprof.plans.bisection import HOLDS, TOO_LITTLE, TOO_MUCH
from vllm_memprof.plans.wants import Miss
from vllm_memprof.text import text

#: Sizes of tensor parallelism that are tried unless --between says otherwise.
MOST_DEVICES = 64
DEVICES = "devices"
#: Types of a KV cache's elements, most bytes per element first; the bytes of each. "auto" is that
#: of the model. Those of one accelerator or one model alone are left out.
#: (vllm 0.23.0, vllm/config/cache.py::CacheDType; a release without one of them refuses it)
KV_DTYPES = (
    ("auto", 2),
    ("bfloat16", 2),
    ("float16", 2),
    ("fp8", 1),
    ("fp8_e4m3", 1),
    ("fp8_e5m2", 1),
    ("fp8_per_token_head", 1),
    ("int8_per_token_head", 1),
    ("nvfp4", 0.5),
)
#: Values of one search beyond this number are refused.
_MOST_VALUES = 1_000_000
#: ``config.json`` of a model; None where only the engine knows it.
ModelConfig = Mapping[str, object] | None
_RANGE = re.compile(r"(-?[0-9.]+)\s*:\s*(-?[0-9.]+)")
_NAME = re.compile(r"[a-z][a-z0-9-]*(\.[A-Za-z0-9_.-]+)?")

#: How the values of a knob are searched: by bisection; from the first on until one passes; each of
#: them, the first that passes.
BISECT, UNTIL_ONE, EACH = "bisect", "until one", "each"
SMALLEST, LARGEST = "smallest", "largest"


@dataclass(frozen=True)
class SearchRequest:
    """What the values of a search are made of, None where it was not given."""

    config: ModelConfig = None
    low: Decimal | None = None
    high: Decimal | None = None
    step: Decimal | None = None


@dataclass(frozen=True)
class SearchRange:
    """The values of one search in the order of ambition, the most ambitious last."""

    values: list[str]
    low: str
    high: str
    step: str


@dataclass(frozen=True)
class FitKnob:
    """One option that can be searched for."""

    name: str  # devices, or the option; behind a dot the key of a JSON value
    goal: str  # smallest | largest
    #: Kinds of misses that a larger value mends; None: which way a miss points is not known, a more
    #: modest value is tried.
    larger_mends: tuple[str, ...] | None
    #: The values to try, in the order of a goal "largest" where it is bisected.
    space: Callable[[SearchRequest], SearchRange]
    search: str = BISECT
    needless_with: str | None = None  # an option that leaves nothing to search for

    @property
    def option(self) -> str:
        """The option of the engine."""
        return "--tensor-parallel-size" if self.name == DEVICES else f"--{self.name}"

    def verdict(self, missing: list[Miss]) -> int:
        """Return the verdict on a value, from what its plan lacks."""
        if not missing:
            return HOLDS
        if self.larger_mends is None:
            return TOO_MUCH
        too_small = all(miss.kind in self.larger_mends for miss in missing)
        return TOO_LITTLE if too_small is (self.goal == LARGEST) else TOO_MUCH

    def values(self, asked: SearchRequest) -> SearchRange:
        """Return the values to try, by their ambition.

        Raises:
            UsageError: a range or a step that this option does not have.
        """
        space = self.space(asked)
        if self.search == BISECT and self.goal == SMALLEST:
            return replace(space, values=space.values[::-1])
        return space


def parse_range(text: str | None) -> tuple[Decimal | None, Decimal | None]:
    """Return (low, high) of ``LOW:HIGH``.

    Raises:
        UsageError: it is something else.
    """
    if text is None:
        return None, None
    match = _RANGE.fullmatch(text.strip())
    low, high = (_number(part) for part in match.groups()) if match else (None, None)
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
    step = None if text is None else _number(text)
    if text is not None and (step is None or step <= 0):
        raise UsageError(f"--step: {text!r} is not a number above 0")
    return step


def _number(text: str) -> Decimal | None:
    try:
        number = Decimal(text)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


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
    of_text = _text_config(config)
    heads = _positive(of_text, "num_attention_heads")
    kv_heads = _positive(of_text, "num_key_value_heads") or heads
    sizes = range(1, most + 1)
    if heads is None or kv_heads is None:
        return [size for size in sizes if size & (size - 1) == 0]
    return [
        size
        for size in sizes
        if heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)
    ]


def _range(values: list[str], step: str) -> SearchRange:
    return SearchRange(values, values[0], values[-1], step)


def _devices(asked: SearchRequest) -> SearchRange:
    if asked.step is not None:
        hint = "the sizes are those that the heads allow"
        raise UsageError("--step means nothing with --find devices", hint=hint)
    low, high = _bounds(asked, 1, MOST_DEVICES)
    sizes = [str(size) for size in tensor_parallel_sizes(asked.config, high) if size >= low]
    if not sizes:
        raise UsageError(
            f"--between {low}:{high} has no tensor-parallel size that the model's heads allow"
        )
    return _range(sizes, text("the sizes that the heads allow: {sizes}", sizes=", ".join(sizes)))


def _kv_dtypes(asked: SearchRequest) -> SearchRange:
    if (asked.low, asked.high, asked.step) != (None, None, None):
        raise UsageError(
            "--between and --step mean nothing with --find kv-cache-dtype",
            hint="its values are names: memprof sweep --over kv-cache-dtype=auto,fp8",
        )
    each = text("each of them, most bytes per element first")
    return _range([name for name, _ in KV_DTYPES], each)


def _max_model_len(asked: SearchRequest) -> SearchRange:
    longest = _positive(_text_config(asked.config), "max_position_embeddings") or 131072
    each = 1024 if longest > 8192 else 128
    return _grid(asked, min(each, longest), longest, each)


def _utilization(asked: SearchRequest) -> SearchRange:
    if asked.high is not None and asked.high > 1:
        raise UsageError(f"--between: gpu-memory-utilization is at most 1, got {asked.high}")
    return _grid(asked, "0.10", "0.99", "0.01", whole=False)


def _capture_sizes(asked: SearchRequest) -> SearchRange:
    """Return the largest sizes that the engine captures: between two of them it takes the lower.

    (vllm 0.13.0 and 0.23.0, vllm/config/vllm.py::VllmConfig._set_cudagraph_sizes)
    """
    if asked.step is not None:
        return _grid(asked, 8, 512, 1)
    low, high = _bounds(asked, 8, 512)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, high + 1, 16)]
    values = [str(size) for size in sizes if low <= size <= high]
    if not values:
        raise UsageError(f"--between {low}:{high} has no size that the engine captures")
    return _range(values, text("sizes that the engine captures"))


def _by(low: int, high: int, step: int) -> Callable[[SearchRequest], SearchRange]:
    """Return a grid of whole numbers from 1 on, with what it is unless it was asked for."""
    return lambda asked: _grid(asked, low, high, step)


def _other(asked: SearchRequest) -> SearchRange:
    """Return the values of an option that the table does not have: ``--between`` was given."""
    given = [each for each in (asked.low, asked.high, asked.step) if each is not None]
    whole = all(each == int(each) for each in given)
    return _grid(asked, 0, 0, 1 if whole else "0.01", whole, least=None)


def _bounds(asked: SearchRequest, low: int, high: int) -> tuple[int, int]:
    """Return the ends of a range of whole numbers."""
    found = _grid(asked, low, high, 1)
    return int(found.low), int(found.high)


def _grid(
    asked: SearchRequest,
    low: int | str,
    high: int | str,
    step: int | str,
    whole: bool = True,
    least: int | None = 1,
) -> SearchRange:
    """Return the values from the lowest by a step, and the highest itself.

    Args:
        asked: what replaces the following three.
        low, high, step: unless they were asked for.
        whole: numbers must be.
        least: that a whole number may be; any other is above 0. None: any number may be.
    """
    bottom = Decimal(low) if asked.low is None else asked.low
    top = Decimal(high) if asked.high is None else asked.high
    each = asked.step or Decimal(step)
    if whole and any(number != int(number) for number in (bottom, top, each)):
        raise UsageError("--between and --step take whole numbers here")
    if least is not None and (bottom > top or bottom <= 0 or (whole and bottom < least)):
        hint = f"its values are {'from 1 on' if whole else 'above 0'}"
        raise UsageError(f"--between {bottom:f}:{top:f} is not a range of this option", hint=hint)
    if (top - bottom) / each > _MOST_VALUES:
        raise UsageError(f"--step {each} is too small for a range from {bottom} to {top}")
    numbers = [bottom + each * i for i in range(int((top - bottom) / each) + 1)]
    numbers += [top] if numbers[-1] < top else []
    return _range([f"{number.normalize():f}" for number in numbers], f"{each.normalize():,f}")


#: A plan that did not start for a value that is too small, by the engine's words.
_SMALL = ("small",)
KNOBS = (
    FitKnob(DEVICES, SMALLEST, None, _devices, UNTIL_ONE),
    FitKnob("max-model-len", LARGEST, ("length",), _max_model_len),
    FitKnob("max-num-seqs", LARGEST, (), _by(8, 1024, 8)),
    FitKnob("max-num-batched-tokens", LARGEST, _SMALL, _by(1024, 131072, 1024)),
    FitKnob(
        "gpu-memory-utilization",
        LARGEST,
        ("tokens", "concurrency", "kv-cache", "room"),
        _utilization,
    ),
    FitKnob("limit-mm-per-prompt.image", LARGEST, (), _by(1, 64, 1)),
    FitKnob(
        "max-cudagraph-capture-size",
        LARGEST,
        (),
        _capture_sizes,
        needless_with="--enforce-eager",
    ),
    FitKnob("kv-cache-dtype", LARGEST, (), _kv_dtypes, EACH),
)
#: Other names of the same options.
_ALIASES = {"tensor-parallel-size": DEVICES, "tp": DEVICES}


def find_knob(name: str, between: str | None = None, goal: str | None = None) -> FitKnob:
    """Return the knob of that name: a row of the table, or any option with a range.

    Args:
        name: as typed.
        between: ``LOW:HIGH`` as typed; an option that the table does not have needs it.
        goal: smallest or largest; None: that of the row, else largest.

    Raises:
        UsageError: no such goal; or an option that is not in the table, and no range.
    """
    if goal not in (None, SMALLEST, LARGEST):
        raise UsageError(f"--goal {goal!r} is not known", hint="largest or smallest")
    option, dot, key = long_name(name.strip()).removeprefix("--").partition(".")
    asked = option.lower() + dot + key
    asked = _ALIASES.get(asked, asked)
    found = next((knob for knob in KNOBS if knob.name == asked), None)
    if found is not None:
        if goal not in (None, found.goal) and found.search != BISECT:
            raise UsageError(f"--goal {goal} does not go with --find {found.name}")
        return replace(found, goal=goal or found.goal)
    known = ", ".join(knob.name for knob in KNOBS)
    if not _NAME.fullmatch(asked):
        raise UsageError(f"--find {name!r} is no option", hint=known)
    if between is None:
        raise UsageError(
            f"--find {asked}: which values to try is not known; a numeric option of the engine "
            "takes --between LOW:HIGH",
            hint=f"known without it: {known}; names instead of numbers: memprof sweep --over "
            f"{asked}=A,B",
        )
    return FitKnob(asked, goal or LARGEST, None, _other)


def refuse_needless(knob: FitKnob, engine_args: list[str]) -> None:
    """Refuse a search of an option that another one of the command switches off.

    Raises:
        UsageError: with which.
    """
    if knob.needless_with is not None and value_of(engine_args, knob.needless_with) is not None:
        raise UsageError(f"--find {knob.name} has no effect with {knob.needless_with}")
