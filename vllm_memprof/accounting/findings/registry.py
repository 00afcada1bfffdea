"""Rules of findings: the function, its id, severity, title and needs beside it.

``finding`` makes a ``FindingRule`` of a generator over one rank, ``finding_of_run`` of one over the
run as a whole. The generators yield evidence, bytes and action; a rule fills in the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from vllm_memprof.accounting.budget.kv import worth_in_tokens
from vllm_memprof.accounting.findings.advice import least_granted
from vllm_memprof.accounting.findings.needs import Need
from vllm_memprof.accounting.model import Finding, RankReport
from vllm_memprof.record.loader import Identity, Run
from vllm_memprof.text import Text, text
from vllm_memprof.units import MIB

ERROR, WARNING, INFO = "error", "warning", "info"
#: From this size on, memory that the equation does not subtract is a warning, not info.
WARNING_BYTES = 128 * MIB


def by_bytes(size: int) -> str:
    """Return ``warning`` from 128 MiB on, ``info`` below."""
    return WARNING if size >= WARNING_BYTES else INFO


Severity = str | Callable[[int], str]


@dataclass(frozen=True)
class Context:
    """What a finding goes by: the run, its finished ranks, and of a finding of a rank that rank."""

    run: Run
    ranks: list[RankReport]

    @cached_property
    def least_granted_bytes(self) -> int | None:
        """Return the smallest KV cache that a rank was granted; None: none is known."""
        return least_granted(self.ranks)

    @cached_property
    def pids(self) -> dict[str | None, frozenset[str]]:
        """Return the process numbers of the run by host: ranks, front ends and engine cores."""
        found = dict(self.run.pids)
        for rank in self.ranks:
            found[rank.host] = found.get(rank.host, frozenset()) | {str(rank.pid)}
        return found


@dataclass(frozen=True)
class RankContext(Context):
    rank: RankReport
    whole: Context  # the run without the rank: what is the same for every rank is found once


@dataclass(frozen=True)
class Found:
    """One occurrence. What is None is as the rule says."""

    evidence: str
    bytes: int | None = None
    action: str = ""
    title: Text | None = None
    severity: str | None = None
    kv_tokens: int | None = None  # where the cost in KV tokens is not that of ``bytes``
    about: RankReport | Identity | None = None  # the rank or process it is about; None: the run


@dataclass(frozen=True)
class FindingRule:
    """A finding that a run may have."""

    id: str
    severity: Severity
    title: Text
    needs: Need
    priced: bool  # in KV tokens
    find: Callable[[Context], Iterator[Found]]
    explained: str  # the docstring of the function, from which its page is made
    source: str  # file::symbol

    def findings(self, run: Run, ranks: list[RankReport]) -> Iterator[Finding]:
        """Yield all occurrences in a run."""
        for found in self.find(Context(run, ranks)):
            severity = found.severity or self.severity
            tokens = found.kv_tokens
            if tokens is None and self.priced and isinstance(found.about, RankReport):
                tokens = worth_in_tokens(found.about.kv, found.bytes)
            yield Finding(
                id=self.id,
                severity=severity if isinstance(severity, str) else severity(found.bytes or 0),
                rank=None if found.about is None else found.about.rank,
                label=None if found.about is None else found.about.label,
                title=found.title or self.title,
                evidence=found.evidence,
                bytes=found.bytes,
                kv_tokens=tokens,
                action=found.action,
            )


def finding(
    rule_id: str, *, severity: Severity, title: Text, needs: Need, priced: bool = True
) -> Callable[[Callable[[RankContext], Iterator[Found]]], FindingRule]:
    """Make a rule of a generator that looks at one rank at a time.

    Args:
        rule_id: as in reports and budget files.
        severity: a constant, or a function of the bytes.
        title: where an occurrence has none of its own.
        needs: of a run, before the absence of the finding means anything.
        priced: in KV tokens.
    """

    def make(function: Callable[[RankContext], Iterator[Found]]) -> FindingRule:
        def find(context: Context) -> Iterator[Found]:
            for rank in context.ranks:
                for found in function(RankContext(context.run, context.ranks, rank, context)):
                    yield replace(found, about=rank)

        return FindingRule(rule_id, severity, title, needs, priced, find, *_origin(function))

    return make


def finding_of_run(
    rule_id: str, *, severity: Severity, title: Text, needs: Need
) -> Callable[[Callable[[Context], Iterator[Found]]], FindingRule]:
    """Make a rule of a generator that looks at the run as a whole, and says itself about what."""

    def make(function: Callable[[Context], Iterator[Found]]) -> FindingRule:
        return FindingRule(rule_id, severity, title, needs, True, function, *_origin(function))

    return make


def _origin(function: Callable[..., object]) -> tuple[str, str]:
    path = function.__module__.replace(".", "/")
    return function.__doc__ or "", f"{path}.py::{function.__name__}"


def known(*rows: tuple[Text, object], name: str = "size") -> list[Text]:
    """Return the sentences whose figure is known, each a template with that one parameter."""
    return [text(row[0], **{name: row[1]}) for row in rows if row[1] is not None]
