"""A check as CI systems read it: workflow commands of GitHub Actions, and JUnit XML.

The summary of a job is the markdown. (docs.github.com, "Workflow commands for GitHub Actions"; what
is escaped: actions/toolkit, packages/core, command.ts.)
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from vllm_memprof.check.document import head, sentences, verdict
from vllm_memprof.check.outcomes import CheckResult
from vllm_memprof.document import Line
from vllm_memprof.text import plain

#: In a message; and in a property besides these.
_MESSAGE = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A"})
_PROPERTY = {**_MESSAGE, **str.maketrans({":": "%3A", ",": "%2C"})}
#: What XML 1.0 has no place for, not even escaped.
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render_check_github(result: CheckResult, budget_path: str) -> str:
    """Return an ``::error`` per sentence of a failed limit, on its line, and the verdict.

    Args:
        result: the outcomes.
        budget_path: the budget file as the repository knows it; annotations are shown there.
    """
    whole = {"title": "memprof check"}
    commands: list[tuple[str, dict[str, str], str]] = []
    for outcome in result.failures:
        at = {"title": f"memprof check: {outcome.key}"}
        if outcome.line is not None:
            at |= {"file": budget_path, "line": str(outcome.line)}
        commands += [("error", at, said) for said in sentences(outcome)]
    commands += [("notice", whole, note) for note in result.notes]
    commands.append(("notice" if result.ok else "error", whole, verdict(result)))
    lines = []
    for name, at, message in commands:
        given = ",".join(f"{key}={value.translate(_PROPERTY)}" for key, value in at.items())
        lines.append(f"::{name} {given}::{plain(message).translate(_MESSAGE)}\n")
    return "".join(lines)


def render_check_junit(result: CheckResult) -> str:
    """Return the XML document: one test case per limit."""
    counts = {"tests": len(result.limits), "failures": len(result.failures), "errors": 0}
    root = _add(None, "testsuites", name="memprof check", **counts)
    suite = _add(root, "testsuite", name=f"memprof check {result.budget}", **counts, skipped=0)
    properties = _add(suite, "properties")
    for line in [*head(result), Line("verdict", verdict(result))]:
        _add(properties, "property", name=line.name, value=line.value)
    for outcome in result.limits:
        name = f"memprof.{outcome.table}"
        case = _add(suite, "testcase", classname=name, name=outcome.key)
        if not outcome.ok:
            kind = "not measured" if outcome.unmeasured else "over budget"
            said = sentences(outcome)
            failure = _add(case, "failure", type=kind, message=said[0])
            failure.text = _NOT_XML.sub("\ufffd", "\n".join(said))
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _add(above: ET.Element | None, tag: str, **attributes: object) -> ET.Element:
    """Return a new element, below another one; what XML has no place for is replaced."""
    given = {name: _NOT_XML.sub("\ufffd", str(value)) for name, value in attributes.items()}
    return ET.Element(tag, given) if above is None else ET.SubElement(above, tag, given)
