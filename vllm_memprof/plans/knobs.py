"""The options that ``memprof fit`` can search for, as a table, and the values of each to try."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial
from typing import NamedTuple

from vllm_memprof.errors import UsageError, did_you_mean
from vllm_memprof.layout import text_config
from vllm_memprof.options import long_name, value_of
from vllm_memprof.plans.model import TABLES, Miss
from vllm_memprof.text import text

DEVICES = "devices"
#: ``config.json`` of a model; None where only the engine knows it.
ModelConfig = Mapping[str, object] | None
_NUMBER = r"-?\d+(?:\.\d+)?"

#: Verdicts on a value; expected in this order along the values, the most ambitious last.
TOO_LITTLE, HOLDS, TOO_MUCH = -1, 0, 1
#: How the values of a knob are searched: by bisection; from the first on until one passes; each of
#: them, the first that passes.
BISECT, UNTIL_ONE, EACH = "bisect", "until one", "each"
SMALLEST, LARGEST = text("smallest"), text("largest")


class SearchRequest(NamedTuple):
    """What the values of a search are made of, None where it was not given."""

    low: Decimal | None
    high: Decimal | None
    step: Decimal | None
    config: ModelConfig = None
    unit: int = 1  # devices of a plan whose tensor-parallel size is 1


class SearchRange(NamedTuple):
    """The values of one search from the lowest on, and what lies between them, in words."""

    values: list[str]
    step: str
    given: Mapping[str, str] = {}  # value -> what the option is given for it, where they differ


@dataclass(frozen=True)
class FitKnob:
    """One option that can be searched for."""

    name: str  # devices, or the option; behind a dot the key of a JSON value
    #: Kinds of misses that a larger value mends; None: which way a miss points is not known, a more
    #: modest value is tried.
    larger_mends: Sequence[str] | None
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
            raise UsageError(
                f"--between {between!r} is not a range", "LOW:HIGH, e.g. --between 1024:65536"
            )
    if step is not None:
        each = Decimal(step if re.fullmatch(_NUMBER, step) else 0)
        if each <= 0:
            raise UsageError(f"--step: {step!r} is not a number above 0")
    return SearchRequest(low, high, each)


def _in_config(config: ModelConfig, name: str) -> int | None:
    """Return a whole number of a configuration, first of its language model's."""
    value = text_config(config or {}).get(name)
    return value if isinstance(value, int) and value > 0 else None


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


def _kv_dtypes(asked: SearchRequest) -> SearchRange:
    if asked[:3] != (None, None, None):
        raise UsageError(
            "--between and --step mean nothing with --find kv-cache-dtype",
            "its values are names: memprof sweep --over kv-cache-dtype=auto,fp8",
        )
    return SearchRange(
        TABLES["kv_cache_dtypes"], text("each of them, most bytes per element first")
    )


def _max_model_len(asked: SearchRequest) -> SearchRange:
    longest = _in_config(asked.config, "max_position_embeddings") or 131072
    step = 1024 if longest > 8192 else 128
    return _grid(asked, (min(step, longest), longest, step))


def _listed(
    asked: SearchRequest,
    low: int,
    high: int,
    sizes: Callable[[ModelConfig, int], Sequence[int]],
    step: str,
) -> SearchRange:
    """Return those of some sizes, of which the highest is given, that lie within a range."""
    low, high = int(asked.low or low), int(asked.high or high * asked.unit)
    given = {
        str(size * asked.unit): str(size)
        for size in sizes(asked.config, high // asked.unit)
        if low <= size * asked.unit <= high
    }
    if not given or asked.step is not None:
        raise UsageError(f"--between {low}:{high} has none of {step}, or --step is given")
    return SearchRange([*given], step, given)


def _grid(asked: SearchRequest, own: Sequence[str | int | None]) -> SearchRange:
    """Return the values from the lowest by a step, and the highest itself.

    Args:
        asked: what replaces the following.
        own: lowest, highest and step, unless they were asked for. Without a step that is 1 for a
            range of whole numbers, else a hundredth.
    """
    whole = all(number is None or number % 1 == 0 for number in asked[:3])
    default = 1 if whole else "0.01"
    low, high, step = (
        Decimal(default if number is None else number) if given is None else given
        for given, number in zip(asked[:3], own, strict=True)
    )
    numbers = [low + step * i for i in range(int((high - low) / step) + 1)]
    numbers += [high] if numbers[-1] < high else []
    values = [f"{number.normalize():f}" for number in numbers]
    return SearchRange(values, text("step {step}", step=f"{step.normalize():,f}"))


KNOBS = (
    FitKnob(
        DEVICES,
        None,
        partial(
            _listed,
            low=1,
            high=64,
            sizes=tensor_parallel_sizes,
            step=text("the sizes that the heads allow"),
        ),
        SMALLEST,
        UNTIL_ONE,
    ),
    FitKnob("max-model-len", ("length",), _max_model_len),
    *(
        FitKnob(name, row["mends"], partial(_grid, own=row["grid"]))
        for name, row in TABLES["knobs"].items()
    ),
    FitKnob(
        "max-cudagraph-capture-size",
        (),
        # the largest that is captured: between two sizes the engine takes the lower
        # (vllm 0.13.0 and 0.23.0, vllm/config/vllm.py::VllmConfig._set_cudagraph_sizes)
        partial(
            _listed,
            low=8,
            high=512,
            sizes=lambda _, high: (1, 2, 4, *range(8, 256, 8), *range(256, high + 1, 16)),
            step=text("sizes that the engine captures"),
        ),
        needless_with="--enforce-eager",
    ),
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
    asked = long_name(name.strip()).removeprefix("--")
    asked = _ALIASES.get(asked, asked)
    found = next((knob for knob in KNOBS if knob.name == asked), None)
    if found is None:
        if between is None:
            names = [knob.name for knob in KNOBS]
            raise UsageError(
                f"--find {name}: which values to try is not known; a numeric option of the engine "
                "takes --between LOW:HIGH",
                did_you_mean(asked, names, f"known without it: {', '.join(names)}")
                + "; names instead of numbers: memprof sweep --over OPTION=A,B",
            )
        found = FitKnob(asked, None, partial(_grid, own=(0, 0, None)))
    goals = (SMALLEST, LARGEST) if found.search == BISECT else (found.goal,)
    if goal not in (None, *goals):
        raise UsageError(f"--goal {goal} does not go with --find {found.name}", " or ".join(goals))
    if found.needless_with and value_of(engine_args, found.needless_with) is not None:
        raise UsageError(f"--find {found.name} has no effect with {found.needless_with}")
    return replace(found, goal=next((each for each in goals if each == goal), found.goal))


def bisect(values: Sequence[str], probe: Callable[[str], int]) -> tuple[str | None, bool]:
    """Find the last value that passes, in about log2 of their number of tries.

    The most ambitious value is tried first: where it passes, no other has to be tried. Then the
    border below TOO_MUCH is searched. One more try checks the order: the middle of the widest gap
    above the answer. Where that is not too much, the search goes on from there. Whatever the order,
    it ends with an answer whose next value was tried and does not pass, unless it is the last.

    Returns:
        The most ambitious value tried that passes, None: none does; and whether the verdicts stand
        in order.
    """
    tried: dict[int, int] = {}  # by index; ``probe`` is asked again for what it knows

    def verdict(index: int) -> int:
        tried[index] = probe(values[index])
        return tried[index]

    def border(low: int, high: int, *above: int) -> int:
        """Return the index below the first with such a verdict, of those between the two."""
        while high - low > 1:
            middle = (low + high) // 2
            if verdict(middle) in above:
                high = middle
            else:
                low = middle
        return low

    def last_passing() -> int | None:
        return max((i for i, found in tried.items() if found == HOLDS), default=None)

    if verdict(len(values) - 1) == TOO_MUCH:
        low = border(-1, len(values) - 1, TOO_MUCH)
        above = [i for i in sorted(tried) if i > low]
        gaps = ((right - left, left) for left, right in itertools.pairwise(above))
        width, start = max(gaps, default=(0, 0))
        middle = start + width // 2
        if width > 1 and verdict(middle) != TOO_MUCH:
            border(middle, start + width, TOO_MUCH)
    best = last_passing()
    if best is not None:
        border(best, min((i for i in tried if i > best), default=best), TOO_LITTLE, TOO_MUCH)
        best = last_passing()
    verdicts = [tried[i] for i in sorted(tried)]
    return None if best is None else values[best], verdicts == sorted(verdicts)
