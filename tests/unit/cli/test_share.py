"""``share A -- B``: which token belongs to whom, and what is refused before a start."""

from __future__ import annotations

from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from vllm_memprof.cli.commands import share as module
from vllm_memprof.cli.commands.plan import app as plan_app
from vllm_memprof.cli.commands.share import app
from vllm_memprof.errors import UsageError

A, B = ("m/a", ["-tp", "1"], []), ("m/b", ["--max-model-len", "4096"], [])


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is to be started and with which options, instead of the starts."""
    calls: list[Any] = []

    def answer(ctx: Any, title: str, make: Any, document: Any, kept: str) -> Any:
        job = make(None)
        typed = [
            (each.plan.model, each.plan.engine_args, [want.text for want in each.wants])
            for each in job.instances
        ]
        calls.append((typed, job, ctx.params))
        raise typer.Exit(0)

    monkeypatch.setattr("vllm_memprof.cli.plans.answer", answer)
    monkeypatch.setattr("vllm_memprof.cli.plans.check_setup", lambda plan: None)
    monkeypatch.setattr(module, "run_share", lambda job, runner: job)
    return calls


def run(*args: str, using: typer.Typer = app) -> None:
    found = CliRunner().invoke(using, list(args))
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    assert found.exit_code == 0, found.output


@pytest.mark.parametrize(
    "args",
    [
        "m/a -tp 1 -- m/b --max-model-len 4096 --device sim:910b",
        "m/a -tp 1 --device sim:910b -- m/b --max-model-len 4096",
        "--quiet m/a -tp 1 --device=sim:910b -- --max-model-len 4096 --model m/b",
        "m/a -tp 1 -- m/b --max-model-len 4096 --device sim:910b -- --quiet",
    ],
)
def test_a_lone_dash_stands_between_instances(args: str, called: list[Any]) -> None:
    if args.endswith("-- --quiet"):  # an option of memprof alone is no instance
        with pytest.raises(UsageError, match="no MODEL behind `--` number 2"):
            run(*args.split())
        return
    run(*args.split())
    assert called[0][0] == [A, B]
    assert {each.plan.own["device"] for each in called[0][1].instances} == {"sim:910b"}


def test_a_want_is_that_of_its_instance_and_all_else_of_all(called: list[Any]) -> None:
    typed = (
        "m/a --want tokens=1 --want kv-cache=1GiB -tp 1 -- m/b --want=concurrency=2 "
        "--beside 2GiB --headroom 1GiB --format json --device sim -- m/c"
    )
    run(*typed.split())
    typed_as, job, options = called[0]
    assert [wants for _, _, wants in typed_as] == [
        ["KV tokens >= 1", "KV cache >= 1.0000 GiB"], ["concurrency at max_model_len >= 2"], [],
    ]  # fmt: skip
    assert [arguments for _, arguments, _ in typed_as] == [["-tp", "1"], [], []]
    assert (job.beside, job.headroom) == (2 << 30, 1 << 30)
    assert (options["run_dir"], options["format_name"]) == (None, "json")


def test_a_file_stands_for_the_instances(called: list[Any], tmp_path) -> None:
    path = tmp_path / "two.toml"
    path.write_text('[[instance]]\nmodel = "m/a"\nargs = ["-tp", "1"]\n[[instance]]\nmodel = "x"\n')
    run("--device", "sim", str(path))
    assert called[0][0] == [A, ("x", [], [])]
    with pytest.raises(UsageError, match="arguments and --want belong into it"):
        run(str(path), "-tp", "1", "--device", "sim")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("m/a -- m/b --engine sglang", "share has no counterpart in SGLang"),
        ("m/a -- -tp 2", "no MODEL behind `--` number 1"),
        ("--device sim", "MODEL is missing"),
        ("m/a --device sim", "memprof share needs two instances"),
        ("m/a -- m/b", "only on a simulated device"),
    ],
)
def test_what_does_not_go_together(args: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run(*args.split())


def test_elsewhere_a_lone_dash_ends_options_of_memprof(monkeypatch) -> None:
    seen: list[list[str]] = []

    def request(mode: str, ctx: typer.Context, *args: Any, **own: Any) -> None:
        seen.append(ctx.meta["vllm_memprof.engine_args"])
        raise typer.Exit(0)

    monkeypatch.setattr("vllm_memprof.cli.run.request", request)
    run("m/a", "-tp", "1", "--", "--device", "x", using=plan_app)
    assert seen == [["-tp", "1", "--device", "x"]]


def test_names_of_instances(called: list[Any], tmp_path) -> None:
    path = tmp_path / "many.toml"
    path.write_text('[[instance]]\nmodel = "m/a"\n' * 27)
    run("--device", "sim", str(path))
    names = [each.name for each in called[0][1].instances]
    assert [names[number] for number in (0, 1, 25, 26)] == ["A", "B", "Z", "A1"]
