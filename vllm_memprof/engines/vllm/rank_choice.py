"""The ranks of a plan that are run, and the ranks each of them stands for.

Plain arithmetic; no engine, no device.

A rank is numbered as vLLM numbers it: data-parallel replica, pipeline stage, prefill-context rank,
tensor rank, the last one fastest (vllm 0.23.0,
``vllm/distributed/parallel_state.py::initialize_model_parallel``). Two ranks are alike when they
hold the same kinds of layers, the same ends of the pipeline and as many experts; vLLM divides
everything else evenly or refuses to start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from vllm_memprof.record.schema import HoldsMore, PlannedRanks

#: Host memory of one worker process on a simulated device, as measured with vllm-ascend 0.23.0:
#: about 1.2 GiB.
WORKER_HOST_BYTES = 1_288_490_189

MODES = ("auto", "one", "all", "edges")
#: How the kind of a layer with experts ends.
EXPERTS = "/experts"


class RankError(Exception):
    """A rank or a way to choose ranks that this run does not have."""


class RankFailure(RuntimeError):
    """A rank was run and did not come through; its own error stands above in the log."""


@dataclass(frozen=True)
class World:
    """The sizes of a run and what its pipeline stages hold."""

    tensor: int = 1
    pipeline: int = 1
    prefill_context: int = 1
    data: int = 1
    stages: tuple[tuple[str, ...], ...] = ()  # kinds of layers by pipeline stage; empty: not known
    experts: int | None = None  # of one layer, over all ranks; None: no expert parallelism
    head_bytes: int | None = None  # LM head of a tensor rank, and as large its token embedding
    expert_bytes: int | None = None  # of one expert in one layer

    @property
    def replica_size(self) -> int:
        return self.tensor * self.pipeline * self.prefill_context

    @property
    def size(self) -> int:
        return self.replica_size * self.data

    def stage(self, rank: int) -> int:
        """Pipeline stage of a rank of a replica."""
        return rank // (self.tensor * self.prefill_context)

    def shard(self, replica: int, rank: int) -> tuple[Any, ...]:
        """Return what a rank holds, as a value to compare.

        Experts that do not divide evenly: the first ranks of the expert group hold one more. (vllm
        0.23.0, ``vllm/model_executor/layers/fused_moe/layer.py::determine_expert_map``)
        """
        stage = self.stage(rank)
        layers = self.stages[stage] if stage < len(self.stages) else ()
        experts = None
        if self.experts is not None:
            group = self.tensor * self.prefill_context
            whole, rest = divmod(self.experts, self.data * group)
            experts = whole + (replica * group + rank % group < rest)
        return stage == 0, stage == self.pipeline - 1, layers, experts

    def beyond(self, rank: int, other: int) -> list[HoldsMore]:
        """Return what a rank holds that another does not, as the model's sizes give it.

        Args:
            rank: over all replicas.
            other: the same.
        """
        first, last, layers, experts = self.shard(*divmod(rank, self.replica_size))
        not_first, not_last, few_layers, few_experts = self.shard(*divmod(other, self.replica_size))
        found: list[HoldsMore] = []
        if first and not not_first:
            found.append(HoldsMore("token_embedding", None, self.head_bytes))
        if last and not not_last:
            found.append(HoldsMore("lm_head", None, self.head_bytes))
        if len(layers) > len(few_layers):
            found.append(HoldsMore("layers", len(layers) - len(few_layers), None))
        more = (experts or 0) - (few_experts or 0)
        if more > 0:
            with_experts = sum(kind.endswith(EXPERTS) for kind in layers)
            known = self.expert_bytes is not None and with_experts
            size = more * with_experts * (self.expert_bytes or 0) if known else None
            found.append(HoldsMore("experts", more, size))
        return found


@dataclass(frozen=True)
class ReplicaRanks:
    """One data-parallel replica of which ranks are run."""

    index: int
    stands_for: dict[int, list[int]]  # rank run -> ranks it answers for, itself included


@dataclass(frozen=True)
class Choice:
    """The ranks that are run. ``alike`` and ``not_run`` hold ranks over all replicas."""

    mode: str  # one | all | edges
    why: str
    world: World
    replicas: list[ReplicaRanks]
    alike: dict[int, list[int]]  # rank that is run -> other ranks that hold the same
    not_run: list[int]  # ranks that hold something else than any rank that is run
    crowded: tuple[int, int] | None = None  # (device, contexts of other ranks on it), of a machine

    def to_event(self) -> dict[str, object]:
        """Return the keys of a ``ranks`` event."""
        alike = {rank: others for rank, others in self.alike.items() if others}
        more = {}
        for rank in self.not_run:
            # what it holds beside what the first rank run holds
            found = self.world.beyond(rank, min(self.alike))
            if self.crowded is not None:
                device, contexts = self.crowded
                if rank % self.world.replica_size % (contexts + 1) == device:
                    found.append(HoldsMore("contexts", contexts, None))
            if found:
                more[rank] = found
        ranks = PlannedRanks(
            self.mode, self.why, self.world.size, sorted(self.alike), alike, self.not_run, more
        )
        return asdict(ranks)

    def with_fuller_devices(self, device: int, devices: int) -> Choice:
        """Return the choice where every worker of a machine leaves a context on one of its devices.

        The rank there has less memory than its peers; those that were run elsewhere do not stand
        for it.

        Args:
            device: where the contexts are.
            devices: devices of a machine.
        """

        def is_fuller(number: int) -> bool:
            return number % self.world.replica_size % devices == device

        alike, not_run = {}, list(self.not_run)
        for rank, others in self.alike.items():
            apart = [] if is_fuller(rank) else [other for other in others if is_fuller(other)]
            alike[rank] = [other for other in others if other not in apart]
            not_run += apart
        if len(not_run) == len(self.not_run):
            return self
        contexts = min(self.world.replica_size, devices) - 1
        return replace(self, alike=alike, not_run=sorted(not_run), crowded=(device, contexts))


def choose(
    world: World, mode: str, rank: int | None, devices: int | None, host_bytes: int | None
) -> Choice:
    """Return the ranks to run.

    Args:
        world: sizes of the run.
        mode: one of MODES.
        rank: ``--rank``: the rank of ``one``.
        devices: devices that the run has; None: not known, real hardware.
        host_bytes: host memory that is free; None: not known.

    Raises:
        RankError: there is no such rank, or ``--rank`` with a mode that chooses for itself.
    """
    if rank is not None and mode not in ("auto", "one"):
        raise RankError(f"--rank {rank} goes with --ranks one, not with --ranks {mode}")
    if rank is not None and not 0 <= rank < world.size:
        raise RankError(f"--rank {rank}: this run has the ranks 0 to {world.size - 1}")
    why = "--rank" if rank is not None else f"--ranks {mode}"
    if mode == "auto":
        reason = None if rank is not None else _too_many(world.size, devices, host_bytes)
        mode = "one" if rank is not None or reason else "all"
        why = why if rank is not None else (reason or "all processes fit this machine")
    if mode == "all" or world.size == 1:
        everyone = [
            ReplicaRanks(r, {k: [k] for k in range(world.replica_size)}) for r in range(world.data)
        ]
        return Choice("all", why, world, everyone, {k: [] for k in range(world.size)}, [])
    if mode == "one":
        index, own = divmod(rank or 0, world.replica_size)
        replicas = [ReplicaRanks(index, {own: list(range(world.replica_size))})]
    else:
        replicas = _edges(world)
    return Choice(mode, why, world, replicas, *_alike(world, replicas))


def _too_many(size: int, devices: int | None, host_bytes: int | None) -> str | None:
    if devices is not None and size > devices:
        return f"{size} ranks, and this machine has {devices} devices"
    if host_bytes is not None and size * WORKER_HOST_BYTES > host_bytes:
        gib = host_bytes / (1 << 30)
        return f"{size} processes of about 1.2 GiB each, and {gib:.1f} GiB of host memory are free"
    return None


def _edges(world: World) -> list[ReplicaRanks]:
    """Return the replicas that differ, each with its ends and the first of each kind of shard."""
    ranks = range(world.replica_size)
    shards = [tuple(world.shard(index, rank) for rank in ranks) for index in range(world.data)]
    replicas = []
    for index, own in enumerate(shards):
        if index not in (0, world.data - 1) and own in shards[:index]:
            continue
        ends = {rank: {rank} for rank in (0, world.replica_size - 1)}
        for rank, shard in enumerate(own):
            if rank not in ends:
                ends.setdefault(own.index(shard), set()).add(rank)
        stands_for = {rank: sorted(others | {rank}) for rank, others in sorted(ends.items())}
        replicas.append(ReplicaRanks(index, stands_for))
    return replicas


def _alike(
    world: World, replicas: Sequence[ReplicaRanks]
) -> tuple[dict[int, list[int]], list[int]]:
    run = [(r.index, rank) for r in replicas for rank in r.stands_for]
    first: dict[tuple[Any, ...], int] = {}
    alike: dict[int, list[int]] = {}
    for index, rank in run:
        number = index * world.replica_size + rank
        alike[number] = []
        first.setdefault(world.shard(index, rank), number)
    not_run = []
    for number in range(world.size):
        if number not in alike:
            like = first.get(world.shard(*divmod(number, world.replica_size)))
            if like is None:
                not_run.append(number)
            else:
                alike[like].append(number)
    return dict(sorted(alike.items())), not_run


def layer_kinds(config: Any, count: int) -> tuple[str, ...]:
    """Return the kind of each layer of a model: attention type, and whether it has experts.

    Args:
        config: the text model's configuration (transformers).
        count: number of layers.
    """
    types = getattr(config, "layer_types", None)
    interval = getattr(config, "full_attention_interval", None)
    dense_first = getattr(config, "first_k_dense_replace", None) or 0
    dense_only = getattr(config, "mlp_only_layers", None) or ()
    step = getattr(config, "decoder_sparse_step", None) or getattr(config, "moe_layer_freq", None)
    kinds = []
    for i in range(count):
        attention = ""
        if isinstance(types, (list, tuple)) and i < len(types):
            attention = str(types[i])
        elif isinstance(interval, int) and interval > 0:
            attention = "full" if (i + 1) % interval == 0 else "linear"
        sparse = i >= dense_first and i not in dense_only
        if isinstance(step, int) and step > 1:
            sparse = sparse and (i + 1 if hasattr(config, "decoder_sparse_step") else i) % step == 0
        elif isinstance(step, (list, tuple)) and i < len(step):
            sparse = bool(step[i])
        kinds.append(f"{attention}{EXPERTS if sparse else '/dense'}")
    return tuple(kinds)
