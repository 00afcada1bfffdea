"""``plan A -- B --share``: which token belongs to whom, and what is refused before a start."""

from __future__ import annotations

from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from vllm_memprof.cli import share as module
from vllm_memprof.cli.commands.plan import app
from vllm_memprof.cli.plans import Asked
from vllm_memprof.errors import UsageError
from vllm_memprof.plans.share_file import Typed

A, B = Typed("m/a", ["-tp", "1"], []), Typed("m/b", ["--max-model-len", "4096"], [])


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []

    def share(asked: Asked, instances: list[Typed], own: Any, timeout: float, *rest: Any) -> int:
        calls.append((module._from_file(instances), own, *rest, asked))
        return 0

    monkeypatch.setattr(module, "share", share)
    return calls


def run(*args: str) -> None:
    found = CliRunner().invoke(app, list(args))
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    assert found.exit_code == 0, found.output


@pytest.mark.parametrize(
    "args",
    [
        "m/a -tp 1 -- m/b --max-model-len 4096 --share --device sim:910b",
        "m/a -tp 1 --share --device sim:910b -- m/b --max-model-len 4096",
        "--share m/a -tp 1 --device=sim:910b -- --max-model-len 4096 --model m/b",
        "m/a -tp 1 -- m/b --max-model-len 4096 --device sim:910b -- --share",
    ],
)
def test_a_lone_dash_stands_between_instances(args: str, called: list[Any]) -> None:
    if args.endswith("-- --share"):  # an option of memprof alone is no instance
        with pytest.raises(UsageError, match="no MODEL behind `--` number 2"):
            run(*args.split())
        return
    run(*args.split())
    assert called[0][0] == [A, B]
    assert called[0][1]["device"] == "sim:910b"


def test_a_want_is_that_of_its_instance_and_all_else_of_all(called: list[Any]) -> None:
    typed = (
        "m/a --want tokens=1 --want kv-cache=1GiB -tp 1 -- m/b --want=concurrency=2 "
        "--beside 2GiB --headroom 1GiB --format json --share -- m/c"
    )
    run(*typed.split())
    instances, _, beside, headroom, asked = called[0]
    assert [each.wants for each in instances] == [
        ["tokens=1", "kv-cache=1GiB"], ["concurrency=2"], [],
    ]  # fmt: skip
    assert [each.engine_args for each in instances] == [["-tp", "1"], [], []]
    assert (beside, headroom, asked.folder, asked.format_name) == ("2GiB", "1GiB", None, "json")


def test_a_file_stands_for_the_instances(called: list[Any], tmp_path) -> None:
    path = tmp_path / "two.toml"
    path.write_text('[[instance]]\nmodel = "m/a"\nargs = ["-tp", "1"]\n[[instance]]\nmodel = "x"\n')
    run("--share", str(path))
    assert called[0][0] == [A, Typed("x")]
    with pytest.raises(UsageError, match="arguments and --want belong into it"):
        run(str(path), "-tp", "1", "--share")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("m/a -- m/b --share --fit devices", "--fit does not go with --share"),
        ("m/a -- m/b --share --rank 0", "--rank does not go with --share"),
        ("m/a -- m/b --share --engine sglang", "--share has no counterpart in SGLang"),
        ("m/a -- --share -tp 2", "no MODEL behind `--` number 1"),
        ("--share", "MODEL is missing"),
        ("m/a --beside 2GiB", "--beside means nothing without --share"),
    ],
)
def test_what_does_not_go_together(args: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run(*args.split())


def test_without_share_a_lone_dash_ends_options_of_memprof(monkeypatch) -> None:
    seen: list[list[str]] = []

    def request(mode: str, ctx: typer.Context, *args: Any, **own: Any) -> None:
        seen.append(ctx.meta["vllm_memprof.engine_args"])
        raise typer.Exit(0)

    monkeypatch.setattr("vllm_memprof.cli.run.request", request)
    run("m/a", "-tp", "1", "--", "--device", "x")
    assert seen == [["-tp", "1", "--device", "x"]]


def test_names_of_instances() -> None:
    assert [module._name(number) for number in (0, 1, 25, 26)] == ["A", "B", "Z", "A1"]
