"""The commands of docs/deployments.md, without an engine: the part that each of them is."""

from __future__ import annotations

import re
import shlex
from string import Template

import pytest

from tests.support.hosts import commands, settings
from vllm_memprof.cli.arguments import split_arguments
from vllm_memprof.launch.deployment import find_part
from vllm_memprof.record.schema import DeploymentPart

_OWN = dict.fromkeys(("--device", "--run-dir", "--deployment"), True)
_SIZES = {"dp_size": 1, "dp_start": 0, "dp_local": 1, "world_size": 1}
_DATA = {"deployment": "127.0.0.1:13345", "source": "arguments", **_SIZES, "dp_size": 2}
_NODE = {"deployment": "127.0.0.1:13345", "source": "arguments", **_SIZES, "world_size": 2,
         "nodes": 2}  # fmt: skip
_APART = {"deployment": "demo", "source": "option", **_SIZES}
#: Block of the page -> the part that its run says it is.
PARTS = {
    "host-a": DeploymentPart(**_DATA),
    "host-b": DeploymentPart(**_DATA | {"headless": True, "dp_start": 1}),
    "node-a": DeploymentPart(**_NODE, node_rank=0),
    "node-b": DeploymentPart(**_NODE, node_rank=1, headless=True),
    "prefill": DeploymentPart(**_APART, group="prefill"),
    "decode": DeploymentPart(**_APART, group="decode"),
}


def test_every_block_is_known() -> None:
    """tests/integration/test_deployment.py runs these."""
    assert set(commands()) - {"settings"} >= set(PARTS)


@pytest.mark.parametrize("name", PARTS)
def test_the_part_of_a_command(name: str) -> None:
    variables = {**settings(), "CONNECTOR": '"kv_connector": "X"'}
    text = re.sub(r"\$\(\(HTTP \+ 1\)\)", "8001", commands()[name].replace("\\\n", " "))
    tokens = shlex.split(Template(text).substitute(variables))
    start = tokens.index("serve")
    assert tokens[start - 1] == "memprof"
    assert tokens[0].startswith("MEMPROF_HOST=")
    split = split_arguments(tokens[start + 1 :], _OWN)
    own = dict(option.split("=", 1) for option in split.own)
    assert own["--run-dir"] == f"runs/{name}"
    assert find_part(split.engine, own.get("--deployment")) == PARTS[name]
