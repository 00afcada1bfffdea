"""Which part of a deployment a run is, by the engine's arguments."""

from __future__ import annotations

import pytest

from vllm_memprof.errors import UsageError
from vllm_memprof.launch.deployment import find_part, has_others, parse_deployment
from vllm_memprof.launch.progress import EngineProgress
from vllm_memprof.record.schema import DeploymentPart, RunInfo

HEAD = ("--data-parallel-size", "4", "--data-parallel-size-local", "2")
ADDRESS = ("--data-parallel-address", "10.0.0.5", "--data-parallel-rpc-port", "13345")
NODES = ("--nnodes", "2", "--master-addr", "10.0.0.5", "-tp", "16")


def part(deployment: str | None, source: str = "arguments", **fields: object) -> DeploymentPart:
    sizes = {"dp_size": 1, "dp_start": 0, "dp_local": 1, "world_size": 1}
    return DeploymentPart(deployment, source, **(sizes | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("-tp", "8", "--data-parallel-size", "2"),
        ("--data-parallel-size=2", "--data-parallel-size-local=2", *ADDRESS),
        ("--nnodes", "1", "--kv-transfer-config", '{"kv_role": "kv_both"}'),
        ("--kv-transfer-config", "not JSON"),
        ("--data-parallel-size", "2", "--data-parallel-backend", "ray"),  # Ray places the cores
        ("--nnodes",),  # the engine refuses it
        ("--nnodes", "two"),
    ],
)
def test_a_run_on_one_host_is_no_part(arguments: tuple[str, ...]) -> None:
    assert find_part(list(arguments)) is None


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            (*HEAD, *ADDRESS, "-tp", "4"),
            part("10.0.0.5:13345", dp_size=4, dp_local=2, world_size=4),
        ),
        (
            (*HEAD, *ADDRESS, "--headless", "--data-parallel-start-rank", "2"),
            part("10.0.0.5:13345", headless=True, dp_size=4, dp_start=2, dp_local=2),
        ),
        (
            ("-dp=4", "-dpl", "1", "--data_parallel_start_rank=3", "--headless", "-dpa", "10.0.0.5"),
            part("10.0.0.5:29550", headless=True, dp_size=4, dp_start=3, dp_local=1),
        ),
        (HEAD, part("127.0.0.1:29550", dp_size=4, dp_local=2)),  # as the engine takes it
        (
            ("--data-parallel-size", "2", "--data-parallel-size-local", "0"),  # an API server alone
            part("127.0.0.1:29550", dp_size=2, dp_local=0),
        ),
        (
            ("--data-parallel-size", "4", "--data-parallel-rank", "3", *ADDRESS),
            part("10.0.0.5:13345", dp_size=4, dp_start=3, dp_local=1),
        ),
        (
            (*NODES, "--node-rank", "0"),
            part("10.0.0.5:29501", nodes=2, node_rank=0, world_size=16),
        ),
        (
            (*NODES, "-r", "1", "--headless", "--master-port=2000"),
            part("10.0.0.5:2000", headless=True, nodes=2, node_rank=1, world_size=16),
        ),
        (  # one engine core of each host
            ("-n", "2", "-r", "1", "-dp", "2", "-tp", "8", "--headless"),
            part("127.0.0.1:29501", headless=True, dp_size=2, dp_start=1, world_size=8),
        ),
        (  # two hosts of each engine core
            ("-n", "4", "-r", "3", "-dp", "2", "-tp", "16", "--headless"),
            part(
                "127.0.0.1:29501", headless=True, nodes=2, node_rank=1, dp_size=2, dp_start=1,
                world_size=16,
            ),
        ),
        (
            ("--kv-transfer-config", '{"kv_connector": "X", "kv_role": "kv_producer"}'),
            part(None, group="prefill"),
        ),
        (
            ("--kv_transfer_config.kv_role", "kv_consumer"),
            part(None, group="decode"),
        ),
    ],
)  # fmt: skip
def test_parts(arguments: tuple[str, ...], expected: DeploymentPart) -> None:
    assert find_part(list(arguments)) == expected


@pytest.mark.parametrize(
    ("deployment", "arguments", "expected"),
    [
        ("demo", (), part("demo", "option")),
        ("demo/prefill", (), part("demo", "option", group="prefill")),
        (
            "demo",
            ("--kv-transfer-config", '{"kv_role": "kv_consumer"}'),
            part("demo", "option", group="decode"),
        ),
        ("demo", (*HEAD, *ADDRESS), part("demo", "option", dp_size=4, dp_local=2)),
    ],
)
def test_the_option_counts_before_the_arguments(
    deployment: str, arguments: tuple[str, ...], expected: DeploymentPart
) -> None:
    assert find_part(list(arguments), deployment) == expected


@pytest.mark.parametrize("text", ["", " ", "/prefill", "demo/", "demo/a/b"])
def test_what_is_no_name(text: str) -> None:
    with pytest.raises(UsageError, match="neither NAME nor NAME/GROUP"):
        parse_deployment(text)


S = 1_000_000_000


def told(*events: tuple[str, str, int]) -> EngineProgress:
    """Processes that were told of: (file, what, second)."""
    progress = EngineProgress()
    for file, what, second in events:
        role = "worker" if what == "warm_up" else "engine_core" if what == "model" else "api"
        progress.fold(file, {"kind": "process", "t_ns": 0, "role": role})
        event = {"t_ns": second * S}
        if what == "warm_up":
            event |= {"kind": "phase", "phase": what, "edge": "after", "id": 1, "error": None}
        else:
            event |= {"kind": "ready", "what": what}
        progress.fold(file, event)
    return progress


def info(part: DeploymentPart | None, mode: str = "serve") -> RunInfo:
    return RunInfo(id="x", mode=mode, model="m", command=[], part=part)


def test_a_server_is_ready_when_it_says_so() -> None:
    progress = told(("c", "model", 1), ("a", "server", 2))
    for given in (None, part("d", dp_size=2)):
        assert progress.ready_at(info(given)) == 2 * S
        assert told(("c", "model", 1)).ready_at(info(given)) is None


def test_a_headless_host_is_ready_with_its_last_engine_core() -> None:
    both = part("d", headless=True, dp_size=4, dp_start=2, dp_local=2)
    assert told(("c", "model", 1)).ready_at(info(both)) is None
    assert told(("c", "model", 1), ("d", "model", 3)).ready_at(info(both)) == 3 * S


def test_a_host_of_workers_alone_is_ready_when_they_have_warmed_up() -> None:
    node = part("d", headless=True, nodes=2, node_rank=1, world_size=4)
    assert told(("w", "warm_up", 1)).ready_at(info(node)) is None
    assert told(("w", "warm_up", 1), ("v", "warm_up", 2)).ready_at(info(node)) == 2 * S


@pytest.mark.parametrize(
    ("given", "others"),
    [
        (part("demo", "option", group="prefill"), False),
        (part("d", dp_size=2, dp_local=2), False),
        (part("d", dp_size=2, dp_local=1), True),
        (part("d", nodes=2, node_rank=0, world_size=2), True),
    ],
)
def test_whose_ranks_wait_for_other_hosts(given: DeploymentPart, others: bool) -> None:
    assert has_others(given) == others
