"""Findings, those that differ in nothing but the rank folded into one."""

from __future__ import annotations

from vllm_memprof.accounting.model import Finding, Report
from vllm_memprof.accounting.titles import TITLES
from vllm_memprof.document import FindingView
from vllm_memprof.tables import group_ranks
from vllm_memprof.text import Text, fold, join, text
from vllm_memprof.units import only_known


def finding_views(report: Report) -> list[FindingView]:
    """Return the findings in their order; those that differ in nothing but the rank become one."""

    def alike(finding: Finding) -> tuple[str, ...]:
        return finding.id, finding.severity, finding.title, _price(finding)

    found = []
    for members in group_ranks(report.findings, alike):
        first = members[0]
        labels = dict.fromkeys(only_known(each.label for each in members))
        evidence, *others = dict.fromkeys(each.evidence for each in members)
        if others:
            evidence = text("{evidence} (and {count} more)", first, count=len(others))
        found.append(
            FindingView(
                severity=first.severity,
                severity_word=TITLES["severities"][first.severity],
                id=first.id,
                labels=fold(list(labels)),
                price=_price(first),
                title=first.title,
                evidence=evidence,
                action=next((each.action for each in members if each.action), ""),
            )
        )
    return found


def _price(finding: Finding) -> Text:
    return join(
        ", ",
        (
            finding.bytes is not None and text("{bytes:gib4} GiB", finding),
            finding.kv_tokens is not None and text("{kv_tokens:,} tokens of KV cache", finding),
        ),
    )
