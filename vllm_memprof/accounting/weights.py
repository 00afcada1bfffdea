"""Weights: what a rank's share of the checkpoint is, what it holds, and why these differ.

A rank's share is an even division: the layers that it has, over the ranks that divide each (tensor
parallel, and data parallel for experts). All that the engine holds beyond it has a cause with
bytes, most of them from what the engine's own layers say of themselves. Rows, the allocator's
padding and what nobody named add up to the engine's figure.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from pathlib import Path

from vllm_memprof.accounting.model import RankReport, WeightRow, Weights
from vllm_memprof.accounting.readings.run import RankReadings
from vllm_memprof.accounting.titles import TITLES
from vllm_memprof.files import read_table
from vllm_memprof.layout import list_weights, text_config
from vllm_memprof.record.spans import last_of
from vllm_memprof.record.weights import ATTRIBUTE, PARAMETER, Loaded, TensorRow, fold, folded
from vllm_memprof.text import join, text
from vllm_memprof.units import minus

_TABLE = read_table(Path(__file__).with_suffix(".toml"))
_CLASSES = {name: re.compile(pattern) for name, pattern in _TABLE["classes"].items()}
_NAMED = {name: re.compile(pattern) for name, pattern in _TABLE["names"].items()}
_EXPECTED, _LOADED, _REST = "expected", "loaded", "unexplained"
#: dtypes of quantised weights, and those of weights that are not.
NARROW = ("int4", "int8", "uint8", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2")
WIDE = ("bfloat16", "float16", "float32")
#: A class and a dtype.
Key = tuple[str, str]
#: Bytes by what they are: expected, loaded, or a cause of the difference.
Account = defaultdict[str, Fraction]


def class_of(name: str) -> str:
    """Return the class of a tensor by its name."""
    return next((cls for cls, pattern in _CLASSES.items() if pattern.search(name)), "other")


def size_of(dtype: str) -> Fraction:
    """Return the bytes of one value."""
    bits = re.search(r"\d+", dtype)
    return Fraction(int(bits[0]) if bits else 8, 8)


@cache
def _laid_out(config: str, quantized: str) -> list[TensorRow]:
    """Return the tensors that a configuration stands for; none where its kind is not known.

    Args:
        config: JSON of the model's configuration.
        quantized: JSON of ``Loaded.quantized``.
    """
    made, types = json.loads(config), json.loads(quantized)
    usual = text_config(made).get("dtype") or text_config(made).get("torch_dtype") or "bfloat16"
    fp8 = (made.get("quantization_config") or {}).get("quant_method") == "fp8"

    def dtype_of(name: str, shape: tuple[int, ...]) -> str:
        pattern, layer = folded(name)
        for kind, layers in types.get(pattern, {}).items():
            if {*layer} <= {*layers}:
                return "int4" if "W4" in kind else "int8"
        narrow = fp8 and len(shape) > 1 and class_of(name) in _TABLE["fp8"]
        return "float8_e4m3fn" if narrow else str(usual).removeprefix("torch.")

    rows = []
    try:
        for name, shape in (list_weights(made, draft=True) or {}).items():
            dtype = dtype_of(name, shape)
            size = math.ceil(math.prod(shape) * size_of(dtype))
            rows.append((name, {"dtype": dtype, "shape": list(shape)}, {"bytes": size}))
    except (KeyError, TypeError, IndexError):  # a configuration without what its kind has
        return []
    return [TensorRow(**row) for row in fold(rows)]


@dataclass
class _Rank:
    """What one rank holds, and its share of a checkpoint.

    Attributes:
        held: what it has loaded.
        later: it is no first stage of a pipeline.
        rows: the checkpoint's; empty: it is not known.
        on_disk: the checkpoint has files.
    """

    held: Loaded
    later: bool
    rows: list[TensorRow]
    on_disk: bool
    book: dict[Key, Account] = field(default_factory=lambda: defaultdict(lambda: Account(Fraction)))
    inner: set[str] = field(default_factory=set)  # classes that it has a share of, those of a draft
    #: Values of a tensor, by the end of its name.
    sizes: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))

    def __post_init__(self) -> None:
        self.config = text_config(self.held.config)
        self.tied = bool(self.config.get("tie_word_embeddings"))

    def ranks_of(self, cls: str) -> int:
        """Return over how many ranks a class is divided."""
        ranks = self.held.ranks
        return ranks.get("tp", 1) * (ranks.get("dp", 1) if cls == "experts" else 1)

    def expect(self) -> None:
        """Enter the rank's share of the checkpoint, and what no rank has loaded of it."""
        own = {_class(row) for row in self.held.rows if row.draft or not _of_text(row)}
        here = {
            layer
            for row in self.held.rows
            if _of_text(row) and not row.draft
            for layer in row.layers
        }
        last = self.config.get("num_hidden_layers", math.inf)
        for row in self.rows:
            cls, dtype = class_of(row.name), row.dtype
            if _NAMED["packed"].search(row.name) and dtype in _TABLE["packed"]:
                dtype = "int4"
            self.sizes[_end(row.name)].add(math.prod(row.shape))
            of_text = _of_text(row)
            for layer in row.layers if of_text else [-1]:
                draft = layer >= last or bool(_NAMED["draft"].search(row.name))
                name = "draft" if draft else cls
                mine = layer in here if of_text and not draft else name in own
                if self.later and self.tied and cls == "embedding":
                    mine = False
                lost = self.on_disk and not mine and self.held.ranks.get("pp", 1) == 1
                size = Fraction(row.bytes, self.ranks_of(cls) * (len(row.layers) or 1))
                if not of_text:
                    size = Fraction(row.bytes, self.ranks_of(cls))
                if mine:
                    self.inner.add(f"{name} {cls}")
                if mine or lost:
                    self.book[name, dtype][_EXPECTED] += size
                if lost:
                    self.book[name, dtype]["not_loaded"] -= size

    def load(self, row: TensorRow) -> None:
        """Enter what the rank holds, and why that is more than its share, by its layer's facts."""
        account, size, facts = self.book[_class(row), row.dtype], Fraction(row.bytes), row.facts
        account[_LOADED] += size
        cls, ends = class_of(row.name), "draft_ends" if row.draft else "tied"
        if _class(row) == "tables":
            account["tables"] += size
        elif row.kind == ATTRIBUTE:
            account["copies"] += size  # as far as there is a difference: see ``divide``
        elif self.rows and f"{_class(row)} {cls}" not in self.inner:
            if cls in ("embedding", "lm_head") and (row.draft or self.tied):
                account["stages" if self.later and self.tied else ends] += size
        else:
            by, count = Fraction(facts.get("tp_size", 1)), math.prod(row.shape) or 1
            held = row.count * count * size_of(row.dtype)
            account["padding"] += size - held
            ratios = sorted(Fraction(each, count) for each in self.sizes.get(_end(row.name), ()))
            whole = [each for each in ratios if each.denominator == 1]
            if "local_num_experts" in facts and cls == "experts":
                every = facts["global_num_experts"]
                by *= Fraction(every, facts["local_num_experts"])
                extra = facts.get("global_redundant_expert_num", 0)
                logical = facts.get("logical_num_experts", every - extra)
                account["redundant"] += size * (1 - Fraction(logical, every))
            elif whole:
                by = whole[0]
            elif len(ratios) == 1 and ratios[0] < by:
                account["padding"] += held * (1 - ratios[0] / by)
                held *= ratios[0] / by
            account["replicated"] += held * (1 - by / self.ranks_of(cls))
            if (copies := facts.get("num_kv_head_replicas", 1)) > 1:
                width = facts["head_size"] + facts.get("v_head_size", facts["head_size"])
                part = Fraction(facts["num_kv_heads"] * width, facts["output_size_per_partition"])
                account["kv_heads"] += held * part * (1 - Fraction(1, copies))

    def divide(self) -> None:
        """Enter the causes that follow from what is left of the differences."""
        for key, account in self.book.items():
            copies = account.pop("copies", Fraction(0))
            account["copies"] = max(Fraction(0), min(copies, _rest(account)))
            for other, wider in self.book.items():  # of what another dtype of the class lacks
                if other[0] == key[0] and (lacking := -_rest(account)) > 0 < (over := _rest(wider)):
                    packed = key[1] == "int4" and over <= lacking  # as the checkpoint has them
                    ratio = 1 if packed else size_of(other[1]) / size_of(key[1])
                    moved = min(lacking, over / ratio)
                    account["dtype"] -= moved
                    wider["dtype"] += moved * ratio
        for account in self.book.values():
            if not account[_EXPECTED] and self.rows:
                account["made"] += max(Fraction(0), _rest(account))


def _rest(account: Account) -> Fraction:
    """Return what no cause says of a difference."""
    return 2 * account[_LOADED] - sum(account.values())


def _of_text(row: TensorRow) -> bool:
    """Return whether tensors are of the layers of the text model, which pipelines divide."""
    return "layers.*" in row.name and class_of(row.name) != "vision"


def _class(row: TensorRow) -> str:
    """Return the class of what a rank holds."""
    if row.kind not in (PARAMETER, ATTRIBUTE) or _NAMED["tables"].search(row.name):
        return "tables"
    return "draft" if row.draft else class_of(row.name)


def _end(name: str) -> str:
    """Return by what a tensor is known both in a checkpoint and in an engine."""
    return ".".join(name.split(".")[-3:])


def weighed(read: RankReadings, rank: RankReport) -> RankReport:
    """Add the weights of a rank, class by class; its rows add up to the engine's figure."""
    loaded, files = read.process.weights, read.run.info.checkpoint
    if loaded is None:
        return _printed(read, rank)
    made = (json.dumps(loaded.config), json.dumps(loaded.quantized))
    of = _Rank(loaded, bool(rank.pp_rank), files.rows if files else _laid_out(*made), bool(files))
    of.expect()
    for row in loaded.rows:
        of.load(row)
    of.divide()
    order = list(TITLES["weights"])
    known = [key for key, account in of.book.items() if account[_EXPECTED] or account[_LOADED]]
    rows = [
        _row(key, of.book[key], bool(of.rows))
        for key in sorted(known, key=lambda key: (order.index(key[0]), key[1]))
    ]
    engine = read.startup.figure("weights_bytes")
    if engine is None:
        engine = read.startup.own["weights_bytes"].bytes
    held = sum(row["loaded_bytes"] for row in rows)
    blocks = [row.block_bytes for row in loaded.rows if row.block_bytes is not None]
    behind = sum(blocks) if len(blocks) == len(loaded.rows) else held
    for name, more in (("allocator", behind - held), (_REST, minus(engine, behind))):
        if more:
            rows.append(_row((name, ""), Account(Fraction, {_LOADED: Fraction(more)}), False))
    load = last_of(read.process.phases, "weight_load")
    end = None if load is None else load.after
    weights = Weights(
        sum(row["expected_bytes"] or 0 for row in rows) if of.rows else None,
        held,
        engine,
        rows,
        None if not of.rows else "checkpoint" if files else "layout",
        None if end is None else minus(end.reserved_bytes, end.allocated_bytes),
        loaded.expandable,
    )
    return replace(rank, weights=weights)


def _printed(read: RankReadings, rank: RankReport) -> RankReport:
    """Add what a log tells: the size of the files, an even share of it, and the engine's figure."""
    files, engine = map(read.startup.figure, ("checkpoint_bytes", "weights_bytes"))
    if files is None or engine is None:
        return rank
    share = Fraction(files, read.process.identity.world_size or 1)
    account = Account(Fraction, {_EXPECTED: share, _LOADED: Fraction(engine)})
    if 2 * engine > 3 * share:  # padding, copies and what is not divided are less
        account["dtype"] = engine - share
    row = _row(("model", ""), account, True)
    weights = Weights(row["expected_bytes"], None, engine, [row], "checkpoint")
    return replace(rank, weights=weights)


def _row(key: Key, account: Account, known: bool) -> WeightRow:
    """Return a row in whole bytes; its causes add up to the difference where that is known."""
    held, expected = int(account[_LOADED]), round(account[_EXPECTED]) if known else None
    difference = minus(held, expected)
    causes = {name: round(account[name]) for name in TITLES["weights_why"]}
    if difference is not None and (rest := difference - sum(causes.values())):
        largest = max(causes, key=lambda name: abs(causes[name]))
        causes[largest if abs(rest) <= len(causes) and causes[largest] else _REST] += rest
    named = sorted(filter(lambda each: each[1], causes.items()), key=lambda each: -abs(each[1]))
    titles = TITLES["weights_why"]
    said = (text("{why} {size:size}", why=titles[name], size=size) for name, size in named)
    return {
        "class": key[0],
        "dtype": key[1],
        "expected_bytes": expected,
        "loaded_bytes": held,
        "difference_bytes": difference,
        "why": titles[named[0][0]] if len(named) == 1 else join("; ", said),
        "causes": dict(named),
    }
