"""Each reported log against its row in ``reported_figures.json``: the figures themselves, and what
they imply.

The rows are as they were collected from public threads, in GiB where the key names no unit. A row
may hold more than its log prints; what a log does not print has to stay unknown.
"""

from __future__ import annotations

import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from vllm_memprof.accounting import Report, build_report
from vllm_memprof.logs.to_record import read_log

DATA = Path(__file__).parents[2] / "data" / "logs"
ROWS = {row["src"]: row for row in json.loads((DATA / "reported_figures.json").read_text())}
GIB, MIB = 1 << 30, 1 << 20

#: Key of a row -> (figure of the log, unit in bytes; 1 for counts and ratios).
KEYS: dict[str, tuple[str, int]] = {
    "total": ("device_total_bytes", GIB),
    "free": ("initial_free_bytes", GIB),
    "util": ("gpu_memory_utilization", 1),
    "req": ("requested_bytes", GIB),
    "w": ("weights_bytes", GIB),
    "w_gb": ("weights_bytes", GIB),
    "nt": ("non_torch_increase_bytes", GIB),
    "act": ("peak_activation_bytes", GIB),
    "consumed": ("consumed_bytes", GIB),
    "nonkv": ("non_kv_cache_bytes", GIB),
    "kv": ("kv_cache_bytes", GIB),
    "graph": ("graph_bytes", GIB),
    "graph_est": ("graph_estimate_bytes", GIB),
    "diff": ("graph_difference_bytes", GIB),
    "b1": ("suggested_requested_bytes", 1),
    "g1": ("suggested_requested_printed_bytes", GIB),
    "b2": ("suggested_limit_bytes", 1),
    "g2": ("suggested_limit_printed_bytes", GIB),
    "equiv": ("equivalent_utilization", 1),
    "sugg": ("suggested_utilization", 1),
    "tokens": ("tokens", 1),
    "mml": ("max_model_len", 1),
    "conc": ("max_concurrency", 1),
    "blocks": ("blocks", 1),
    "oom_mib": ("oom_requested_bytes", MIB),
    "oom_total": ("oom_device_total_bytes", GIB),
    "oom_free_mib": ("oom_free_bytes", MIB),
}
#: The same keys in rows of other kinds.
OF_OOM = {
    "req": "oom_requested_bytes",
    "total": "oom_device_total_bytes",
    "alloc": "oom_allocated_bytes",
    "active": "oom_active_bytes",
    "free_s": "oom_free_bytes",
    "free": "oom_free_bytes",
    "reserved": "oom_reserved_bytes",
}
OF_E6 = {"act": "printed_peak_activation_bytes"}
#: Not figures of a log: what a person expected, and shares that follow from the rest.
ASIDE = {"kv_expected", "other_process_mb", "tp", "diff_pct"}
#: Kind of row -> what its equation subtracts from "req".
SUBTRACTED = {"v0": ("w", "nt", "act"), "gpuB": ("consumed", "act")}
UNITS = {"GiB": GIB, "MiB": MIB}


def source(path: Path) -> str:
    """``owner__name-12.log`` is ``owner/name#12``."""
    owner, rest = path.stem.split("__")
    name, _, number = rest.rpartition("-")
    return f"{owner}/{name}#{number}"


CASES = {path.name: ROWS[source(path)] for path in sorted(DATA.glob("*__*.log"))}


def starts(name: str) -> list[tuple[str, Report, dict[str, Any]]]:
    """(text, report, figures with those of the KV plan) of each row of figures: a start, or a rank
    of one.
    """
    lines = (DATA / name).read_text().splitlines()
    found = []
    for run in read_log(str(DATA / name)):
        plan = next((process.kv_plan for process in run.processes if process.kv_plan), {})
        report = build_report(run)
        span = re.search(r"lines? (\d+)(?: to (\d+))?", " ".join(run.info.notes))
        assert span is not None
        text = "\n".join(lines[int(span[1]) - 1 : int(span[2] or span[1])])
        workers = [process for process in run.processes if process.is_worker]
        for rank, process in zip(report.ranks, workers, strict=True):
            named = {"device": rank.oom and rank.oom.device, "label": rank.label}
            found.append((text, report, {**plan, **process.figures, **named}))
    return found


def wanted(kind: str, key: str, value: Any) -> tuple[str, int | Fraction]:
    """(figure, value in bytes or as it is) of one entry of a row."""
    figure, unit = KEYS.get(key, ("", GIB))
    figure = (
        OF_OOM.get(key, figure)
        if kind == "oom"
        else OF_E6.get(key, figure)
        if kind == "gpuB"
        else figure
    )
    assert figure, f"no figure for {key}"
    if isinstance(value, str):
        number, name = value.split()
        return figure, round(Fraction(number) * UNITS[name])
    exact = Fraction(str(value))
    return figure, round(exact * unit) if unit > 1 else exact


def printed(text: str, value: Any) -> bool:
    """Whether a log prints a number, with or without thousands separated, with or without its last
    zeros.
    """
    number = value.split()[0] if isinstance(value, str) else f"{value:,}"
    plain = number.replace(",", "")
    whole, dot, digits = plain.partition(".")
    pattern = f"{whole}(?:\\.{digits}0*)" if dot else f"(?:{number}|{plain})(?:\\.0*)?"
    return re.search(rf"(?<![\d.,]){pattern}(?![\d])", text) is not None


def test_every_log_has_a_row() -> None:
    assert len(CASES) == 17


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_log_gives_the_figures_of_its_row(name: str) -> None:
    row = CASES[name]
    found = starts(name)
    assert len(found) == len(row["figs"])
    compared = 0
    for (text, _, figures), figs in zip(found, row["figs"], strict=True):
        for key, value in figs.items():
            if key in ASIDE or value is None:
                continue
            if key == "dev":
                device = str(value).split()[-1]
                assert device in text
                if row["style"] == "oom":
                    assert figures["device"] == device
                continue
            if key == "rank":
                assert figures["label"] == value
                continue
            if row["style"] == "oom" and key == "free":
                continue  # "free_s" is the number that was printed
            figure, amount = wanted(row["style"], key, value)
            if printed(text, value):
                assert figures[figure] == (
                    float(amount) if isinstance(amount, Fraction) else amount
                ), key
                compared += 1
            else:
                assert figures.get(figure) is None, key
    assert compared


@pytest.mark.parametrize(
    "name", sorted(name for name, row in CASES.items() if row["style"] in SUBTRACTED)
)
def test_the_residual_is_the_one_that_the_row_implies(name: str) -> None:
    """KV cache - (requested - what the equation subtracts), from the row's own digits."""
    row = CASES[name]
    names = SUBTRACTED[row["style"]]
    for (text, report, _), figs in zip(starts(name), row["figs"], strict=True):
        budget = report.ranks[0].budget
        if figs.get("kv") is None or not all(printed(text, figs[key]) for key in ("req", *names)):
            assert budget.residual_bytes is None
            continue
        implied = Fraction(str(figs["kv"])) - Fraction(str(figs["req"]))
        implied += sum(Fraction(str(figs[key])) for key in names)
        assert budget.residual_bytes is not None
        assert (
            abs(budget.residual_bytes - implied * GIB) <= len(names) + 2
        )  # each figure is whole bytes
        assert budget.balanced


def test_rows_that_are_here_because_the_engine_is_wrong_have_their_finding() -> None:
    """vllm-ascend#14004 doubles as a co-tenant only with its DEBUG lines; the others say it in one
    line.
    """
    expected = {
        "wtdcode/vllm-backport#34": "engine-suggestion-wrong",
        "vllm-project/vllm-ascend#9372": "negative-kv",
        "vllm-project/vllm-ascend#19": "out-of-memory",
        "vllm-project/vllm-ascend#1617": "fragmentation",
        "vllm-project/vllm-ascend#14004": "budget-halved",
        "pytorch/pytorch#175666": "startup-refused",
        "vllm-project/vllm-omni#276": "startup-refused",
    }
    for name, row in CASES.items():
        if row["src"] in expected:
            ids = {finding.id for _, report, _ in starts(name) for finding in report.findings}
            assert expected[row["src"]] in ids, row["src"]


def test_a_neighbour_that_310p_charges_is_priced_as_its_row_says(tmp_path: Path) -> None:
    """vllm-ascend#14004 from the row's own figures: (21.62 - 1.71) / 2 = 9.955 GiB without the
    neighbour.
    """
    (figs,) = ROWS["vllm-project/vllm-ascend#14004"]["figs"]
    path = tmp_path / "engine.log"
    path.write_text(
        f"DEBUG [gpu_worker.py:1] Initial free memory: {figs['free']} GiB; Requested memory: "
        f"{figs['util']:.2f} "
        f"(util), {figs['req']} GiB\n"
        f"DEBUG [worker_310p.py:1] Memory profiling takes 1.00 seconds. Total non KV cache "
        f"memory: {figs['nonkv']}GiB; "
        "torch peak memory increase: 0.30GiB; non-torch forward increase memory: 0.21GiB; weights "
        "memory: 1.20GiB.\n"
        f"INFO [worker_310p.py:1] Available KV cache memory: {figs['kv']} GiB (halved for "
        f"workspace)\n"
    )
    (run,) = read_log(str(path))
    found = next(finding for finding in build_report(run).findings if finding.id == "co-tenant")
    cost = Fraction(found.bytes or 0) / 2 / GIB + Fraction(str(figs["kv"]))
    assert abs(cost - Fraction(str(figs["kv_expected"]))) <= Fraction("0.011")


def test_the_suggestion_below_zero_of_its_row(tmp_path: Path) -> None:
    """vllm#57936: 164.08 - 58.44 - 62.33 - 63.99 - 0.15 = -20.83, and 36.62 without the graphs that
    count twice.
    """
    (figs,) = ROWS["vllm-project/vllm#57936"]["figs"]
    size = round(Fraction(str(figs["fit_printed"])) * GIB)
    path = tmp_path / "engine.log"
    path.write_text(
        f"INFO [gpu_worker.py:1] Free memory on device ({figs['free']}/178.35 GiB) on startup. "
        f"Desired GPU memory "
        f"utilization is (0.92, {figs['req']} GiB). Actual usage is {figs['consumed']} GiB for "
        f"consumed memory "
        f"(weights + non-torch), {figs['peak_act_printed']} GiB for peak activation, and "
        f"{figs['graph_actual']} GiB for CUDAGraph memory. Replace gpu_memory_utilization config "
        f"with "
        f"`--kv-cache-memory={size}` ({figs['fit_printed']} GiB) to fit into requested memory.\n"
        f"INFO [gpu_worker.py:1] CUDA graph pool memory: {figs['graph_actual']} GiB (actual), "
        f"{figs['graph_est']} GiB "
        "(estimated), difference: 6.54 GiB (10.2%).\n"
    )
    (run,) = read_log(str(path))
    report = build_report(run)
    found = next(finding for finding in report.findings if finding.id == "engine-suggestion-wrong")
    assert f"({figs['fit_correct']:.2f} GiB)" in found.action
    headroom = report.ranks[0].budget.term("transient_headroom")
    assert headroom is not None
    assert f"{headroom / GIB:.2f}" == f"{figs['transient']:.2f}"
