"""Findings, those that differ in nothing but the rank folded into one."""

from __future__ import annotations

from vllm_memprof.accounting.model import Finding, Report
from vllm_memprof.document import FindingView
from vllm_memprof.tables import fold
from vllm_memprof.text import Text, join, text

_SEVERITIES = {"error": text("error"), "warning": text("warning"), "info": text("info")}


def finding_views(report: Report) -> list[FindingView]:
    """Return the findings in their order; those that differ in nothing but the rank become one."""
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for finding in report.findings:
        groups.setdefault(
            (finding.id, finding.severity, finding.title, _price(finding)), []
        ).append(finding)
    found = []
    for members in groups.values():
        first = members[0]
        labels = [finding.label for finding in members if finding.label is not None]
        evidence: list[str] = list(dict.fromkeys(finding.evidence for finding in members))
        if len(evidence) > 1:
            evidence[0] = text(
                "{evidence} (and {count} more)", evidence=evidence[0], count=len(evidence) - 1
            )
        found.append(
            FindingView(
                severity=first.severity,
                severity_word=_SEVERITIES.get(first.severity, first.severity),
                id=first.id,
                labels=fold(sorted(set(labels), key=labels.index)),
                price=_price(first),
                title=first.title,
                evidence=evidence[0],
                action=next((finding.action for finding in members if finding.action), ""),
            )
        )
    return found


def _price(finding: Finding) -> Text:
    size, tokens = finding.bytes, finding.kv_tokens
    parts = [] if size is None else [text("{size:gib4} GiB", size=size)]
    parts += [] if tokens is None else [text("{tokens:,} tokens of KV cache", tokens=tokens)]
    return join(", ", parts)
