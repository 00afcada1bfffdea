"""Write ``docs/findings/*.md`` from the rules of the findings.

python -m tests.support.write_findings_docs          rewrite the pages
python -m tests.support.write_findings_docs --check  exit status 1 when a page differs
"""

from __future__ import annotations

import re
import sys
import textwrap
from inspect import cleandoc
from pathlib import Path

from vllm_memprof.accounting.findings.needs import NOTHING
from vllm_memprof.accounting.findings.registry import FindingRule
from vllm_memprof.accounting.findings.table import FINDINGS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "findings"
#: Sections of a docstring -> heading of the page.
SECTIONS = {"Meaning": "What it means", "Computed": "How it is computed", "To do": "What to do"}
#: Module of the rules -> heading of the index.
SUBJECTS = {
    "budget": "The granted KV cache",
    "equation": "The engine's figures",
    "not_subtracted": "What the equation does not subtract",
    "kv_cache": "The plan of the KV cache",
    "neighbours": "Other processes",
    "oom": "Out of memory",
    "outside_torch": "Outside torch",
    "empty_cache": "empty_cache",
    "cycles": "Cycles of sleep mode, pauses and weight updates",
    "serving_growth": "While serving",
    "fits_device": "Whether the KV cache fits the device",
    "engine_lines": "What the engine estimates and prints",
    "setup": "Set-up and hooks",
    "hosts": "Several hosts",
    "multimodal": "Multimodal requests",
    "sglang/findings": "SGLang",
}


def sections_of(rule: FindingRule) -> dict[str, str]:
    """Return the sections of a rule's docstring, name -> Markdown."""
    parts = re.split(r"^([A-Z][a-z ]+):$", cleandoc(rule.explained), flags=re.MULTILINE)
    return {
        name: textwrap.dedent(body).strip()
        for name, body in zip(parts[1::2], parts[2::2], strict=True)
        if body.strip()
    }


def page(rule: FindingRule) -> str:
    severity = rule.severity
    if not isinstance(severity, str):
        severity = (severity.__doc__ or "").removeprefix("Return ").rstrip(".").replace("``", "")
    said = sections_of(rule)
    parts = [f"# {rule.id}", textwrap.fill(f"{rule.title}. Severity: {severity}.", 100)]
    parts += [f"## {heading}\n\n{said[name]}" for name, heading in SECTIONS.items()]
    parts.append(f"Source: `{rule.source}`")
    return "\n\n".join(parts) + "\n"


def pages() -> dict[str, str]:
    """Return file name -> text, one page per finding and an index."""
    made = {f"{rule.id}.md": page(rule) for rule in FINDINGS.values()}
    index = [
        "# Findings",
        "",
        "Made from the rules of `vllm_memprof/accounting/findings/` and `vllm_memprof/engines/` by",
        "`tests/support/write_findings_docs.py`. A report lists findings by severity, then by bytes.",
        'In a budget file, `fail_on = ["negative-kv"]` fails a run that has the finding; a rank on',
        "which a finding cannot be looked for (last column) fails as not judged.",
    ]
    for module, heading in SUBJECTS.items():
        index += ["", f"## {heading}", "", "| finding | says | looked for if |", "|---|---|---|"]
        index += [
            f"| [`{rule.id}`]({rule.id}.md) | {rule.title} | "
            f"{'always' if rule.needs is NOTHING else rule.needs.said} |"
            for rule in FINDINGS.values()
            if f"/{module}.py::" in rule.source
        ]
    made["README.md"] = "\n".join(index) + "\n"
    return made


def main() -> int:
    made, wrong = pages(), []
    FOLDER.mkdir(exist_ok=True)
    if "--check" in sys.argv[1:]:
        there = {path.name: path.read_text() for path in FOLDER.glob("*.md")}
        wrong = [name for name in {**made, **there} if there.get(name) != made.get(name)]
    else:
        for name, text in made.items():
            (FOLDER / name).write_text(text)
    if wrong:
        print(f"docs/findings: {', '.join(wrong)}: run python -m tests.support.write_findings_docs")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
