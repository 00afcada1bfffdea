"""What would have let a failed allocation pass: rows of ``remedies.toml``, and which to name first.

What cannot be quantified says so; what gives too little alone says that too.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from vllm_memprof.accounting.model import AT_LEAST, AT_MOST, Oom, RankReport, Remedy, Report
from vllm_memprof.accounting.oom import estimates
from vllm_memprof.accounting.oom.estimates import Case
from vllm_memprof.accounting.oom.failed_allocation import gib_of
from vllm_memprof.accounting.readings.run import RunReadings
from vllm_memprof.engines import ENGINES
from vllm_memprof.files import read_own
from vllm_memprof.options import read_option
from vllm_memprof.record.cause import NamedFailure
from vllm_memprof.record.spans import How
from vllm_memprof.text import Part, Sentence, join, sentences
from vllm_memprof.units import either

#: Remedies named by the finding; the table under it has all.
_MOST_NAMED = 4


@dataclass(frozen=True)
class RemedyRow:
    """A row of ``remedies.toml``."""

    find: str
    argument: tuple[Sentence, ...]
    grounds: tuple[Part, ...]
    bound: str | None = None
    how: How | None = None
    owner: str = ""  # of the device, for ``find``
    of_kv_cache: bool = False  # it takes from the KV cache
    after_kv_cache: bool = False  # it cannot help before the KV cache is there
    of_no_engine: bool = False  # its argument is not one of the engine


_TABLE = read_own(__file__, "remedies.toml")
#: What is said of a remedy and of what it gives: the first that can be said.
GIVES: Part = _TABLE["sentences"]["gives"]
#: Id -> what it gives, in the order in which they are worth trying.
REMEDIES = {name: RemedyRow(**row) for name, row in _TABLE["remedies"].items()}


def remedied(read: RunReadings, report: Report) -> Report:
    """Add what would have let the failed allocations pass, and with it the cures of the failure."""
    asked = read_option(report.run.command, "max-num-batched-tokens", int)
    failure, ranks = read.run.failure, []
    weights = failure is not None and failure.kind == "weights-too-large"
    for rank in report.ranks:
        if rank.oom is not None:
            tokens = either(rank.kv.max_num_batched_tokens, asked)
            case = Case(rank, rank.oom, report.run, tokens, weights)
            rank = replace(rank, oom=replace(rank.oom, remedies=remedies(case)))
        ranks.append(rank)
    return replace(report, ranks=ranks, failure=with_values(failure, ranks, report.run.engine))


def remedies(case: Case) -> list[Remedy]:
    """Return every remedy that applies, in the order of the table."""
    found, needed = [], case.needed
    for name, row in REMEDIES.items():
        if name in case.arguments.without or (
            case.logged and case.run.engine is None and not row.of_no_engine
        ):
            continue
        if (row.of_kv_cache or row.after_kv_cache) and case.has_kv_cache is False:
            continue
        find = getattr(estimates, row.find)
        for one in find(case, row.owner) if row.owner else find(case):
            unsure = one.unsure or (row.of_kv_cache and case.has_kv_cache is None)
            figures = {**one.figures, "unsure": unsure}
            bound, enough = None if one.bytes is None else one.bound or row.bound, None
            if one.surely:
                enough = True
            elif one.bytes is not None and needed is not None and not unsure:
                # at most so much never shows that it is enough, at least so much never that it is
                # not
                covers = one.bytes >= needed
                enough = None if bound == (AT_MOST if covers else AT_LEAST) else covers
            found.append(
                Remedy(
                    id=name,
                    argument=sentences([row.argument], figures),
                    bytes=one.bytes,
                    bound=bound,
                    how=None if one.bytes is None else one.how or row.how,
                    enough=enough,
                    grounds=sentences(row.grounds, figures),
                )
            )
    return found


def with_values(
    failure: NamedFailure | None, ranks: list[RankReport], engine: str | None
) -> NamedFailure | None:
    """Return a failure with the cures of its engine, and the values that remedies of ranks compute.

    Of several ranks the lowest value counts. It is enough for the allocation that failed, and
    ``at least`` for what came after it.
    """
    if failure is None:
        return None
    values: dict[str, float] = {}
    for rank in ranks:
        for remedy in () if rank.oom is None else rank.oom.remedies:
            option, _, value = remedy.argument.partition(" ")
            if remedy.enough is not False and re.fullmatch(r"\d+(?:\.\d+)?", value):
                values[option] = min(values.get(option, math.inf), float(value))
    cures = [
        replace(cure, value=f"{values[cure.argument]:.12g}", enough="at least")
        if cure.argument in values and cure.value is None
        else cure
        for cure in failure.cures
        if engine is None or cure.engine not in ENGINES or engine.startswith(cure.engine or "")
    ]
    return replace(failure, cures=cures)


def room_for(rank: RankReport, oom: Oom, kv_cache: str | None) -> dict[str, object]:
    """Return the remedies to try first, as the sentences of the finding have them.

    ``fitting``: what leaves room for the whole serving peak. Else those ``of_kv_cache``, where
    nothing tells whether the KV cache was there, and the ``others``; ``rest``: the phase that may
    need more.

    Args:
        rank: that ran out of memory.
        oom: its failure, with the table of remedies, the better ones first.
        kv_cache: state of the KV cache (`kv_cache_state`); None: not known.
    """
    named = _named(oom)
    if named and named[0].id == "room_for_the_peak" and named[0].enough:
        return {"fitting": named[0].argument}
    of_kv = [each for each in named if kv_cache is None and REMEDIES[each.id].of_kv_cache]
    known = any(each.bytes is not None for each in named)
    return {
        "of_kv_cache": _choices(rank, of_kv),
        "others": _choices(rank, [each for each in named if each not in of_kv]),
        "rest": known and not of_kv and oom.phase,
    }


def _named(oom: Oom) -> list[Remedy]:
    """Return the remedies that a finding names, in the order of the table.

    Memory of others that is most of what was missing comes alone: nothing of the engine's helps as
    much. Remedies of unknown size are named where no other is enough for sure.
    """
    useful = [each for each in oom.remedies if each.enough is not False]
    least = (oom.device_total_bytes or 0) // 3
    for each in useful:
        if each.id == "other_processes" and (each.bytes or 0) > least:
            return [each]
    named = [each for each in useful if each.bytes is not None or each.enough]
    if not any(each.enough for each in named):
        named += [each for each in useful if each not in named]
    return named[:_MOST_NAMED]


def _choices(rank: RankReport, some: list[Remedy]) -> str | None:
    said = []
    for each in some:
        unknown = each.bytes is None and not each.enough
        size = {each.bound or "": gib_of(rank, each.bytes)}
        figures = {"argument": each.argument, "unknown": unknown, **size}
        said.append(sentences([GIVES], figures))
    return join(", or ", said) if said else None
