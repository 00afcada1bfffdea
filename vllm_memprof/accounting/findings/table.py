"""Findings: facts about a run that change what its figures mean, priced in bytes and KV tokens.

The finished ranks enter, the list of findings leaves, the gravest first. The rows stand in
``findings.toml`` here, and in the folder of the engine that alone has them.
"""

from __future__ import annotations

from vllm_memprof.accounting.findings.rules import ERROR, INFO, WARNING, FindingRule, read_rules
from vllm_memprof.accounting.model import Finding, RankReport, Report
from vllm_memprof.record.loader import Run

_GRAVITY = {ERROR: 0, WARNING: 1, INFO: 2}

#: id -> rule. Of findings as grave and as large as each other, the first here comes first.
FINDINGS: dict[str, FindingRule] = {rule.id: rule for rule in read_rules()}


def find(run: Run, ranks: list[RankReport]) -> list[Finding]:
    """Return all findings of a run, the gravest first, then by bytes."""
    return in_order([one for rule in FINDINGS.values() for one in rule.findings(run, ranks)])


def in_order(found: list[Finding]) -> list[Finding]:
    """Return findings, the gravest first, then by bytes."""
    return sorted(found, key=lambda one: (_GRAVITY[one.severity], -abs(one.bytes or 0)))


def blind_ranks(report: Report, name: str) -> list[tuple[RankReport, str]]:
    """Return the ranks on which a finding could not have been made, with the reason.

    Args:
        report: the run.
        name: of the finding, one of ``FINDINGS``.
    """
    found = [(rank, FINDINGS[name].needs.lacking(report, rank)) for rank in report.ranks]
    return [(rank, reason) for rank, reason in found if reason is not None]
