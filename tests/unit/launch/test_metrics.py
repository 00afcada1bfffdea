"""Metrics: scraped over HTTP and read with prometheus_client's own parser."""

from __future__ import annotations

import json
import re
import socket
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.launch.test_status import GIB, budgets, event, sample_core, served
from vllm_memprof.errors import MemprofError, UsageError
from vllm_memprof.launch.metrics import LABELS, METRICS, Exporter, clean_label
from vllm_memprof.launch.progress import GrowingOwner, RankBudget

DASHBOARD = Path(__file__).parents[3] / "docs" / "grafana" / "memprof.json"
EXPORTED = [metric.name for metric in METRICS]
PAGE = Path(__file__).parents[3] / "docs" / "concepts" / "live.md"
#: What may stand in an expression beside metrics and labels.
FUNCTIONS = {"min", "max", "sum", "rate", "time", "by", "increase", "label_values"}


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    made = Exporter("127.0.0.1", 0)
    yield made
    made.close()


def scrape(exporter: Exporter) -> dict[tuple[str, tuple[str, ...]], float]:
    """Return value by name and label values, these in the order of the labels' names."""
    from prometheus_client.parser import text_string_to_metric_families

    text = scraped_text(exporter)
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scraped_text(exporter: Exporter) -> str:
    with urllib.request.urlopen(exporter.url, timeout=10) as answer:
        return str(answer.read().decode())


def test_before_any_event_there_is_no_sample(exporter: Exporter) -> None:
    assert scrape(exporter) == {}


def test_a_run_that_serves(exporter: Exporter) -> None:
    progress = served()
    sample_core(progress, 60)
    owners = {"allocated": 50 * GIB, "unexplained": -5}
    progress.serve([RankBudget("TP0", 10, 41 * GIB, 39 * GIB, 45 * GIB, 5 * GIB, owners),
                    *budgets(None, None)[1:]])  # fmt: skip
    exporter.update(progress)
    found = scrape(exporter)
    assert found["memprof_reserved_bytes", ("TP0",)] == 50 * GIB
    assert found["memprof_reserved_bytes", ("TP1",)] == 51 * GIB
    assert found["memprof_kv_cache_granted_bytes", ("TP0",)] == 41 * GIB
    assert found["memprof_kv_cache_fits_request_bytes", ("TP0",)] == 39 * GIB
    assert found["memprof_kv_cache_fits_device_bytes", ("TP0",)] == 45 * GIB
    assert found["memprof_headroom_bytes", ("TP0",)] == 5 * GIB
    assert ("memprof_headroom_bytes", ("TP1",)) not in found  # unknown is no sample, never a 0
    assert found["memprof_owner_bytes", ("unexplained", "TP0")] == -5
    assert found["memprof_requests_running", ()] == 2
    assert found["memprof_kv_cache_used_bytes", ()] == 10 * GIB
    assert found["memprof_samples_total", ()] == 1
    assert found["memprof_events_lost_total", ()] == 0
    assert {name for name, _ in found} <= set(EXPORTED)
    # every metric is had from some run: the rest are readings that this one lacks
    progress.fold("w0", event("device_sample", 61, device_total_bytes=61 * GIB, host_rss_bytes=7,
                              device_free_bytes=GIB, non_torch_bytes=GIB))  # fmt: skip
    progress.fold("w0", event("sample", 61, allocated_bytes=5, allocated_run_peak_bytes=6))
    grows = (GrowingOwner("allocated", 12.5 * (1 << 20), 30.0),)
    serving = replace(
        budgets(5 * GIB)[0], owners=owners, growth=grows, host={"rest": 7}, kv_usable_tokens=8064
    )
    progress.serve([serving])
    exporter.update(progress)
    assert {name for name, _ in scrape(exporter)} == set(EXPORTED)


@pytest.mark.parametrize("modelled", [True, False])
def test_a_simulated_device_is_said_to_be_one(modelled: bool) -> None:
    exporter = Exporter("127.0.0.1", 0, modelled)
    try:
        exporter.update(served())
        assert scrape(exporter)["memprof_simulated", ()] == modelled
    finally:
        exporter.close()


def test_the_page_has_every_metric_with_its_labels_and_its_help() -> None:
    rows = [
        f"| `{each.name}` | {', '.join(LABELS[each.kind])} | {each.help} |".replace("|  |", "| |")
        for each in METRICS
    ]
    page = PAGE.read_text()
    assert [row for row in rows if row not in page] == []
    assert page.count("| `memprof_") == len(rows)


def test_ranks_of_replicas_with_one_name_stay_apart(exporter: Exporter) -> None:
    progress = served()
    progress.fold("w1", event("identity", 0, role="worker", rank=0, label="TP0"))
    exporter.update(progress)
    ranks = {labels for name, labels in scrape(exporter) if name == "memprof_reserved_bytes"}
    assert ranks == {("TP0 pid 10",), ("TP0 pid 11",)}


HOSTILE = '/home/me/secret"model\\n\n{x="1"} sk-abcdefghijklmnopqrstuvwxyz012345'


def test_no_label_holds_what_a_user_typed(exporter: Exporter) -> None:
    """Also where an event carries it: a label is made of plain characters, and is short."""
    progress = served()
    progress.fold("w0", event("process", 0, pid=10, role="worker", argv=["vllm", HOSTILE]))
    progress.fold("w0", event("error", 1, where=HOSTILE, message=HOSTILE))
    progress.fold("core", event("request", 1, edge="begin", id=HOSTILE))
    progress.fold("w0", event("lost", 1, reason=HOSTILE, until_t_ns=None))
    progress.fold("w0", event("phase", 1, phase=HOSTILE, edge="before", id=9, snapshot=None))
    progress.serve(budgets(GIB, GIB))
    exporter.update(progress)
    text = scraped_text(exporter)
    assert "memprof_reserved_bytes" in text
    for piece in ("secret", "home", "sk-", "x="):
        assert piece not in text
    assert re.fullmatch(r"[\w .:-]{0,60}", clean_label(HOSTILE))
    assert "/" not in clean_label(HOSTILE)


def test_a_port_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"--metrics-port {port}: cannot listen") as caught:
            Exporter("127.0.0.1", port)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("port", [-1, 70000])
def test_a_port_that_is_none(port: int) -> None:
    with pytest.raises(UsageError, match=f"--metrics-port {port}"):
        Exporter("127.0.0.1", port)


def test_without_the_package_the_command_to_install_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MemprofError, match="needs prometheus_client") as caught:
        Exporter("127.0.0.1", 0)
    assert caught.value.hint == f"{sys.executable} -m pip install prometheus_client"


def expressions(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("expr", "query", "definition") and isinstance(value, str):
                if value != "prometheus":  # the kind of the data source
                    yield value
            else:
                yield from expressions(value)
    elif isinstance(node, list):
        for value in node:
            yield from expressions(value)


def unknown_words(expression: str) -> list[str]:
    """Return what is no metric of the exporter, no label of it, no function; [] where all is."""
    labels = {each.name: set(LABELS[each.kind]) for each in METRICS}
    used = [name for name in re.findall(r"[a-zA-Z_:][\w:]*", expression) if name in labels]
    of_label = set().union(*(labels[name] for name in used)) if used else set()
    bare = re.sub(r'"[^"]*"|\$\w+|\[[^\]]*\]', "", expression)
    words = re.findall(r"[a-zA-Z_:][\w:]*", bare)
    return [word for word in words if word not in {*labels, *of_label, *FUNCTIONS}] + (
        [] if used else [expression]
    )


def test_every_expression_of_the_dashboard_is_of_metrics_that_there_are() -> None:
    found = list(expressions(json.loads(DASHBOARD.read_text())))
    assert len(found) >= 10
    assert {each: unknown_words(each) for each in found if unknown_words(each)} == {}
    shown = {name for each in found for name in re.findall(r"memprof_\w+", each)}
    assert set(EXPORTED) - shown == {"memprof_samples_total", "memprof_simulated"}


def test_the_check_of_expressions_can_fail() -> None:
    assert unknown_words("memprof_headroom_bytes") == []
    assert unknown_words('min by (rank) (memprof_headroom_bytes{rank="$rank"})') == []
    assert unknown_words("memprof_headroom") == ["memprof_headroom", "memprof_headroom"]
    assert unknown_words("min by (owner) (memprof_headroom_bytes)") == ["owner"]
    assert unknown_words("irate(memprof_headroom_bytes[5m])") == ["irate"]
