"""``--keep-secrets`` from the command line to the launch."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from vllm_memprof.cli import app
from vllm_memprof.launch.request import LaunchRequest

ENGINE = ("serve", "offline", "plan")


@pytest.mark.parametrize("command", ENGINE)
@pytest.mark.parametrize("given", [True, False])
def test_it_reaches_the_launch(command: str, given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[LaunchRequest] = []

    def run(request: LaunchRequest, *_: object) -> int:
        asked.append(request)
        return 0

    monkeypatch.setattr("vllm_memprof.cli.run.run", run)
    option = ["--keep-secrets"] if given else []
    done = CliRunner().invoke(app, [command, "memprof/tiny", "--device", "sim:910b", *option])
    assert done.exit_code == 0, done.output
    assert [request.keep_secrets for request in asked] == [given]


def test_a_search_has_no_log_to_keep_them_in() -> None:
    done = CliRunner().invoke(app, ["plan", "memprof/tiny", "--fit", "devices", "--keep-secrets"])
    assert done.exit_code != 0
    assert "--keep-secrets is for one run" in str(done.exception or done.output)
