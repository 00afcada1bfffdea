"""The ranks of a plan that are run, and the ranks each of them stands for.

Plain arithmetic; no engine, no device.

A rank is numbered as vLLM numbers it: data-parallel replica, pipeline stage, prefill-context rank,
tensor rank, the last one fastest (vllm 0.23.0,
``vllm/distributed/parallel_state.py::initialize_model_parallel``). Two ranks are alike when they
hold the same kinds of layers, the same ends of the pipeline and as many experts; vLLM divides
everything else evenly or refuses to start.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from vllm_memprof.engines.driver import OptionError, Options
from vllm_memprof.record.schema import HoldsMore, PlannedRanks

#: Host memory of one worker process on a simulated device, as measured with vllm-ascend 0.23.0:
#: about 1.2 GiB.
WORKER_HOST_BYTES = 1_288_490_189
#: Simulated workers of one core of the host that a plan waits for: a compiled model takes each of
#: them about 20 seconds of its core.
WORKERS_PER_CORE = 2
#: How the kind of a layer with experts ends.
EXPERTS = "/experts"
#: Ranks of a replica that are run -> those of it that they answer for, themselves included.
StandsFor = dict[int, list[int]]


class RankFailure(RuntimeError):
    """A rank was run and did not come through; its own error stands above in the log."""


class Shard(NamedTuple):
    """What a rank holds, as a value to compare."""

    first: bool  # of the pipeline
    last: bool
    layers: tuple[str, ...]  # their kinds; none: not known
    experts: int | None  # of one layer; None: no expert parallelism


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

    def shard(self, number: int) -> Shard:
        """Return what a rank holds, numbered over all replicas.

        Experts that do not divide evenly: the first ranks of the expert group hold one more. (vllm
        0.23.0, ``vllm/model_executor/layers/fused_moe/layer.py::determine_expert_map``)
        """
        replica, rank = divmod(number, self.replica_size)
        group = self.tensor * self.prefill_context  # ranks of a stage
        stage = rank // group
        experts = None
        if self.experts is not None:
            whole, rest = divmod(self.experts, self.data * group)
            experts = whole + (replica * group + rank % group < rest)
        layers = self.stages[stage] if self.stages else ()
        return Shard(stage == 0, stage == self.pipeline - 1, layers, experts)

    def beyond(self, rank: int, other: int) -> list[HoldsMore]:
        """Return what a rank holds that another does not, as the model's sizes give it."""
        own, less = self.shard(rank), self.shard(other)
        found = []
        if own.first > less.first:
            found.append(HoldsMore("token_embedding", None, self.head_bytes))
        if own.last > less.last:
            found.append(HoldsMore("lm_head", None, self.head_bytes))
        if len(own.layers) > len(less.layers):
            found.append(HoldsMore("layers", len(own.layers) - len(less.layers), None))
        more = (own.experts or 0) - (less.experts or 0)
        if more > 0:
            layers = sum(kind.endswith(EXPERTS) for kind in own.layers)
            size = self.expert_bytes if layers else None
            found.append(HoldsMore("experts", more, None if size is None else more * layers * size))
        return found


@dataclass(frozen=True)
class Choice:
    """The ranks that are run. ``alike`` and ``not_run`` hold ranks over all replicas."""

    mode: str  # one | all | edges
    why: str
    world: World
    replicas: dict[int, StandsFor]  # by data-parallel rank
    alike: dict[int, list[int]]  # rank that is run -> other ranks that hold the same
    not_run: list[int] = field(default_factory=list)  # that hold something else than any that is
    crowded: tuple[int, int] | None = None  # (device, contexts of other ranks on it), of a machine

    def to_event(self) -> dict[str, object]:
        """Return the keys of a ``ranks`` event."""
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
        run, alike = sorted(self.alike), {k: others for k, others in self.alike.items() if others}
        return asdict(
            PlannedRanks(self.mode, self.why, self.world.size, run, alike, self.not_run, more)
        )

    def with_fuller_devices(self, device: int, devices: int) -> Choice:
        """Return the choice where every worker of a machine leaves a context on one of its devices.

        The rank there has less memory than its peers; those that were run elsewhere do not stand
        for it.

        Args:
            device: where the contexts are.
            devices: devices of a machine.
        """
        size = self.world.replica_size
        fuller = {each for each in range(self.world.size) if each % size % devices == device}
        alike = {
            rank: others if rank in fuller else [other for other in others if other not in fuller]
            for rank, others in self.alike.items()
        }
        if alike == self.alike:
            return self
        run = {*alike, *(other for others in alike.values() for other in others)}
        not_run = [rank for rank in range(self.world.size) if rank not in run]
        crowded = device, min(size, devices) - 1
        return replace(self, alike=alike, not_run=not_run, crowded=crowded)


def choose(world: World, options: Options, host_bytes: int | None, cores: int) -> Choice:
    """Return the ranks to run.

    Args:
        world: sizes of the run.
        options: ``ranks``, ``rank``, and ``devices``, which are not known on real hardware.
        host_bytes: host memory that is free; None: not known.
        cores: of the host.

    Raises:
        OptionError: there is no such rank, or a rank with a mode that chooses for itself.
    """
    mode, rank, why = options.ranks, options.rank, f"--ranks {options.ranks}"
    if rank is not None:
        if mode not in ("auto", "one"):
            raise OptionError(f"--rank {rank} goes with --ranks one, not with --ranks {mode}")
        if not 0 <= rank < world.size:
            raise OptionError(f"--rank {rank}: this run has the ranks 0 to {world.size - 1}")
        mode, why = "one", "--rank"
    elif mode == "auto":
        mode, why = "one", f"{world.size} ranks, and this machine has {options.devices} devices"
        if options.devices is None or world.size <= options.devices:
            mode, why = "all", "all processes fit this machine"
            if host_bytes is not None and world.size * WORKER_HOST_BYTES > host_bytes:
                free = f"{host_bytes / (1 << 30):.1f} GiB of host memory are free"
                mode, why = "one", f"{world.size} processes of about 1.2 GiB each, and {free}"
            elif options.devices is not None and world.size > WORKERS_PER_CORE * cores:
                mode, why = "one", f"{world.size} processes, and this machine has {cores} cores"
    ranks = range(world.replica_size)
    if mode == "all" or world.size == 1:
        every = {replica: {each: [each] for each in ranks} for replica in range(world.data)}
        return Choice("all", why, world, every, {each: [] for each in range(world.size)})
    if mode == "one":
        replica, own = divmod(rank or 0, world.replica_size)
        replicas: dict[int, StandsFor] = {replica: {own: list(ranks)}}
    else:
        replicas = _edges(world)
    numbers = [each * len(ranks) + own for each, run in replicas.items() for own in run]
    alike: dict[int, list[int]] = {number: [] for number in sorted(numbers)}
    first = {world.shard(number): number for number in reversed(numbers)}
    not_run = []
    for number in range(world.size):
        like = first.get(world.shard(number))
        if like is None:
            not_run.append(number)
        elif number not in alike:
            alike[like].append(number)
    return Choice(mode, why, world, replicas, alike, not_run)


def _edges(world: World) -> dict[int, StandsFor]:
    """Return the replicas that differ, each with its ends and the first of each kind of shard."""
    size = world.replica_size
    shards = [
        [world.shard(replica * size + rank) for rank in range(size)]
        for replica in range(world.data)
    ]
    replicas: dict[int, StandsFor] = {}
    for replica, own in enumerate(shards):
        if replica in (0, world.data - 1) or own not in shards[:replica]:
            stands_for = replicas.setdefault(replica, {})
            for rank, shard in enumerate(own):
                run = rank if rank in (0, size - 1) else own.index(shard)
                stands_for.setdefault(run, []).append(rank)
    return replicas


def layer_kinds(config: Any, count: int) -> tuple[str, ...]:
    """Return the kind of each layer of a model: attention type, and whether it has experts.

    Args:
        config: the text model's configuration (transformers).
        count: number of layers.
    """

    def of(name: str) -> Any:
        return getattr(config, name, None)

    types, interval = of("layer_types") or (), of("full_attention_interval")
    step = of("decoder_sparse_step") or of("moe_layer_freq")
    kinds = []
    for i in range(count):
        attention = ""
        if i < len(types):
            attention = str(types[i])
        elif interval:
            attention = "full" if (i + 1) % interval == 0 else "linear"
        sparse = i >= (of("first_k_dense_replace") or 0) and i not in (of("mlp_only_layers") or ())
        if isinstance(step, int) and step > 1:
            sparse = sparse and (i + 1 if of("decoder_sparse_step") else i) % step == 0
        elif isinstance(step, (list, tuple)) and i < len(step):
            sparse = bool(step[i])
        kinds.append(f"{attention}{EXPERTS if sparse else '/dense'}")
    return tuple(kinds)
