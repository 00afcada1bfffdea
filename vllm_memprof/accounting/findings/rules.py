"""Rules of findings: rows of ``findings.toml``, each with the function that finds it.

A function yields bytes and figures by name; the row has the words in which they are said, the
severity, and what a run must have measured before the absence of the finding means anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from vllm_memprof.accounting.budget.kv import worth_in_tokens
from vllm_memprof.accounting.findings.advice import least_granted
from vllm_memprof.accounting.findings.needs import Need
from vllm_memprof.accounting.model import Finding, RankReport
from vllm_memprof.engines import ENGINES
from vllm_memprof.files import read_table
from vllm_memprof.record.loader import Identity, Run
from vllm_memprof.text import Part, Sentence, sentences
from vllm_memprof.units import MIB, Amount

ERROR, WARNING, INFO = "error", "warning", "info"
#: From this size on, memory that the equation does not subtract is a warning, not info.
WARNING_BYTES = 128 * MIB
BY_BYTES = "by bytes"  # a severity


@dataclass(frozen=True)
class Context:
    """What a finding goes by besides its rank: the run and its finished ranks."""

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
class Found:
    """One occurrence. What is None is as the rule says."""

    bytes: Amount
    #: By the names that the sentences of the row have for them. Others that they name are of the
    #: rank, its budget, its KV plan, or in ``RankReport.figures``.
    figures: Mapping[str, object]
    severity: str | None = None
    kv_tokens: Amount = None  # where the cost in KV tokens is not that of ``bytes``
    about: RankReport | Identity | None = None  # None: the rank that was looked at, or the run


@dataclass(frozen=True)
class FindingRule:
    """A row of ``findings.toml``: a finding that a run may have."""

    id: str
    title: tuple[Sentence, ...]  # alternatives, that of its page last
    severity: str
    find: Callable[..., Iterator[Found]]
    source: str  # of ``find``: file::symbol
    evidence: Sequence[Part]
    meaning: str  # with computed and to_do: its page
    computed: str
    to_do: str
    needs: Need
    action: Sequence[Part] = ()
    mark: str = "; "  # between the parts of the evidence
    priced: bool = True  # in KV tokens
    of_run: bool = False  # ``find`` takes the run as a whole, not a rank of it
    argument: object = None  # ``find`` takes it first

    def findings(self, run: Run, ranks: list[RankReport]) -> Iterator[Finding]:
        """Yield all occurrences in a run."""
        context = Context(run, ranks)
        given = () if self.argument is None else (self.argument,)
        asked = [(None, (context,))] if self.of_run else [(rank, (rank, context)) for rank in ranks]
        for rank, where in asked:
            for one in self.find(*given, *where):
                about = one.about or rank
                severity, tokens = one.severity or self.severity, one.kv_tokens
                if severity == BY_BYTES:
                    severity = WARNING if (one.bytes or 0) >= WARNING_BYTES else INFO
                figures: dict[str, object] = {}
                if isinstance(about, RankReport):
                    figures = {
                        **vars(about.kv),
                        **vars(about.budget),
                        **vars(about),
                        **about.figures,
                    }
                    if tokens is None and self.priced:
                        tokens = worth_in_tokens(about.kv, one.bytes)
                figures |= {"bytes": one.bytes, **one.figures}
                yield Finding(
                    id=self.id,
                    severity=severity,
                    rank=None if about is None else about.rank,
                    label=None if about is None else about.label,
                    title=sentences([self.title], figures),
                    evidence=sentences(self.evidence, figures, self.mark),
                    bytes=one.bytes,
                    kv_tokens=tokens,
                    action=sentences(self.action, figures),
                )


def read_rules() -> Iterator[FindingRule]:
    """Yield the rules of the ``findings.toml`` here, then those of each engine, in their order.

    ``sentences`` and ``needs`` here are those of all of them.
    """
    shared: dict[str, Any] = {}
    for folder in (Path(__file__).parent, *(row.folder for row in ENGINES.values())):
        file = folder / "findings.toml"
        table = read_table(file) if file.exists() else {"findings": {}}
        shared = shared or table
        for name, row in table["findings"].items():
            module, _, function = row["find"].partition(":")
            find = getattr(import_module(module), function)
            need = Need(**shared["needs"][row.get("needs", "nothing")])
            if row.get("needs") == "item":
                need = replace(need, item=row["argument"])
            said = {
                key: tuple(_alternatives(part, shared["sentences"]) for part in row.get(key, ()))
                for key in ("evidence", "action")
            }
            source = f"{find.__module__.replace('.', '/')}.py::{function}"
            title = _alternatives(row["title"], shared["sentences"])
            made = {"title": title, "needs": need, "find": find, "source": source}
            yield FindingRule(**row | said | made, id=name)


def _alternatives(part: Part, named: Mapping[str, tuple[Sentence, ...]]) -> tuple[Sentence, ...]:
    """Return a part as alternatives; ``@name`` is those of that name."""
    found: tuple[Sentence, ...] = ()
    for one in part if isinstance(part, tuple) else (part,):
        found += named[one[1:]] if isinstance(one, str) and one[0] == "@" else (one,)
    return found
