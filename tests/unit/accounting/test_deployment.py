"""One report of the run folders of a deployment."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.host_runs import SOURCE, part, write_host, write_hosts
from tests.support.many_ranks import write_many_hosts
from vllm_memprof.accounting.build import build_report
from vllm_memprof.accounting.deployment.report import build_deployment
from vllm_memprof.accounting.model import Finding, RankReport, Report
from vllm_memprof.accounting.owners.skew import skew_by_owner
from vllm_memprof.check.limits import FIGURES, read_figure
from vllm_memprof.compare.diff import diff_reports
from vllm_memprof.record.codec import from_json, to_json
from vllm_memprof.record.deployment import load_parts
from vllm_memprof.record.loader import load_run
from vllm_memprof.report.documents.report import report_document, verdict
from vllm_memprof.report.plots import plots
from vllm_memprof.units import GIB


def two_hosts(tmp_path: Path, **how: Any) -> Report:
    return build_deployment(load_parts(write_hosts(tmp_path, **how)))


def prefill_and_decode(tmp_path: Path) -> Report:
    """Return a report of two groups; both say that their rank is TP0 of rank 0."""
    engine_core, *workers = sorted((SOURCE / "events").glob("*.jsonl"))
    folders = []
    for group, events in zip(("decode", "prefill"), workers, strict=True):
        place = part(group=group, nodes=None, node_rank=None, deployment="demo")
        given = {"id": group, "part": place}
        names = {"label": "TP0", "rank": 0, "tp_rank": 0}
        folder = tmp_path / group
        folders.append(
            write_host(folder, f"host-{group}", [engine_core, events], given, 0, 0, names)
        )
    return build_deployment(load_parts(folders))


def differing(report: Report) -> list[Finding]:
    return [each for each in report.findings if each.id == "hosts-differ"]


def figures(rank: RankReport) -> RankReport:
    """Return a rank without what a second host changes: its name and its times."""
    return replace(rank, host=None, phases=[], samples=[], growth=[])


def test_ranks_and_figures_are_those_of_one_host(tmp_path: Path) -> None:
    alone = build_report(load_run(SOURCE))
    apart = two_hosts(tmp_path)
    assert [rank.label for rank in apart.ranks] == ["TP0", "TP1"]
    assert [rank.host for rank in apart.ranks] == ["node-a", "node-b"]
    assert list(map(figures, apart.ranks)) == list(map(figures, alone.ranks))
    assert [each.id for each in apart.findings] == [each.id for each in alone.findings]
    assert all(rank.budget.residual_bytes == 0 for rank in apart.ranks)
    assert [each.phase for each in apart.not_measured] == [e.phase for e in alone.not_measured]


def test_the_plan_of_the_first_host_is_that_of_all_ranks(tmp_path: Path) -> None:
    report = two_hosts(tmp_path)
    assert report.ranks[1].kv.blocks is not None
    assert report.ranks[1].kv.blocks == report.ranks[0].kv.blocks
    assert report.ranks[1].kv.tokens == report.ranks[0].kv.tokens
    assert report.deployment is not None
    (core,) = report.deployment.cores
    grants = [rank.budget.engine_kv_cache_bytes for rank in report.ranks]
    assert core.granted_bytes == min(size for size in grants if size is not None)
    assert core.hosts == ["node-a", "node-b"]


def test_groups_have_budgets_of_their_own(tmp_path: Path) -> None:
    report = prefill_and_decode(tmp_path)
    assert [rank.label for rank in report.ranks] == ["prefill TP0", "decode TP0"]
    assert report.deployment is not None
    assert report.deployment.groups == ["prefill", "decode"]
    assert [core.group for core in report.deployment.cores] == ["decode", "prefill"]
    said = verdict(report)
    assert said.startswith("prefill: KV cache ")
    assert "; decode: KV cache " in said
    assert "the least of 2 ranks" not in said
    assert not [each for each in report.findings if each.id == "rank-skew"]
    names = [line.name for line in report_document(report, 100).head]
    assert [name for name in names if name.startswith("command")] == [
        "command, prefill",
        "command, decode",
    ]


def test_labels_that_two_hosts_have_begin_with_the_host(tmp_path: Path) -> None:
    engine_core, *workers = sorted((SOURCE / "events").glob("*.jsonl"))
    names = {"label": "TP0", "dp_rank": None}
    first = write_host(tmp_path / "a", "a", [engine_core, workers[0]], {"id": "1"}, 0, 0, names)
    second = write_host(tmp_path / "b", "b", [workers[1]], {"id": "2"}, 0, 0, names)
    labels = [rank.label for rank in build_deployment(load_parts([first, second])).ranks]
    assert len(set(labels)) == 2
    assert all("TP0" in label for label in labels)


def test_a_missing_host_is_in_the_head_and_the_end_is_not_known(tmp_path: Path) -> None:
    first, _ = write_hosts(tmp_path)
    report = build_deployment(load_parts([first, tmp_path / "nowhere"]))
    head = {(line.name, line.value) for line in report_document(report, 100).head}
    missing = sorted(value for name, value in head if name == "missing")
    assert missing[0] == "no run folder of node rank 1 of 2: its ranks are not in this report"
    assert missing[1].startswith(f"not read: {tmp_path / 'nowhere'} (")
    assert report.run.outcome == "truncated"


def test_a_failed_host_is_the_status_of_the_deployment(tmp_path: Path) -> None:
    told = {"status": "failed", "exit_code": 1, "exit_reason": "worker TP1 was killed by SIGKILL"}
    report = two_hosts(tmp_path, second=told)
    assert report.run.status == "failed"
    assert report.run.exit_reason == "node-b: worker TP1 was killed by SIGKILL"


def test_hosts_that_are_set_up_alike_do_not_differ(tmp_path: Path) -> None:
    command = json.loads((SOURCE / "run.json").read_text())["command"]
    own = ["--node-rank", "1", "--headless", "--master-addr=10.0.0.5", "--run-dir", "elsewhere"]
    env = json.loads((SOURCE / "run.json").read_text())["env"]
    same = {"command": [*command, *own], "env": {**env, "HCCL_IF_IP": "10.0.0.6"}}
    assert not differing(two_hosts(tmp_path, second=same))


def test_a_short_name_is_the_option(tmp_path: Path) -> None:
    command = json.loads((SOURCE / "run.json").read_text())["command"]
    short = ["-tp" if word == "--tensor-parallel-size" else word for word in command]
    assert short != command
    assert not differing(two_hosts(tmp_path, second={"command": short}))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"versions": {"cann": "8.5"}}, "cann: none on node-a, 8.5 on node-b"),
        ({"engine_version": "0.18.0"}, "engine: vllm-ascend 0.23.0 on node-a, vllm-ascend 0.18.0"),
        ({"env": {"HCCL_BUFFSIZE": "400"}}, "HCCL_BUFFSIZE: none on node-a, 400 on node-b"),
        ({"env": {"ASCEND_HOME_PATH": "/opt/cann/9"}}, "/opt/cann/9 on node-b"),
        ({"command": ["memprof", "serve", "m", "--max-num-seqs=9"]}, "9 on node-b"),
    ],
)
def test_what_differs_between_hosts_is_named(
    tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    (found,) = differing(two_hosts(tmp_path, second=changed))
    assert said in found.evidence
    assert found.severity == "warning"
    assert found.rank is None


def test_a_secret_that_differs_stays_one(tmp_path: Path) -> None:
    command = ["memprof", "serve", "m", "--some-api-key", "sk-1234567890abcdef1234567890abcdef"]
    found = differing(two_hosts(tmp_path, second={"command": command}))
    assert "1234567890abcdef" not in found[0].evidence


def test_groups_are_not_compared_with_each_other(tmp_path: Path) -> None:
    assert not differing(prefill_and_decode(tmp_path))


def test_the_owner_that_makes_ranks_differ(tmp_path: Path) -> None:
    first, second = write_hosts(tmp_path)
    for path in (second / "events").iterdir():
        events = [json.loads(line) for line in path.read_text().splitlines()]
        for event in events:
            taken = event.get("snapshot") or {}
            if taken.get("other_processes_bytes") is not None:
                taken["other_processes_bytes"] += GIB
                taken["other_processes"] = {"77": GIB} | (taken.get("other_processes") or {})
            if taken.get("device_free_bytes") is not None:
                taken["device_free_bytes"] -= GIB
                if taken.get("non_torch_bytes") is not None:
                    taken["non_torch_bytes"] += GIB
        path.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    largest = skew_by_owner(build_deployment(load_parts([first, second])))[0]
    assert largest.owner == "neighbours"
    assert (largest.least_label, largest.most_label) == ("TP0", "TP1")
    assert largest.most - largest.least == pytest.approx(GIB, rel=0.01)
    assert largest.between_hosts == largest.most - largest.least


def test_report_json_is_read_again(tmp_path: Path) -> None:
    report = two_hosts(tmp_path)
    again = from_json(Report, json.loads(json.dumps(to_json(report))))
    assert again.deployment == report.deployment
    assert report_document(again, 100).sections == report_document(report, 100).sections


def test_plots_compare_ranks_within_their_group(tmp_path: Path) -> None:
    report = prefill_and_decode(tmp_path)
    doubled = [
        replace(rank, label=f"{rank.label} again", device_total_bytes=rank.device_total_bytes)
        for rank in report.ranks
        if rank.group == "prefill"
    ]
    rows = plots(replace(report, ranks=[*report.ranks, *doubled])).skew
    assert rows
    assert all(row.title.startswith("prefill: ") for row in rows)
    assert all(len(row.bytes) == 3 and row.bytes[1] is None for row in rows)


def test_a_diff_explains_the_first_group_and_says_so(tmp_path: Path) -> None:
    report = prefill_and_decode(tmp_path)
    found = diff_reports(report, report)
    assert found.served is not None
    assert found.served.a_label == "prefill TP0"
    assert any("a budget of its own" in note for note in found.notes)
    assert [rank.a_label for rank in found.ranks] == ["prefill TP0", "decode TP0"]


def test_a_limit_on_skew_compares_ranks_within_their_group(tmp_path: Path) -> None:
    report = prefill_and_decode(tmp_path)
    assert [reading.value for reading in read_figure(report, FIGURES["rank_skew"])] == [0, 0]


def test_many_hosts_are_a_row_each_and_outliers_alone(tmp_path: Path) -> None:
    folder = write_many_hosts(tmp_path, hosts=18, ranks=1)
    report = build_deployment(load_parts(sorted(folder.iterdir())))
    tables = {str(table.title): table for table in report_document(report, 100).sections}
    hosts = tables["Hosts, the one with the least headroom first"]
    assert len(hosts.rows) == 16
    assert "2 more in report.json" in hosts.notes
    seconds = tables["Seconds by host and phase"]
    assert len(seconds.rows) == 17  # and the row that names the slowest
    assert seconds.rows[-1].cells[0] == "slowest"
    assert report.deployment is not None
    assert len(report.deployment.cores) == 18
