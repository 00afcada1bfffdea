"""Which part of a deployment a run is, by the engine's arguments."""

from __future__ import annotations

import pytest

from vllm_memprof.errors import UsageError
from vllm_memprof.launch.deployment import find_part, parse_deployment
from vllm_memprof.record.schema import DeploymentPart

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
