"""What KV connectors take on device and host: rows of ``connectors.toml`` of the engine.

Enters: the connectors that the KV plan names with their arguments, and what the worker read while
they were made and registered the KV cache. A row of the table is measured where the worker found
its tensors, else derived from its formula. What no row names is a row of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from packaging.specifiers import SpecifierSet

from vllm_memprof.accounting.budget.kv import padding_bytes
from vllm_memprof.accounting.model import ConnectorRow, RankReport
from vllm_memprof.accounting.owners.outside_torch import CONNECTOR_PHASES, grown, owners_of
from vllm_memprof.accounting.readings.run import RankReadings
from vllm_memprof.engines import row_of_run
from vllm_memprof.files import read_table
from vllm_memprof.record.spans import DERIVED, ESTIMATED, MEASURED, MODELLED, Span
from vllm_memprof.units import Amount, minus, sum_or_none

_ALIGNS = "vllm_ascend/worker/model_runner_v1.py::NPUModelRunner._allocate_int8_cache_tensor"
_SIZE = re.compile(r"([\d.]+)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    ">": lambda left, right: left > right,
    "==": lambda left, right: left == right,
    "!=": lambda left, right: left != right,
}


@dataclass(frozen=True)
class ConnectorOwner:
    """A row of the table: something that a connector takes on each rank."""

    owner: str  # of ``TITLES["connector_owners"]``
    connectors: tuple[str, ...]  # as --kv-transfer-config names them; empty: every one
    place: str  # device | host
    source: str  # file::symbol
    #: Sums of products of figures, sizes and arguments; "" where nothing tells the size.
    formula: str = ""
    #: Names of arguments, the first that is given counts as ``argument``; the last may be a size.
    argument: tuple[str, ...] = ()
    when: tuple[str, ...] = ()  # ``name > figure``: all of them; one that is unknown does not hold
    attributes: tuple[str, ...] = ()  # last names of the attributes that hold its tensors
    part_of: str | None = None  # another row, where that was measured
    releases: str = ""  # of the engine
    at_most: bool = False  # the formula is the most that it takes


@cache
def _table(engine: str | None) -> tuple[ConnectorOwner, ...]:
    path = row_of_run(engine).folder / "connectors.toml"
    return tuple(ConnectorOwner(**row) for row in read_table(path)["owners"])


def connected(read: RankReadings, rank: RankReport) -> RankReport:
    """Add what the connectors of a rank take; nothing without one."""
    plan = next((each.kv_plan for each in read.run.whole.planners if each.kv_plan), None) or {}
    named: Sequence[Mapping[str, Any]] = plan.get("connectors") or ()
    spans = [span for span in read.process.phases if span.phase == "kv_register"]
    figures = {
        "layers": sum_or_none(group.layers for group in rank.kv.groups) or None,
        "planned_bytes": rank.kv.planned_bytes,
        "bytes_per_token": rank.kv.bytes_per_token,
        "max_model_len": rank.kv.max_model_len,
        "world_size": len(plan.get("planned_bytes") or ()) or None,
    }
    rows: list[ConnectorRow] = []
    version = read.summary.engine_version
    for place, given in enumerate(named):
        values = {**figures, **given["arguments"], "role": given["role"]}
        own: Sequence[Span] = (
            spans if len(named) == 1 else spans[place : place + 1] * (len(spans) == len(named))
        )
        listed = [
            owner
            for owner in _table(read.summary.engine)
            if given["name"] in (owner.connectors or (given["name"],))
            and (version is None or SpecifierSet(owner.releases).contains(version, True))
            and all(_holds(condition, values) for condition in owner.when)
        ]
        rows += _of_connector(str(given["name"]), listed, values, own)
    return replace(rank, connectors=[*rows, *_of_rank(read, rank, rows)] if named else [])


def _of_connector(
    name: str, listed: list[ConnectorOwner], values: Mapping[str, Any], spans: Sequence[Span]
) -> Iterator[ConnectorRow]:
    """Yield the rows of one connector: measured by its tensors, else derived."""
    left: list[Mapping[str, Any]] = []
    for span in spans:
        found: Any = span.detail.get("tensors") or ()
        left += found
    for owner in listed:
        values = {**values, **_chosen(owner.argument, values)}
        taken = [
            each
            for each in left
            if each["place"] == owner.place
            and each["attribute"].rpartition(".")[2] in owner.attributes
        ]
        left = [each for each in left if each not in taken]
        row = ConnectorRow(name, owner.owner, owner.place, None, DERIVED, owner.source)
        row = replace(row, argument=values["argument_name"], formula=owner.formula or None)
        if taken:
            yield from _measured(row, taken)
        elif not owner.attributes or not spans:
            size = evaluate(owner.formula, values) if owner.formula else None
            how, held = ESTIMATED if owner.at_most else DERIVED, owner.part_of if spans else None
            yield replace(row, bytes=size, how=how, part_of=held)
    for each in left:
        place, source = each["place"], each["attribute"]
        yield from _measured(
            ConnectorRow(name, f"other_{place}", place, None, MEASURED, source), [each]
        )


def _measured(row: ConnectorRow, taken: list[Mapping[str, Any]]) -> Iterator[ConnectorRow]:
    size, pinned = (sum(each[key] for each in taken) for key in ("bytes", "pinned_bytes"))
    yield replace(row, bytes=size, how=MEASURED)
    if pinned > size:
        source = "aten/src/ATen/core/CachingHostAllocator.h::allocate"
        yield replace(row, owner="pinned_rounding", bytes=pinned - size, source=source)


def _of_rank(
    read: RankReadings, rank: RankReport, rows: list[ConnectorRow]
) -> Iterator[ConnectorRow]:
    """Yield what the connectors of a rank take together, as the device's counters tell."""
    spans = [span for span in read.process.phases if span.phase in CONNECTOR_PHASES]
    made = [span for span in spans if span.phase != "kv_transfer"]
    aligned, how = rank.kv.alignment_bytes, MEASURED
    if aligned is None and read.summary.engine == "vllm-ascend":
        aligned, how = padding_bytes(rank.kv.groups), ESTIMATED
    if aligned is not None:
        yield ConnectorRow(None, "alignment", "device", aligned, how, _ALIGNS)
    if not made:
        return

    def row(owner: str, size: Amount, source: str, part_of: str | None = None) -> ConnectorRow:
        how = MODELLED if read.summary.simulated and owner == "links" else MEASURED
        return ConnectorRow(None, owner, "device", size, how, source, part_of=part_of)

    grew = sum_or_none(grown(span, lambda at: at.allocated_bytes) for span in made)
    tensors = (each.bytes for each in rows if each.place == "device" and each.how == MEASURED)
    rest = minus(grew, sum_or_none(tensors) or 0)
    if rest != 0:
        yield row("other_device", rest, "growth of allocated over its phases - its tensors")
    links = sum(each.grown_bytes or 0 for each in owners_of(read.process).links)
    if links:
        yield row("links", links, "growth of non-torch")
    registered = sum_or_none(span.integer("registered_bytes") for span in made
                             if "registered_bytes" in span.detail)  # fmt: skip
    if registered:
        yield row("registered", registered, "TransferEngine.register_memory", "kv_cache")


def _holds(condition: str, values: Mapping[str, Any]) -> bool:
    name, compare, other = condition.split()
    left, right = _value(name, values), _value(other, values)
    if left is None:
        return compare == "!=" or other == "none"
    return other != "none" and _COMPARE[compare](left, other if right is None else right)


def _chosen(names: Sequence[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first of some arguments that is given, with its name; the last may be a size."""
    for name in names:
        if (value := _value(name, values)) is not None:
            return {"argument": value, "argument_name": name if name in values else "default"}
    return {"argument": None, "argument_name": None}


def evaluate(formula: str, values: Mapping[str, Any]) -> Amount:
    """Return the bytes of a formula, ``a * b / c + 2 MiB``; None: a name in it is unknown."""
    total = 0.0
    for term in formula.split(" + "):
        product, operator = 1.0, "*"
        for token in re.split(r" ([*/]) ", term):
            if token in "*/":
                operator = token
                continue
            value = _value(token, values)
            if not isinstance(value, (int, float)):
                return None
            product = product * value if operator == "*" else product / value
        total += product
    return int(total)


def _value(token: str, values: Mapping[str, Any]) -> Any:
    """Return a name's value, or a size, as engines write it: ``1 GiB``, ``30GB``, 5, ``4:8``."""
    known = token in ("true", "false") or _SIZE.fullmatch(token)
    found = values.get(token, token if known else None)
    if found is None or isinstance(found, (bool, int, float)):
        return found
    factors = [_SIZE.fullmatch(part) for part in str(found).split(":")]
    product = 1.0
    for match in factors:
        if match is None:
            return {"true": True, "false": False}.get(str(found).lower(), found)
        product *= float(match[1]) * 1024 ** _POWERS[match[2].lower()]
    return product
