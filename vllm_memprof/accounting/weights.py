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
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

from vllm_memprof.accounting.model import RankReport, WeightRow, Weights
from vllm_memprof.accounting.readings.run import RankReadings
from vllm_memprof.accounting.readings.startup import after, grown_by
from vllm_memprof.accounting.tensors import TABLE, class_of, laid_out, size_of, unwrapped
from vllm_memprof.accounting.titles import TITLES
from vllm_memprof.layout import text_config
from vllm_memprof.record.spans import is_within
from vllm_memprof.record.weights import ATTRIBUTE, PARAMETER, Loaded, TensorRow
from vllm_memprof.text import join, text
from vllm_memprof.units import minus, sum_or_none

#: A class and a dtype.
Key = tuple[str, str]
#: Bytes by what they are: expected, loaded, or a cause of the difference.
Account = defaultdict[str, Fraction]


def _accounts(held: Loaded, rows: list[TensorRow], files: bool, later: bool) -> dict[Key, Account]:
    """Return what a rank holds and its share of a checkpoint, with why these differ.

    Args:
        held: what it has loaded.
        rows: the checkpoint's; empty: it is not known.
        files: they are of files, with all that these have.
        later: the rank is no first stage of a pipeline.
    """
    book: dict[Key, Account] = defaultdict(lambda: Account(Fraction))
    config = text_config(held.config)
    tied = config.get("tie_word_embeddings")
    tp, dp, pp = (held.ranks.get(name, 1) for name in ("tp", "dp", "pp"))
    divided = {"experts": tp * dp}  # over other ranks than tp
    shared: set[Key] = set()  # classes that it has a share of, those of a draft by themselves
    #: Values of a tensor, by the end of its name.
    sizes: dict[str, set[int]] = defaultdict(set)
    places = {place for row in held.rows for place in _places(row)}
    for row in rows:
        cls, of_row = class_of(row.name), _places(row)
        dtype = "int4" if re.search(TABLE["packed"], row.name) else row.dtype
        size = Fraction(row.bytes, divided.get(cls, tp) * len(of_row))
        sizes[_end(row)].add(math.prod(row.shape))
        for place in of_row:
            draft = isinstance(place, int) and place >= config.get("num_hidden_layers", math.inf)
            name = "draft" if draft or re.search(TABLE["draft"], row.name) else cls
            there = (name if name == "draft" else place) in places
            if there and not (later and tied and cls == "embedding"):
                shared.add((name, cls))
            elif files and pp == 1:
                book[name, dtype]["not_loaded"] -= size
            else:
                continue
            book[name, dtype]["expected"] += size
    for row in held.rows:
        name, cls = _class(row), class_of(row.name)
        account = book[name, row.dtype]
        account["loaded"] += row.bytes
        if name == "tables":
            account["tables"] += row.bytes
        elif row.kind == ATTRIBUTE:
            account["copies"] += row.bytes  # as far as there is a difference: see below
        elif not rows or (name, cls) in shared:
            ranks = divided.get(cls, tp)
            for cause, more in _beyond(row, cls, sizes[_end(row)], ranks, config):
                account[cause] += more
        elif cls in ("embedding", "lm_head") and (row.draft or tied):
            ends = "stages" if later and tied else "draft_ends" if row.draft else "tied"
            account[ends] += row.bytes
    for (name, dtype), account in book.items():  # what is left of the differences
        account["copies"] += max(-account["copies"], min(Fraction(0), _rest(account)))
        for (other, wide), wider in book.items():  # of what another dtype of the class lacks
            if other == name and (lacking := -_rest(account)) > 0 < (over := _rest(wider)):
                packed = dtype == "int4" and over <= lacking  # as the checkpoint has them
                ratio = 1 if packed else size_of(wide) / size_of(dtype)
                moved = min(lacking, over / ratio)
                account["dtype"] -= moved
                wider["dtype"] += moved * ratio
    return book


def _beyond(
    row: TensorRow, cls: str, values: set[int], ranks: int, config: dict[str, Any]
) -> Iterator[tuple[str, Fraction]]:
    """Yield why a parameter is more than the rank's share of it, as far as that is known.

    Args:
        row: what the rank holds.
        cls: its class.
        values: of tensors of the checkpoint with its name.
        ranks: over how many an even division divides it.
        config: of the text model, and what lies beside it.
    """
    get, count = row.facts.get, math.prod(row.shape)
    filled = Fraction(get("org_vocab_size", 1), get("num_embeddings_padded", 1))
    held = row.count * count * size_of(row.dtype) * filled
    by = Fraction(get("tp_size", 0))  # 0: nothing tells over how many it is divided
    replicas = get("num_kv_head_replicas", 1)
    heads, experts = (
        next((each[name] for name in TABLE[of] if each.get(name)), None)
        for of, each in (("heads", config.get("vision_config", {})), ("experts", config))
    )
    of_files = [n for n in range(1, ranks + 1) if n * count in values]
    whole = 0 if of_files or cls == "experts" else max(values, default=0)
    made = get("num_kv_heads", 0) * by / replicas
    if cls == "vision" and heads and made > heads:
        held *= heads / made  # the others are in no file
    elif 0 < whole < count * filled * by:
        held *= whole / (count * filled * by)
    yield "padding", row.bytes - held
    if cls == "experts" and (every := get("global_num_experts")):
        by *= Fraction(every, get("local_num_experts", every))
        yield "redundant", held * (1 - Fraction(experts or every, every))
    elif of_files and by not in of_files:  # e.g. whole, whatever its layer divides
        by = Fraction(of_files[0])
    if by:
        yield "replicated", held * (1 - by / ranks)
    if replicas > 1:
        width = row.facts["head_size"] + row.facts["v_head_size"]
        part = Fraction(row.facts["num_kv_heads"] * width, row.facts["output_size_per_partition"])
        yield "kv_heads", held * part * (1 - Fraction(1, replicas))


def _rest(account: Account) -> Fraction:
    """Return what no cause says of a difference."""
    return 2 * account["loaded"] - sum(account.values())


def _places(row: TensorRow) -> list[Any]:
    """Return where tensors lie: layers of the text model, which pipelines divide; else a class."""
    cls = _class(row)
    return row.layers if "layers.*" in row.name and cls not in ("vision", "draft") else [cls]


def _class(row: TensorRow) -> str:
    """Return the class of what a rank holds."""
    cls = class_of(row.name) if row.kind in (PARAMETER, ATTRIBUTE) else "tables"
    return "draft" if row.draft and cls != "tables" else cls


def _end(row: TensorRow) -> str:
    """Return by what a tensor is known both in a checkpoint and in an engine."""
    return ".".join(unwrapped(row.name).split(".")[-3:])


def weighed(read: RankReadings, rank: RankReport) -> RankReport:
    """Add the weights of a rank, class by class; its rows add up to the engine's figure."""
    loaded, files = read.process.weights, read.run.info.checkpoint
    engine = read.startup.quantities["weights"].bytes
    if loaded is None:
        return _printed(read, rank, engine)
    draft = read.startup.last("draft_load")
    if draft and not is_within(read.startup.spans, draft, "weight_load"):  # after the model
        engine = sum_or_none([engine, grown_by(draft)])
    of_model = files.rows if files else laid_out(json.dumps([loaded.config, loaded.quantized]))
    book = _accounts(loaded, of_model, bool(files), bool(rank.pp_rank))
    rows = [  # a configuration does not tell which scales its checkpoint has
        _row(key, book[key], of_model and (files or cls != "scales"))
        for cls in TITLES["weights"]
        for key in sorted(book)
        if key[0] == cls
    ]
    held = sum(row["loaded_bytes"] for row in rows)
    behind = sum(row.block_bytes or row.bytes for row in loaded.rows)
    for name, more in (("allocator", behind - held), ("unexplained", minus(engine, behind))):
        if more:
            rows.append(_row((name, ""), Account(Fraction, loaded=Fraction(more)), False))
    end = after(read.startup.last("weight_load"))
    weights = Weights(
        sum(row["expected_bytes"] or 0 for row in rows) if of_model else None,
        held,
        engine,
        rows,
        None if not of_model else "checkpoint" if files else "layout",
        None if end is None else minus(end.reserved_bytes, end.allocated_bytes),
        loaded.expandable,
    )
    return replace(rank, weights=weights)


def _printed(read: RankReadings, rank: RankReport, engine: int | None) -> RankReport:
    """Add what a log tells: the size of the files, an even share of it, and the engine's figure."""
    files = read.startup.figure("checkpoint_bytes")
    if files is None or engine is None:
        return rank
    share = Fraction(files, read.process.identity.world_size or 1)
    account = Account(Fraction, expected=share, loaded=Fraction(engine))
    if 2 * engine > 3 * share:  # padding, copies and what is not divided are less
        account["dtype"] = engine - share
    row = _row(("model", ""), account, True)
    return replace(rank, weights=Weights(row["expected_bytes"], None, engine, [row], "checkpoint"))


def _row(key: Key, account: Account, known: object) -> WeightRow:
    """Return a row in whole bytes; its causes add up to the difference where that is known."""
    held, expected, titles = (
        int(account["loaded"]),
        round(account["expected"]),
        TITLES["weights_why"],
    )
    if known:
        made = account["expected"] == 0 < _rest(account)
        account["made" if made else "unexplained"] += _rest(account)
    causes = {name: round(account[name]) for name in titles}
    if known:  # what rounding left
        largest = max(titles, key=lambda name: abs(account[name]))
        causes[largest] += held - expected - sum(causes.values())
    named = sorted(filter(lambda each: each[1], causes.items()), key=lambda each: -abs(each[1]))
    said = (text("{why} {size:size}", why=titles[name], size=size) for name, size in named)
    return {
        "class": key[0],
        "dtype": key[1],
        "expected_bytes": expected if known else None,
        "loaded_bytes": held,
        "difference_bytes": held - expected if known else None,
        "why": titles[named[0][0]] if len(named) == 1 else join("; ", said),
        "causes": dict(named),
    }
