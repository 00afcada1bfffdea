"""docs/kubernetes.yaml: its command line is read, its ports agree, its grace period is enough."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
import yaml

from vllm_memprof.cli import app
from vllm_memprof.cli.arguments import ENGINE_ARGS
from vllm_memprof.launch.prepare import find_shutdown_timeout
from vllm_memprof.launch.run import Patience

PAGE = Path(__file__).parents[3] / "docs/kubernetes.yaml"
POD: dict[str, Any] = yaml.safe_load(PAGE.read_text())["spec"]["template"]
(SERVER,) = POD["spec"]["containers"]
#: For memprof to write its last report.
REPORT_S = 20


def command_line() -> tuple[dict[str, Any], list[str]]:
    """Return memprof's options, and the engine's arguments."""
    command = typer.main.get_command(app).get_command(None, "serve")  # type: ignore[attr-defined]
    context = command.make_context("serve", [*SERVER["command"][2:], *SERVER["args"]])
    return context.params, context.meta[ENGINE_ARGS]


def test_memprof_reads_its_options_and_hands_on_the_engines() -> None:
    options, engine = command_line()
    assert SERVER["command"][:2] == ["memprof", "serve"]
    assert (options["model"], options["sample"]) == ("Qwen/Qwen3-14B", "16")
    assert options["run_dir"] is None  # a container that starts anew gets a new folder
    names = [word.partition("=")[0] for word in engine]
    assert names == ["--tensor-parallel-size", "--shutdown-timeout", "--port"]


def test_ports_and_devices_are_those_of_the_command_line() -> None:
    options, engine = command_line()
    ports = {port["name"]: port["containerPort"] for port in SERVER["ports"]}
    given = dict(word.split("=") for word in engine)
    assert ports == {"http": int(given["--port"]), "metrics": options["metrics_port"]}
    assert POD["metadata"]["annotations"]["prometheus.io/port"] == str(options["metrics_port"])
    assert options["metrics_host"] == "0.0.0.0"
    assert SERVER["resources"]["limits"]["huawei.com/Ascend910"] == int(
        given["--tensor-parallel-size"]
    )
    assert all(SERVER[f"{kind}Probe"]["httpGet"]["port"] in ports for kind in PROBES)


PROBES = ("startup", "readiness", "liveness")


def test_nothing_is_killed_before_memprof_has_ended_it() -> None:
    options, engine = command_line()
    patience = Patience()
    longest = (
        find_shutdown_timeout(engine)
        + patience.after_interrupt_s
        + patience.after_term_s
        + 2 * patience.after_kill_s  # until they are gone, and once more at the close
    )
    assert longest == 66
    assert longest + REPORT_S <= POD["spec"]["terminationGracePeriodSeconds"]
    startup = SERVER["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] > options["startup_timeout"]


def test_run_folders_are_on_the_volume() -> None:
    mounts = {mount["name"]: mount["mountPath"] for mount in SERVER["volumeMounts"]}
    assert mounts["runs"] == SERVER["workingDir"]
    assert {volume["name"] for volume in POD["spec"]["volumes"]} == mounts.keys()
