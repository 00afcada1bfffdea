"""Write ``docs/findings/*.md`` from the rules of the findings, each with an example.

python -m tests.support.write_findings_docs          rewrite the pages
python -m tests.support.write_findings_docs --check  exit status 1 when a page differs
"""

from __future__ import annotations

import io
import re
import sys
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import cleandoc
from pathlib import Path

from rich.console import Console

from tests.support.host_runs import write_hosts
from tests.support.mutations import figures_of, with_its_grant, workers
from tests.support.served import leaking
from tests.unit.accounting.builders import process, run_of, snapshot, span
from tests.unit.accounting.builders import recorded as recorded_run
from tests.unit.accounting.findings import test_every_finding as logs
from tests.unit.accounting.findings import test_fits_device as device
from tests.unit.accounting.findings import test_outside_torch as outside
from tests.unit.accounting.findings.test_cycles import updates
from tests.unit.accounting.test_empty_cache import at, call, phase, report_of
from tests.unit.accounting.test_requests import PROFILED_TOKENS, vision
from vllm_memprof.accounting import Report, build_report
from vllm_memprof.accounting.deployment import build_deployment
from vllm_memprof.accounting.findings.needs import NOTHING
from vllm_memprof.accounting.findings.registry import FindingRule
from vllm_memprof.accounting.findings.table import FINDINGS
from vllm_memprof.logs.to_record import read_log
from vllm_memprof.record.deployment import load_parts
from vllm_memprof.record.loader import HookState, Loss, load_run
from vllm_memprof.report.table import render_table
from vllm_memprof.units import MIB

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
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


@dataclass(frozen=True)
class Example:
    """Where a finding shows."""

    said: str
    reports: Callable[[], list[Report]]
    lines: str = ""  # of a log


def recorded(name: str) -> Example:
    """Return the run of a folder, or the starts of a log, of tests/data."""
    path = DATA / name
    said = f"`tests/data/{name}`"
    if path.is_dir():
        return Example(f"The run {said}", lambda: [build_report(load_run(path))])
    return Example(f"The log {said}", lambda: [build_report(run) for run in read_log(str(path))])


def lines_of(text: str) -> Example:
    """Return a log of a few lines."""

    def reports() -> list[Report]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "engine.log"
            path.write_text(text + "\n")
            return [build_report(run) for run in read_log(str(path))]

    return Example("A log with the lines", reports, text.strip())


def by_hand(report: Callable[[], Report]) -> Example:
    """Return readings that are written down by hand: no recorded run has the finding."""
    return Example("Readings written down by hand, as in the tests", lambda: [report()])


def _hook(state: str) -> Report:
    hook = HookState("worker.load_model", "weight_load", "required", state, "Worker.load_model")
    return build_report(run_of(replace(process([]), hooks={hook.hook: hook})))


def _blind() -> Report:
    loss = Loss(95_300_000_000, 412_900_000_000, 1204, "No space left on device")
    run = run_of(replace(process([]), losses=[loss]), start_t_ns=0)
    return build_report(run)


def _off_plan() -> Report:
    alloc = span("kv_cache_alloc", snapshot(allocated_bytes=0), snapshot(allocated_bytes=4 << 30))
    layers = {"type": "FullAttentionSpec", "layers": 4, "block_size": 128, "page_size_bytes": 2**18}
    plan = {"blocks": 1024, "block_size": 128, "planned_bytes": [1 << 30], "groups": [layers]}
    core = replace(process([], role="engine_core", roles=frozenset({"engine_core"})), kv_plan=plan)
    return build_report(run_of(process([alloc], {"kv_cache_bytes": 1 << 30}), core))


def _buffers() -> Report:
    given = ("mc2:0", 2 * 1024 * MIB, "HCCL_BUFFSIZE")
    return outside.report(outside.communicators(given), HCCL_BUFFSIZE="1024")


def _observed() -> Report:
    chain = ["vllm.platforms.cuda:CudaPlatformBase.get_current_memory_usage"]
    load = phase("weight_load", 10, at(10, 0, 0), at(90, 10, 10), 0)
    return report_of([load, call(20, (10, 74), (10, 10), 1, 0, chain=chain)])


def _flushed() -> Report:
    start = call(50, (10, 20), (10, 12), 0)
    left = at(205, 10, 78, npu_workspace_bytes=182 * MIB)
    return report_of([start, phase("flush_cache", 200, left, left, 1, detail={"success": True})])


def _hot() -> Report:
    calls = [call(200 + i, (10, 74), (10, 10), i, requests=2, in_step=True) for i in range(4)]
    return report_of(calls)


def _leak() -> Report:
    levels = [1000 + 240 * i for i in range(6)]
    spans = []
    for i in range(5):
        before, after = (at(1000 * (i + 1), level, level + 20) for level in levels[i : i + 2])
        spans.append(phase("weight_update", 1000 * (i + 1), before, after, i))
    return report_of(spans)


def _halved_peak() -> Report:
    run = recorded_run("recorded_023_tp2")
    halved = next(each for each in figures_of(run) if each.what == "figure peak_activation_bytes")
    figures = workers(halved.run)[0].figures
    granted = int(figures["kv_cache_bytes"] or 0) + int(figures["peak_activation_bytes"] or 0)
    return build_report(with_its_grant(halved, granted).run)


def _two_hosts() -> Report:
    env = recorded_run("recorded_023_tp2").info.env
    given = {"engine_version": "0.18.0", "env": {**env, "HCCL_BUFFSIZE": "400"}}
    with tempfile.TemporaryDirectory() as folder:
        return build_deployment(load_parts(write_hosts(Path(folder), second=given)))


EXAMPLES: dict[str, Example] = {
    "allocation-outside-torch": by_hand(lambda: outside.report(outside.start_up(gap=outside.LEAK))),
    "budget-halved": recorded("logs/vllm-project__vllm-ascend-14004.log"),
    "co-tenant": lines_of(logs.TABLE["co-tenant"].with_it),
    "communicator-buffers": by_hand(_buffers),
    "empty-cache-in-hot-path": by_hand(_hot),
    "empty-cache-refilled": by_hand(_hot),
    "flush-frees-nothing": by_hand(_flushed),
    "engine-term-off": Example(
        "The run `tests/data/recorded_023_tp2`, as if the engine of one rank had read half of its "
        "peak",
        lambda: [_halved_peak()],
    ),
    "engine-suggestion-wrong": recorded("logs/wtdcode__vllm-backport-34.log"),
    "equation-unbalanced": recorded("logs/two_methods_910b_tp2.md"),
    "fragmentation": recorded("logs/vllm-project__vllm-ascend-1617.log"),
    "gb-is-gib": recorded("logs/recorded_tp2_0.23.0.log"),
    "graph-estimate-high": recorded("logs/wtdcode__vllm-backport-34.log"),
    "graph-not-charged": recorded("graph_tp2"),
    "events-lost": by_hand(_blind),
    "growth-while-serving": by_hand(lambda: build_report(leaking())),
    "hosts-differ": Example(
        "The run `tests/data/recorded_023_tp2` as of two hosts, the second of another release",
        lambda: [_two_hosts()],
    ),
    "hook-never-called": by_hand(lambda: _hook("never_called")),
    "hook-not-bound": by_hand(lambda: _hook("missing")),
    "hook-overwritten": by_hand(lambda: _hook("overwritten")),
    "kv-allocation-off-plan": by_hand(_off_plan),
    "merge-not-profiled": by_hand(lambda: vision(PROFILED_TOKENS)),
    "mm-profile-over": by_hand(lambda: vision(PROFILED_TOKENS // 4, taken=512 * MIB)),
    "mm-profile-under": by_hand(lambda: vision(2 * PROFILED_TOKENS, taken=3072 * MIB)),
    "negative-kv": recorded("logs/vllm-project__vllm-ascend-9372.log"),
    "non-torch-read-after-empty-cache": recorded("graph_tp2"),
    "observation-empties-cache": by_hand(_observed),
    "out-of-memory": recorded("recorded_oom"),
    "rank-skew": recorded("skewed_tp2"),
    "requested-base-mistaken": recorded("logs/two_methods_910b_tp2.md"),
    "engine-suggestion-beyond-device": recorded("graph_tp2"),
    "kv-cache-beyond-device": by_hand(lambda: device.start_up(device.FITS_RELEASED + 1)),
    "reserved-peak-beyond-device": recorded("graph_tp2"),
    "spare-small": by_hand(lambda: device.start_up(device.FITS)),
    "reserved-grows-without-empty-cache": by_hand(lambda: updates(emptied=False)),
    "residue-per-cycle": by_hand(_leak),
    "request-pool-not-subtracted": recorded("logs/sglang_0.5.18_8b_eager.log"),
    "startup-refused": recorded("logs/pytorch__pytorch-175666.log"),
    "uncharged-persistent-torch": recorded("recorded_023_tp2"),
    **{
        name: lines_of(logs.TABLE[name].with_it)
        for name in (
            "allocator-config-conflict",
            "block-override-beyond-budget",
            "hybrid-concurrency",
            "kv-too-small",
            "static-share-too-small",
        )
    },
}


def sections_of(rule: FindingRule) -> dict[str, str]:
    """Return the sections of a rule's docstring, name -> Markdown."""
    parts = re.split(r"^([A-Z][a-z ]+):$", cleandoc(rule.explained), flags=re.MULTILINE)
    return {
        name: textwrap.dedent(body).strip()
        for name, body in zip(parts[1::2], parts[2::2], strict=True)
        if body.strip()
    }


def shown(rule: FindingRule, example: Example) -> str:
    """Return a finding as the terminal shows it.

    Raises:
        LookupError: the example does not have it.
    """
    for report in example.reports():
        found = [one for one in report.findings if one.id == rule.id]
        if found:
            out = io.StringIO()
            console = Console(file=out, width=96, no_color=True, _environ={})
            console.print(render_table(replace(report, findings=found)))
            lines = [line.rstrip() for line in out.getvalue().splitlines()]
            first = next(i for i, line in enumerate(lines) if f" {rule.id}" in line)
            last = next((i for i in range(first, len(lines)) if not lines[i]), len(lines))
            return "\n".join(lines[first:last])
    raise LookupError(f"{rule.id}: not in {example.said}")


def page(rule: FindingRule) -> str:
    severity = rule.severity
    if not isinstance(severity, str):
        severity = (severity.__doc__ or "").removeprefix("Return ").rstrip(".").replace("``", "")
    said = sections_of(rule)
    example = EXAMPLES[rule.id]
    parts = [f"# {rule.id}", textwrap.fill(f"{rule.title}.", 100)]
    parts.append(f"Severity: {severity}.")
    parts += [f"## {heading}\n\n{said[name]}" for name, heading in SECTIONS.items()]
    parts.append(f"Source: `{rule.source}`")
    parts.append(f"## Example\n\n{example.said}:")
    if example.lines:
        parts.append(f"```text\n{fold(example.lines)}\n```\n\ngives")
    parts.append(f"```text\n{shown(rule, example)}\n```")
    forbidden = (
        f'`fail_on = ["{rule.id}"]` fails a run that has the finding. It is looked for where '
        f"{rule.needs.said}"
    )
    if rule.needs is not NOTHING:
        forbidden += "; a rank of which that is not true fails as not judged"
    parts.append("## In a budget file\n\n" + textwrap.fill(f"{forbidden}.", 100))
    return "\n\n".join(parts) + "\n"


def fold(lines: str) -> str:
    """Return lines of a log, those over 96 characters folded."""
    return "\n".join(
        part for line in lines.splitlines() for part in textwrap.wrap(line, 96) or [""]
    )


def pages() -> dict[str, str]:
    """Return file name -> text, one page per finding and an index."""
    made = {f"{rule.id}.md": page(rule) for rule in FINDINGS.values()}
    index = [
        "# Findings",
        "",
        "Made from the rules of `vllm_memprof/accounting/findings/` and `vllm_memprof/engines/` by",
        "`tests/support/write_findings_docs.py`. A report lists findings by severity, then by bytes.",
    ]
    for module, heading in SUBJECTS.items():
        index += ["", f"## {heading}", ""]
        for rule in FINDINGS.values():
            if f"/{module}.py::" in rule.source:
                line = f"- [`{rule.id}`]({rule.id}.md): {rule.title}"
                index += textwrap.wrap(line, 100, subsequent_indent="  ", break_on_hyphens=False)
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
