"""``--keep-secrets`` and ``--share-device`` from the command line to the launch."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from vllm_memprof.cli import app
from vllm_memprof.launch.request import LaunchRequest


@pytest.mark.parametrize("option", ["--keep-secrets", "--share-device"])
@pytest.mark.parametrize("command", ["serve", "offline", "plan"])
@pytest.mark.parametrize("given", [True, False])
def test_it_reaches_the_launch(
    option: str, command: str, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[LaunchRequest] = []

    def run(request: LaunchRequest, *_: object) -> int:
        asked.append(request)
        return 0

    monkeypatch.setattr("vllm_memprof.cli.run.run", run)
    options = [option] if given else []
    done = CliRunner().invoke(app, [command, "memprof/tiny", "--device", "sim:910b", *options])
    assert done.exit_code == 0, done.output
    field = option.removeprefix("--").replace("-", "_")
    assert [getattr(request, field) for request in asked] == [given]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--fit", "devices", "--keep-secrets"], "--keep-secrets is for one run"),
        (["--device", "npu", "--share-device"], "--share-device is for a simulated device"),
        (
            ["--device", "sim:910b", "--fit", "devices", "--share-device"],
            "--share-device is for one run",
        ),
    ],
)
def test_where_it_means_nothing(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["plan", "memprof/tiny", *arguments])
    assert done.exit_code != 0
    assert said in str(done.exception or done.output)
