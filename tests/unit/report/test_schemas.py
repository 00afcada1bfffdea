"""The published JSON Schemas: what memprof writes obeys them, they refuse what is wrong, and they name every key."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Any

import jsonschema
import pytest

from tests.golden.update import CHECKS, DIFFS
from tests.support.many_ranks import write_many_ranks
from tests.support.render import render_json
from tests.support.runs import LOGS, RUNS, check_result, diff_of, oom_report
from tests.unit.accounting.builders import recorded
from vllm_memprof.accounting import build_report
from vllm_memprof.logs.to_record import read_log
from vllm_memprof.record.loader import load_run
from vllm_memprof.report.json_text import render_result_json


@cache
def schema_of(name: str) -> dict[str, Any]:
    folder = files("vllm_memprof.report") / "schemas"
    (path,) = (each for each in folder.iterdir() if each.name.rpartition("-")[0] == name)
    schema: dict[str, Any] = json.loads(path.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return schema


def closed(schema: Any) -> Any:
    """The same schema, but every object that names its keys takes no others."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(value) for key, value in schema.items()}
    if "required" in found and isinstance(found.get("properties"), dict):
        found["additionalProperties"] = False
    return found


def problems(schema: dict[str, Any], data: Any) -> Iterator[str]:
    for error in jsonschema.Draft202012Validator(schema).iter_errors(data):
        yield f"{error.json_path}: {error.message[:200]}"


@cache
def closed_schema_of(name: str) -> dict[str, Any]:
    """Return the closed form, for what the published one takes: it has no way to demand a refusal."""
    schema = schema_of(name)
    assert not {"not", "oneOf", "if"} & set(re.findall(r'"(\w+)":', json.dumps(schema)))
    shut: dict[str, Any] = closed(schema)
    return shut


def assert_obeys(name: str, text: str) -> None:
    """The closed form is the stricter one: a key that memprof writes and no schema names is a gap."""
    assert list(problems(closed_schema_of(name), json.loads(text))) == []


@pytest.mark.parametrize("name", RUNS)
def test_reports_of_recorded_runs(name: str) -> None:
    assert_obeys("report", render_json(build_report(recorded(name))))


@pytest.mark.parametrize("log", LOGS, ids=lambda path: path.stem)
def test_reports_of_logs(log) -> None:
    for run in read_log(str(log)):
        assert_obeys("report", render_json(build_report(run)))


def test_reports_of_an_oom_and_of_many_ranks(tmp_path) -> None:
    assert_obeys("report", render_json(oom_report()))
    assert_obeys(
        "report", render_json(build_report(load_run(write_many_ranks(tmp_path / "run", ranks=16))))
    )


@pytest.mark.parametrize(("a", "b"), sorted({(a, b) for a, b, _ in DIFFS.values()}))
def test_comparisons(a: str, b: str) -> None:
    assert_obeys("diff", render_result_json(diff_of(a, b)))


@pytest.mark.parametrize("case", sorted({case for case, _ in CHECKS.values()}, key=str))
def test_checks(case: tuple[str, str, str | None]) -> None:
    assert_obeys("check", render_result_json(check_result(*case)))


@pytest.fixture
def report() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(render_json(build_report(recorded("recorded_023_tp2"))))
    return data


def test_keys_may_be_added(report: dict[str, Any]) -> None:
    report["ranks"][0]["phases"][0]["new"] = report["new"] = 1
    assert list(problems(schema_of("report"), report)) == []
    assert len(list(problems(closed(schema_of("report")), report))) == 2  # which is how a gap shows


def test_mistakes_are_refused(report: dict[str, Any]) -> None:
    def edited(*path: Any, value: Any = ...) -> dict[str, Any]:
        data = copy.deepcopy(report)
        place: Any = data
        for key in path[:-1]:
            place = place[key]
        if value is ...:
            del place[path[-1]]
        else:
            place[path[-1]] = value
        return data

    phase = ("ranks", 0, "phases", 0)
    wrong = [
        edited("schema", value="memprof.report/1"),
        edited("run", "outcome", value="fine"),
        edited("ranks", 1, "label"),
        edited(*phase, "after", "allocated_bytes", value=1.5),
        edited(*phase, "after", "allocated_bytes", value="12"),
        edited(*phase, "delta", "reserved_bytes", value="5"),
        edited(*phase, "owners", "after", "rows", 0, "how", value="guessed"),
        edited(*phase, "owners", value="none"),
        edited("ranks", 0, "budget", "terms", 0, "bytes", value=True),
        edited("findings", 0, "severity", value="fatal"),
    ]
    for data in wrong:
        assert len(list(problems(schema_of("report"), data))) == 1
