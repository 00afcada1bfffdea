"""Findings, those that differ in nothing but the rank folded into one."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_memprof.accounting.model import Finding, Report
from vllm_memprof.report.sections.base import fold
from vllm_memprof.units import format_gib


@dataclass(frozen=True)
class FindingView:
    """A finding, the ranks it concerns folded."""

    severity: str
    id: str
    labels: str  # "" where it concerns the run
    price: str  # "0.30 GiB, 4,352 tokens of KV cache", "" where it has none
    title: str
    evidence: str
    actions: list[str]


def finding_views(report: Report) -> list[FindingView]:
    """Findings in their order; those that differ in nothing but the rank become one."""
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for finding in report.findings:
        groups.setdefault(
            (finding.id, finding.severity, finding.title, _price(finding)), []
        ).append(finding)
    found = []
    for (finding_id, severity, title, price), members in groups.items():
        labels = [finding.label for finding in members if finding.label is not None]
        evidence = list(dict.fromkeys(finding.evidence for finding in members))
        actions = list(dict.fromkeys(finding.action for finding in members if finding.action))
        found.append(
            FindingView(
                severity=severity,
                id=finding_id,
                labels=fold(sorted(set(labels), key=labels.index)),
                price=price,
                title=title,
                evidence=evidence[0]
                if len(evidence) == 1
                else f"{evidence[0]} (and {len(evidence) - 1} more)",
                actions=actions[:1],
            )
        )
    return found


def _price(finding: Finding) -> str:
    parts = [] if finding.bytes is None else [f"{format_gib(finding.bytes, 4)} GiB"]
    parts += [] if finding.kv_tokens is None else [f"{finding.kv_tokens:,} tokens of KV cache"]
    return ", ".join(parts)
