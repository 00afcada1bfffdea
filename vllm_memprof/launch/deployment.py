"""Which part of a deployment on several hosts a run is: the engine's arguments enter, a part
leaves.

The engine's own parser is not used (it takes seconds to import), so the rules are those of vLLM
0.13.0 and 0.23.0, which are the same: vllm/engine/arg_utils.py::EngineArgs.create_engine_config,
vllm/config/parallel.py::ParallelConfig. Arguments in a file (``--config``) are not read. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vllm_memprof.errors import UsageError
from vllm_memprof.record.schema import DeploymentPart

#: Where a head without an address of its own is looked for, and its ports.
#: (vllm/config/parallel.py::ParallelConfig: data_parallel_master_ip, data_parallel_rpc_port,
#: master_addr, master_port)
DEFAULT_ADDRESS = "127.0.0.1"
DEFAULT_RPC_PORT, DEFAULT_MASTER_PORT = 29550, 29501
#: Role of ``--kv-transfer-config`` -> group. An engine that does both is in none.
GROUPS = {"kv_producer": "prefill", "kv_consumer": "decode"}

#: Values as they were typed, by long name; "" of a flag.
Given = Mapping[str, str]


@dataclass(frozen=True)
class Option:
    """An option of the engine that says something about its part."""

    name: str
    short: str | None = None
    flag: bool = False


OPTIONS = (
    Option("--headless", flag=True),
    Option("--data-parallel-size", "-dp"),
    Option("--data-parallel-size-local", "-dpl"),
    Option("--data-parallel-start-rank", "-dpr"),
    Option("--data-parallel-rank", "-dpn"),
    Option("--data-parallel-address", "-dpa"),
    Option("--data-parallel-rpc-port", "-dpp"),
    Option("--data-parallel-backend", "-dpb"),
    Option("--nnodes", "-n"),
    Option("--node-rank", "-r"),
    Option("--master-addr"),
    Option("--master-port"),
    Option("--tensor-parallel-size", "-tp"),
    Option("--pipeline-parallel-size", "-pp"),
    Option("--prefill-context-parallel-size", "-pcp"),
    Option("--kv-transfer-config"),
    Option("--kv-transfer-config.kv_role"),
)


@dataclass(frozen=True)
class _Sizes:
    """Numbers of a deployment, as the engine derives them."""

    dp_size: int
    dp_start: int
    dp_local: int
    world_size: int  # workers of an engine core
    nodes: int  # hosts that one engine core spans
    node_rank: int  # among those


def find_part(engine_args: list[str], deployment: str | None = None) -> DeploymentPart | None:
    """Return the part that a run of ``vllm serve`` is; None: all of it runs on this host.

    Args:
        engine_args: of the engine, without the model.
        deployment: of ``--deployment``, NAME or NAME/GROUP.

    Raises:
        UsageError: ``deployment`` is neither.
    """
    named, group = (None, None) if deployment is None else parse_deployment(deployment)
    given = read_options(engine_args)
    group = group or GROUPS.get(_kv_role(given) or "")
    sizes = _sizes(given)
    headless = "--headless" in given
    by_ray = given.get("--data-parallel-backend") == "ray"  # it places the engine cores itself
    alone = not headless and (by_ray or (sizes.nodes == 1 and sizes.dp_local >= sizes.dp_size))
    if alone and named is None and group is None:
        return None
    return DeploymentPart(
        deployment=named or (None if alone else _head(given)),
        source="arguments" if named is None else "option",
        group=group,
        headless=headless,
        nodes=sizes.nodes if sizes.nodes > 1 else None,
        node_rank=sizes.node_rank if sizes.nodes > 1 else None,
        dp_size=sizes.dp_size,
        dp_start=None if by_ray else sizes.dp_start,
        dp_local=None if by_ray else sizes.dp_local,
        world_size=sizes.world_size,
    )


def has_others(part: DeploymentPart) -> bool:
    """Whether ranks that this one's wait for run on other hosts."""
    return part.headless or part.nodes is not None or (part.dp_local or 0) < (part.dp_size or 1)


def parse_deployment(text: str) -> tuple[str, str | None]:
    """Return the name of a deployment and of a group in it.

    Raises:
        UsageError: it is neither NAME nor NAME/GROUP.
    """
    name, slash, group = text.partition("/")
    if not name.strip() or (slash and not group.strip()) or "/" in group:
        raise UsageError(
            f"--deployment {text!r} is neither NAME nor NAME/GROUP",
            hint="e.g. --deployment demo, --deployment demo/prefill",
        )
    return name.strip(), group.strip() or None


def read_options(tokens: Iterable[str]) -> dict[str, str]:
    """Return the values of ``OPTIONS`` among the engine's arguments; the last one given counts.

    ``--a b`` and ``--a=b``, ``_`` and ``-``, short names.
    """
    by_name = {name: option for option in OPTIONS for name in (option.name, option.short) if name}
    found: dict[str, str] = {}
    rest = iter(tokens)
    for token in rest:
        name, equals, value = token.partition("=")
        option = by_name.get(_long(name))
        if option is None:
            continue
        if option.flag:
            found[option.name] = ""
        else:
            found[option.name] = value if equals else next(rest, "")
    return found


def _long(name: str) -> str:
    option, dot, key = name.partition(".")
    return (option.replace("_", "-") if option.startswith("--") else option) + dot + key


def _sizes(given: Given) -> _Sizes:
    """Return the sizes. (create_engine_config; ParallelConfig.nnodes_within_dp, 0.23.0)"""
    dp_size = _number(given, "--data-parallel-size", 1)
    world = (
        _number(given, "--tensor-parallel-size", 1)
        * _number(given, "--pipeline-parallel-size", 1)
        * _number(given, "--prefill-context-parallel-size", 1)
    )
    nnodes, node_rank = _number(given, "--nnodes", 1), _number(given, "--node-rank", 0, 0)
    here = world * dp_size // nnodes  # workers of each host, where there are several
    inferred = node_rank * here // world if nnodes > 1 else 0
    if "--data-parallel-rank" in given:  # another balancer stands before the engine cores
        start, local = _number(given, "--data-parallel-rank", 0, 0), 1
    elif "--data-parallel-size-local" in given:
        start = _number(given, "--data-parallel-start-rank", 0, 0) or inferred
        local = _number(given, "--data-parallel-size-local", dp_size, 0)
    else:
        start, local = inferred, max(here // world, 1) if nnodes > 1 else dp_size
    nodes = max(nnodes // max(dp_size // max(local, 1), 1), 1)
    return _Sizes(dp_size, start, local, world, nodes, node_rank % nodes)


def _head(given: Given) -> str:
    """Return the address at which the hosts find each other; all are given the same."""
    address = given.get("--master-addr") or DEFAULT_ADDRESS
    if _number(given, "--nnodes", 1) > 1:
        return f"{address}:{_number(given, '--master-port', DEFAULT_MASTER_PORT)}"
    address = given.get("--data-parallel-address") or address
    return f"{address}:{_number(given, '--data-parallel-rpc-port', DEFAULT_RPC_PORT)}"


def _kv_role(given: Given) -> str | None:
    """Return what the engine does with the KV cache of requests that other engines serve too."""
    dotted = given.get("--kv-transfer-config.kv_role")
    if dotted is not None:
        return dotted
    try:
        whole = json.loads(given.get("--kv-transfer-config", ""))
    except ValueError:
        return None
    role = whole.get("kv_role") if isinstance(whole, dict) else None
    return role if isinstance(role, str) else None


def _number(given: Given, name: str, default: int, least: int = 1) -> int:
    """Return a number; what is none, or too small, is for the engine to refuse."""
    text = given.get(name, "")
    return int(text) if text.isdecimal() and int(text) >= least else default
