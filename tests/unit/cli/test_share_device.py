"""``--share-device`` from the command line to the launch."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from vllm_memprof.cli import app
from vllm_memprof.launch.request import LaunchRequest


@pytest.mark.parametrize("command", ["serve", "offline", "plan"])
@pytest.mark.parametrize("given", [True, False])
def test_it_reaches_the_launch(command: str, given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[LaunchRequest] = []

    def run(request: LaunchRequest, *_: object) -> int:
        asked.append(request)
        return 0

    monkeypatch.setattr("vllm_memprof.cli.run.run", run)
    option = ["--share-device"] if given else []
    done = CliRunner().invoke(app, [command, "memprof/tiny", "--device", "sim:910b", *option])
    assert done.exit_code == 0, done.output
    assert [request.share_device for request in asked] == [given]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "npu"], "--share-device is for a simulated device"),
        (["--device", "sim:910b", "--fit", "devices"], "--share-device is for one run"),
    ],
)
def test_where_it_means_nothing(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["plan", "memprof/tiny", *arguments, "--share-device"])
    assert done.exit_code != 0
    assert said in str(done.exception or done.output)
