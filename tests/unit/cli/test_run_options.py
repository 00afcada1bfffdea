"""Options of commands that start an engine, from the command line to the launch."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vllm_memprof.cli import app
from vllm_memprof.errors import UsageError
from vllm_memprof.launch.request import LaunchRequest


@pytest.mark.parametrize("option", ["--keep-secrets", "--share-device"])
@pytest.mark.parametrize("command", ["serve", "offline", "plan"])
@pytest.mark.parametrize("given", [True, False])
def test_it_reaches_the_launch(
    option: str, command: str, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[LaunchRequest] = []

    def run(ctx: object, request: LaunchRequest, *_: object) -> None:
        asked.append(request)

    monkeypatch.setattr("vllm_memprof.cli.run.run", run)
    options = [option] if given else []
    done = CliRunner().invoke(app, [command, "memprof/tiny", "--device", "sim:910b", *options])
    assert done.exit_code == 0, done.output
    field = option.removeprefix("--").replace("-", "_")
    assert [getattr(request, field) for request in asked] == [given]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "npu", "--share-device"], "--share-device is for a simulated device"),
    ],
)
def test_where_it_means_nothing(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["plan", "memprof/tiny", *arguments])
    assert done.exit_code != 0
    assert said in str(done.exception or done.output)


def serve_with(monkeypatch: pytest.MonkeyPatch, *options: str) -> tuple[Any, list[tuple[Any, ...]]]:
    """Return the end of ``memprof serve`` whose engine does not start, and what it was to run."""
    asked: list[tuple[Any, ...]] = []

    def run(ctx: Any, request: LaunchRequest, exporter: Any = None) -> None:
        asked.append((request, ctx.params.get("screen"), exporter))

    monkeypatch.setattr("vllm_memprof.cli.run.run", run)
    done = CliRunner().invoke(app, ["serve", "memprof/tiny", "--device", "sim:910b", *options])
    return done, asked


def test_without_a_port_nothing_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    done, [(_, screen, exporter)] = serve_with(monkeypatch)
    assert done.exit_code == 0, done.output
    assert (screen, exporter) == (False, None)


def test_metrics_listen_before_the_engine_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    done, [(request, screen, exporter)] = serve_with(
        monkeypatch, "--live", "--metrics-port", "0", "--port", "8000"
    )
    try:
        assert done.exit_code == 0, done.output
        assert screen
        assert exporter.url.startswith("http://127.0.0.1:")
        assert request.engine_args == ["--port", "8000"]  # vLLM's own
    finally:
        exporter.close()


def test_a_metrics_port_in_use_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        options = ["--metrics-port", str(taken.getsockname()[1])]
        done, asked = serve_with(monkeypatch, *options, "--run-dir", str(tmp_path / "run"))
    assert isinstance(done.exception, UsageError)
    assert done.exception.exit_code == 2
    assert asked == []
    assert not (tmp_path / "run").exists()


def test_a_metrics_host_without_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    done, asked = serve_with(monkeypatch, "--metrics-host", "0.0.0.0")
    assert "--metrics-host goes with --metrics-port" in str(done.exception)
    assert asked == []


@pytest.mark.parametrize(
    ("command", "given", "sample"),
    [
        ("serve", ["--trace-allocations", "7"], "16"),  # counts requests, so it samples
        ("serve", ["--trace-allocations", "7", "--sample", "5s"], "5s"),
        ("offline", ["--trace-allocations", "7"], "1"),
    ],
)
def test_allocations_are_traced_in_a_sampled_run(
    command: str, given: list[str], sample: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[LaunchRequest] = []
    monkeypatch.setattr("vllm_memprof.cli.run.run", lambda ctx, one, *_: asked.append(one))
    done = CliRunner().invoke(app, [command, "memprof/tiny", "--device", "sim:910b", *given])
    assert done.exit_code == 0, done.output
    assert [(one.trace_allocations, one.sample) for one in asked] == [(7, sample)]


def test_a_number_of_requests_is_at_least_1() -> None:
    done = CliRunner().invoke(app, ["serve", "m", "--trace-allocations", "0"])
    assert done.exit_code == 2
    assert "--trace-allocations" in done.output


def test_allocations_are_not_traced_in_a_run_that_is_not_sampled() -> None:
    given = ["--trace-allocations", "7", "--sample", "off"]
    done = CliRunner().invoke(app, ["offline", "m", *given])
    assert "--sample off leaves out" in str(done.exception or done.output)


def test_the_deployment_reaches_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    done, [(request, *_)] = serve_with(monkeypatch, "--deployment", "demo/prefill", "--headless")
    assert done.exit_code == 0, done.output
    assert (request.deployment, request.engine_args) == ("demo/prefill", ["--headless"])


def test_a_deployment_without_a_name_is_refused_before_anything_starts() -> None:
    done = CliRunner().invoke(
        app, ["serve", "memprof/tiny", "--device", "sim:910b", "--deployment", "demo/a/b"]
    )
    assert isinstance(done.exception, UsageError)
    assert "neither NAME nor NAME/GROUP" in str(done.exception)
