"""Proposed budget files pass their own run; the ratchet never loosens, and changes limits alone."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.accounting.builders import DATA, recorded
from vllm_memprof.accounting import Report, build_report
from vllm_memprof.accounting.model import HostMemory, HostOwner
from vllm_memprof.check.budget_file import parse_budget
from vllm_memprof.check.limits import BUDGET, KEYS, TOKENS
from vllm_memprof.check.outcomes import check_report
from vllm_memprof.check.ratchet import Margin, propose_budget, tighten_budget
from vllm_memprof.errors import UsageError
from vllm_memprof.logs.to_record import read_log

DEFAULT = Margin(Fraction(1, 100))
EXACT = Margin(Fraction(0), least=False)
RUNS = [
    "graph_tp2",
    "eager_tp2",
    "plan_tp2",
    "skewed_tp2",
    "recorded_tp1",
    "recorded_tp2",
    "recorded_013_tp2",
]
LOGS = ["recorded_tp2_0.23.0.log"]


def report_of(name: str) -> Report:
    if name in LOGS:
        return build_report(read_log(str(DATA / "logs" / name))[0])
    return build_report(recorded(name))


REPORT = report_of("skewed_tp2")
LIMITS = [key for key in KEYS if key.table == BUDGET]


@pytest.mark.parametrize("name", [*RUNS, *LOGS])
@pytest.mark.parametrize(
    "margin", [DEFAULT, EXACT, Margin(Fraction(1, 3), least=False)], ids=lambda m: str(m.percent)
)
def test_a_run_keeps_the_budget_that_it_proposes(name: str, margin: Margin) -> None:
    report = report_of(name)
    text = propose_budget(report, margin)
    result = check_report(report, parse_budget(text, "b.toml"))
    assert result.ok, text
    named = re.findall(
        r"^#? ?(\w+)(?: =|: not measured|: -[\d,]+ bytes in the run, below any limit)",
        text,
        re.MULTILINE,
    )
    assert named[: len(LIMITS)] == [key.name for key in LIMITS]


@pytest.mark.parametrize("name", [*RUNS, *LOGS])
def test_an_exact_proposal_has_no_room(name: str) -> None:
    report = report_of(name)
    result = check_report(report, parse_budget(propose_budget(report, EXACT), "b.toml"))
    for outcome in result.limits:
        if outcome.table == BUDGET and outcome.sense:
            assert min(row.margin or 0 for row in outcome.readings) == 0, outcome.key


def test_the_stated_margin_is_kept() -> None:
    """1% of the figure or 16 MiB, and what rounding to two digits of a GiB adds at most."""
    result = check_report(REPORT, parse_budget(propose_budget(REPORT, DEFAULT), "b.toml"))
    for outcome in result.limits:
        if outcome.table == BUDGET and outcome.sense:
            worst = min(outcome.readings, key=lambda row: row.margin or 0)
            assert worst.value is not None
            assert worst.margin is not None
            floor = (
                0
                if outcome.key in ("max_weights", "max_peak_activation", "min_kv_cache_tokens")
                else 16 << 20
            )
            room = max(worst.value / 100, floor)
            rounding = 1 if outcome.unit == TOKENS else (1 << 30) / 100
            assert room - 1 <= worst.margin <= room + rounding + 1, outcome.key


def test_findings_that_the_run_has_are_not_forbidden() -> None:
    text = propose_budget(report_of("graph_tp2"), DEFAULT)
    assert '"reserved-peak-beyond-device"' not in text
    assert '"equation-unbalanced"' in text


def test_a_name_cannot_leave_its_comment() -> None:
    nasty = replace(
        REPORT,
        run=replace(REPORT.run, model='x\n[budget]\nmax_graph = 1\x00"', device="a\rb\u2028c"),
    )
    assert len(parse_budget(propose_budget(nasty, DEFAULT), "b.toml").limits) == 6


def test_a_run_without_figures_proposes_nothing() -> None:
    with pytest.raises(UsageError, match="no figure"):
        propose_budget(replace(REPORT, ranks=[]), DEFAULT)


FILE = """# kept: why these limits are what they are
[budget]    # kept
# kept above
min_kv_cache   =   "40GiB"   # kept behind, 保留
max_graph = "512MiB"
max_weights = 10_000_000_000
max_non_torch = "0.5GiB"
max_rank_skew = "1%"

fail_on = [
    "co-tenant",  # kept in a list
]

[regression]
max_kv_cache_drop = "1%"  # kept
"""


def test_the_ratchet_keeps_comments_order_and_the_rest() -> None:
    turned, remarks = tighten_budget(FILE, "b.toml", REPORT, DEFAULT)
    before, after = FILE.splitlines(), turned.splitlines()
    assert len(before) == len(after)
    assert [i for i, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]] == [
        3,
        5,
    ]
    assert after[3] == 'min_kv_cache   =   "43.61GiB"   # kept behind, 保留'
    assert after[5] == 'max_weights = "9.29GiB"'
    assert remarks == [
        "min_kv_cache tightened: 40GiB → 43.61GiB",
        "max_graph stays: not measured (graph_capture: eager mode)",
        "max_weights tightened: 10,000,000,000 → 9.29GiB",
    ]


def test_percentages_and_regressions_are_not_touched() -> None:
    turned, _ = tighten_budget(FILE, "b.toml", REPORT, EXACT, force=True)
    before, after = FILE.splitlines(), turned.splitlines()
    assert [i for i, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]] == [
        3,
        5,
        6,
    ]


def test_a_second_turn_changes_nothing() -> None:
    once, _ = tighten_budget(FILE, "b.toml", REPORT, DEFAULT)
    assert tighten_budget(once, "b.toml", REPORT, DEFAULT)[0] == once


def test_a_limit_that_the_run_breaks_stays() -> None:
    turned, _ = tighten_budget("[budget]\nmax_non_torch = '0.5GiB'\n", "b.toml", REPORT, DEFAULT)
    assert turned == "[budget]\nmax_non_torch = '0.5GiB'\n"
    loosened, remarks = tighten_budget(
        "[budget]\nmax_non_torch = '0.5GiB'\n", "b.toml", REPORT, DEFAULT, force=True
    )
    assert remarks == ["max_non_torch loosened: 0.5GiB → 845.5MiB"]
    assert check_report(REPORT, parse_budget(loosened, "b.toml")).ok


@pytest.mark.parametrize(
    "text",
    [
        "[budget]\r\nmin_kv_cache = 1 # a\r\nmax_weights = '10GiB'\r\n",
        "budget = {min_kv_cache = 1, max_weights = '10GiB'}\n",
        "budget.min_kv_cache = 1\nbudget.max_weights = '10GiB'\n",
        "[ 'budget' ]\n'min_kv_cache' = 1\n\"max_weights\" = '10GiB'",
        "[budget]\nmin_kv_cache = 0x1\nmax_weights = '''10GiB'''",
    ],
)
def test_other_ways_to_write_the_same(text: str) -> None:
    turned, _ = tighten_budget(text, "b.toml", REPORT, EXACT)
    limits = {limit.key.name: limit.amount for limit in parse_budget(turned, "b.toml").limits}
    assert limits == {"min_kv_cache": 47_303_029_760, "max_weights": 9_872_841_216}
    assert turned.count("\r") == text.count("\r")


def _entries() -> st.SearchStrategy[dict[str, int | str]]:
    sizes = st.one_of(
        st.integers(0, 1 << 40),
        st.builds("{}.{:02d}GiB".format, st.integers(0, 60), st.integers(0, 99)),
        st.builds("{}MiB".format, st.integers(0, 60_000)),
    )
    values = {
        key.name: st.integers(0, 10**7) if key.figure.unit == TOKENS else sizes for key in LIMITS
    }
    return st.fixed_dictionaries({}, optional=values).filter(bool)


@given(_entries(), st.fractions(0, 1, max_denominator=1000), st.booleans())
def test_the_ratchet_never_loosens(
    entries: dict[str, int | str], percent: Fraction, least: bool
) -> None:
    lines = [
        f"{name} = {value if isinstance(value, int) else repr(value)}  # {name}"
        for name, value in entries.items()
    ]
    text = "\n".join(["# head", "[budget]", *lines]) + "\n"
    turned, _ = tighten_budget(text, "b.toml", REPORT, Margin(percent, least))
    before, after = (parse_budget(each, "b.toml").limits for each in (text, turned))
    kept = check_report(REPORT, parse_budget(text, "b.toml")).limits
    now = check_report(REPORT, parse_budget(turned, "b.toml")).limits
    assert [limit.key for limit in before] == [limit.key for limit in after]
    for old, new in zip(before, after, strict=True):
        assert old.amount is not None
        assert new.amount is not None
        assert (
            new.amount >= old.amount
            if old.key.name.startswith("min_")
            else new.amount <= old.amount
        )
    assert [outcome.ok for outcome in kept] == [outcome.ok for outcome in now]
    strip = re.compile(r"= .*?  #")
    assert strip.sub("", turned) == strip.sub("", text)


@given(_entries(), st.fractions(0, 1, max_denominator=1000))
def test_a_forced_turn_is_met_by_its_run(entries: dict[str, int | str], percent: Fraction) -> None:
    lines = [
        f"{name} = {value if isinstance(value, int) else repr(value)}"
        for name, value in entries.items()
    ]
    report = report_of_known()
    turned, _ = tighten_budget(
        "\n".join(["[budget]", *lines]), "b.toml", report, Margin(percent), force=True
    )
    assert check_report(report, parse_budget(turned, "b.toml")).ok


def report_of_known(cache: dict[str, Report] = {}) -> Report:  # noqa: B006
    """A run in which every figure is known, and something is spare."""
    if not cache:
        report = report_of("recorded_023_tp2")
        host = HostMemory([HostOwner("rest", 5), HostOwner("pinned:x", 3), HostOwner("shm:x", 2)])
        ranks = [replace(rank, host_memory=host) for rank in report.ranks]
        cache["recorded_023_tp2"] = replace(report, ranks=ranks)
    return cache["recorded_023_tp2"]


def test_no_limit_is_made_of_what_is_below_zero() -> None:
    """graph_tp2 has nothing to spare: no limit of 0 or more is met by it."""
    report = report_of("graph_tp2")
    assert "# min_headroom: -4,219,664,384 bytes in the run, below any limit" in propose_budget(
        report, DEFAULT
    )
    text = '[budget]\nmin_headroom = "5GiB"\n'
    turned, remarks = tighten_budget(text, "b.toml", report, DEFAULT, force=True)
    assert turned == text
    assert remarks == ["min_headroom stays: -4,219,664,384 bytes in the run, below any limit"]


def test_the_committed_files_are_read() -> None:
    for path in [
        *(DATA / "budgets").glob("*.toml"),
        *(Path(__file__).parents[2] / "budgets").glob("*.toml"),
    ]:
        assert parse_budget(path.read_text(), path.name).limits
