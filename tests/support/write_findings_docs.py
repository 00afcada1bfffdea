"""Write ``docs/findings/*.md`` from the rows of the findings.

python -m tests.support.write_findings_docs          rewrite the pages
python -m tests.support.write_findings_docs --check  exit status 1 when a page differs
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from vllm_memprof.accounting.findings.rules import BY_BYTES, WARNING_BYTES, FindingRule
from vllm_memprof.accounting.findings.table import FINDINGS
from vllm_memprof.units import MIB

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "findings"
#: Key of a row -> title of the paragraph.
SECTIONS = {"meaning": "Meaning", "computed": "Computed", "to_do": "Action"}
#: Module of the rules -> heading of the index.
SUBJECTS = {
    "kv_cache": "The KV cache that was granted and planned",
    "equation": "The engine's equation and figures",
    "weights": "Weights",
    "device": "The device: whether the KV cache fits, other processes, outside torch",
    "oom": "Out of memory",
    "empty_cache": "empty_cache, and cycles of sleep mode, pauses and weight updates",
    "serving": "While serving",
    "setup": "Set-up, hooks and hosts",
    "sglang/findings": "SGLang",
}


def fill(said: str, indent: str = "") -> str:
    """Return prose in lines of 100 characters."""
    return textwrap.fill(
        said, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def page(rule: FindingRule) -> str:
    severity = rule.severity
    if severity == BY_BYTES:
        severity = f"warning from {WARNING_BYTES // MIB} MiB on, info below"
    parts = [f"# {rule.id}", fill(f"{rule.title[-1]}. Severity: {severity}.")]
    for name, heading in SECTIONS.items():
        first, *others = getattr(rule, name).split("\n\n")
        title = f"**{heading}.**"
        parts += [title, first] if first.startswith("- ") else [fill(f"{title} {first}")]
        parts += others
    return "\n\n".join(parts) + "\n"


def entry(rule: FindingRule, numbers: dict[str, int]) -> str:
    """Return the line of a finding: its title, and the number of what has to be known for it."""
    line = f"- [`{rule.id}`]({rule.id}.md): {rule.title[-1]}"
    if rule.needs.conditions or rule.needs.item:
        line += f" ({numbers.setdefault(rule.needs.said, len(numbers) + 1)})"
    return fill(line, "  ")


def pages() -> dict[str, str]:
    """Return file name -> text, one page per finding and an index."""
    made = {f"{rule.id}.md": page(rule) for rule in FINDINGS.values()}
    numbers: dict[str, int] = {}
    index = [
        "# Findings",
        "",
        "Made from `findings.toml` in `vllm_memprof/accounting/findings/` and `vllm_memprof/engines/*/` by",
        "`tests/support/write_findings_docs.py`. A report lists findings by severity, then by bytes.",
        'In a budget file, `fail_on = ["negative-kv"]` fails a run that has the finding, and a run on',
        "which it cannot be looked for. A number names the [condition](#looked-for-only-if).",
    ]
    for module, heading in SUBJECTS.items():
        rules = [rule for rule in FINDINGS.values() if f"/{module}.py::" in rule.source]
        index += ["", f"## {heading}", "", *(entry(rule, numbers) for rule in rules)]
    index += ["", "## Looked for only if", ""]
    index += [f"{number}. {said}" for said, number in numbers.items()]
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
