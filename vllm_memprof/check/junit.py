"""A check as JUnit XML: one test case per limit, for CI systems that show test results."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from vllm_memprof.check.document import head, sentences, verdict
from vllm_memprof.check.outcomes import CheckResult, Outcome
from vllm_memprof.document import Line

#: What XML 1.0 has no place for, not even escaped.
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render_check_junit(result: CheckResult) -> str:
    """The XML document as text."""
    counts = {
        "tests": str(len(result.limits)),
        "failures": str(len(result.failures)),
        "errors": "0",
    }
    root = ET.Element("testsuites", {"name": "memprof check", **counts})
    suite = ET.SubElement(
        root,
        "testsuite",
        {"name": _clean(f"memprof check {result.budget}"), **counts, "skipped": "0"},
    )
    properties = ET.SubElement(suite, "properties")
    for line in [*head(result), Line("verdict", verdict(result))]:
        ET.SubElement(properties, "property", {"name": line.name, "value": _clean(line.value)})
    for outcome in result.limits:
        _add_case(suite, outcome)
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _add_case(suite: ET.Element, outcome: Outcome) -> None:
    case = ET.SubElement(
        suite, "testcase", {"classname": f"memprof.{outcome.table}", "name": _clean(outcome.key)}
    )
    if outcome.ok:
        return
    texts = [_clean(text) for text in sentences(outcome)]
    kind = "not measured" if outcome.unmeasured else "over budget"
    failure = ET.SubElement(case, "failure", {"type": kind, "message": texts[0]})
    failure.text = "\n".join(texts)


def _clean(text: str) -> str:
    return _NOT_XML.sub("\ufffd", text)
