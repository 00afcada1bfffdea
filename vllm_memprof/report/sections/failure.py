"""The first lines of a report: what failed, by which line, and what to change first."""

from __future__ import annotations

from vllm_memprof.document import BAD, Line
from vllm_memprof.record.cause import Cure, NamedFailure
from vllm_memprof.text import Text, text

#: Cures on the first screen; report.json has them all.
_SHOWN = 3


def failure_lines(failure: NamedFailure | None) -> list[Line]:
    """Return the lines of a failure; none where there is none."""
    if failure is None:
        return []
    title: str = failure.title
    if failure.confidence == "certain":
        title = text("{title} ({kind})", title=title, kind=failure.kind)
    elif failure.confidence == "likely":
        title = text("{title} ({kind}, likely)", title=title, kind=failure.kind)
    return [
        Line(text("failed"), title, BAD),
        *(
            Line(text("because"), text("line {number}: {line}", number=each.line, line=each.text))
            for each in failure.evidence
        ),
        *(Line(text("change"), _said(cure)) for cure in failure.cures[:_SHOWN]),
    ]


def _said(cure: Cure) -> Text:
    change = cure.action or cure.argument or cure.environment or ""
    if cure.value is not None:
        change += ("=" if cure.environment else " ") + cure.value
    if cure.enough == "computed":
        return text("{change}: {why} (computed, not tried)", change=change, why=cure.why)
    if cure.enough == "at least":
        return text(
            "{change}: {why} (computed for what failed; what follows it may need more)",
            change=change,
            why=cure.why,
        )
    return text("{change}: {why}", change=change, why=cure.why)
