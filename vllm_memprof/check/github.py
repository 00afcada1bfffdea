"""A check as workflow commands of GitHub Actions; the summary of the job is the markdown.

(docs.github.com, "Workflow commands for GitHub Actions"; what is escaped: actions/toolkit,
packages/core, command.ts.)
"""

from __future__ import annotations

from vllm_memprof.check.document import sentences, verdict
from vllm_memprof.check.outcomes import CheckResult, Outcome

#: In a message; and in a property besides these.
_MESSAGE = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A"})
_PROPERTY = {**_MESSAGE, **str.maketrans({":": "%3A", ",": "%2C"})}


def render_check_github(result: CheckResult, budget_path: str) -> str:
    """Return an ``::error`` per sentence of a failed limit, on its line, and the verdict.

    Args:
        result: the outcomes.
        budget_path: the budget file as the repository knows it; annotations are shown there.
    """
    lines = [
        _command("error", text, _properties(outcome, budget_path))
        for outcome in result.failures
        for text in sentences(outcome)
    ]
    lines += [_command("notice", note, {"title": "memprof check"}) for note in result.notes]
    lines.append(
        _command("notice" if result.ok else "error", verdict(result), {"title": "memprof check"})
    )
    return "\n".join(lines) + "\n"


def _properties(outcome: Outcome, budget_path: str) -> dict[str, str]:
    place = {"file": budget_path, "line": str(outcome.line)} if outcome.line is not None else {}
    return {"title": f"memprof check: {outcome.key}", **place}


def _command(name: str, message: str, properties: dict[str, str]) -> str:
    given = ",".join(f"{key}={value.translate(_PROPERTY)}" for key, value in properties.items())
    return f"::{name} {given}::{message.translate(_MESSAGE)}"
