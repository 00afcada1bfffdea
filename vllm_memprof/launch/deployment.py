"""Which part of a deployment on several hosts a run is: the engine's arguments enter, a part
leaves.

The engine's own parser is not used (it takes seconds to import), so the rules are those of vLLM
0.13.0 and 0.23.0, which are the same: vllm/engine/arg_utils.py::EngineArgs.create_engine_config,
vllm/config/parallel.py::ParallelConfig. Arguments in a file (``--config``) are not read. Pure.
"""

from __future__ import annotations

from vllm_memprof.engines import VLLM
from vllm_memprof.errors import UsageError
from vllm_memprof.options import read_options, value_of
from vllm_memprof.record.schema import DeploymentPart

#: Where a head without an address of its own is looked for, and its ports.
#: (vllm/config/parallel.py::ParallelConfig: data_parallel_master_ip, data_parallel_rpc_port,
#: master_addr, master_port)
DEFAULT_ADDRESS = "127.0.0.1"
DEFAULT_RPC_PORT, DEFAULT_MASTER_PORT = 29550, 29501
#: Role of ``--kv-transfer-config`` -> group. An engine that does both is in none.
GROUPS = {"kv_producer": "prefill", "kv_consumer": "decode"}


def find_part(engine_args: list[str], deployment: str | None = None) -> DeploymentPart | None:
    """Return the part that a run of ``vllm serve`` is; None: all of it runs on this host.

    Args:
        engine_args: of the engine, without the model.
        deployment: of ``--deployment``, NAME or NAME/GROUP.

    Raises:
        UsageError: ``deployment`` is neither.
    """
    named, group = (None, None) if deployment is None else parse_deployment(deployment)
    given = read_options(engine_args, VLLM.part)
    group = group or GROUPS.get(value_of(engine_args, "--kv-transfer-config.kv_role") or "")

    def number(name: str, default: int, least: int = 1) -> int:
        value = given.get(name)  # what is too small is for the engine to refuse
        return value if isinstance(value, int) and value >= least else default

    # (create_engine_config; ParallelConfig.nnodes_within_dp, 0.23.0)
    dp_size = number("data_parallel_size", 1)
    world = (
        number("tensor_parallel_size", 1)
        * number("pipeline_parallel_size", 1)
        * number("prefill_context_parallel_size", 1)
    )
    nnodes, node_rank = number("nnodes", 1), number("node_rank", 0, 0)
    here = world * dp_size // nnodes  # workers of each host, where there are several
    inferred = node_rank * here // world if nnodes > 1 else 0
    if "data_parallel_rank" in given:  # another balancer stands before the engine cores
        start, local = number("data_parallel_rank", 0, 0), 1
    elif "data_parallel_size_local" in given:
        start = number("data_parallel_start_rank", 0, 0) or inferred
        local = number("data_parallel_size_local", dp_size, 0)
    else:
        start, local = inferred, max(here // world, 1) if nnodes > 1 else dp_size
    nodes = max(nnodes // max(dp_size // max(local, 1), 1), 1)  # that one engine core spans
    headless = bool(given.get("headless"))
    by_ray = given.get("data_parallel_backend") == "ray"  # it places the engine cores itself
    alone = not headless and (by_ray or (nodes == 1 and local >= dp_size))
    if alone and named is None and group is None:
        return None
    # the address at which the hosts find each other; all are given the same
    address = given.get("master_addr") or DEFAULT_ADDRESS
    if nnodes > 1:
        port = number("master_port", DEFAULT_MASTER_PORT)
    else:
        address = given.get("data_parallel_address") or address
        port = number("data_parallel_rpc_port", DEFAULT_RPC_PORT)
    return DeploymentPart(
        deployment=named or (None if alone else f"{address}:{port}"),
        source="arguments" if named is None else "option",
        group=group,
        headless=headless,
        nodes=nodes if nodes > 1 else None,
        node_rank=node_rank % nodes if nodes > 1 else None,
        dp_size=dp_size,
        dp_start=None if by_ray else start,
        dp_local=None if by_ray else local,
        world_size=world,
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
            "e.g. --deployment demo, --deployment demo/prefill",
        )
    return name.strip(), group.strip() or None
