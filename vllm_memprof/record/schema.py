"""The run record: names and shapes shared by capture, launcher, loader and accounting.

Standard library only. A run folder holds ``run.json`` (one object),
``events/<host>-<pid>.jsonl`` (one object per line, flushed per event), ``engine.log`` and the
reports; where it was sampled, ``samples/<host>-<pid>/<level>-<number>.jsonl``. Each event line has
``kind`` and ``t_ns`` (CLOCK_MONOTONIC); the other keys depend on the kind:

======================  ============================================================================
kind                    keys
======================  ============================================================================
process (first line)    schema, host, pid, ppid, role, wall, argv, python,
                        versions {package: version}
identity                role, rank, local_rank, dp_rank, pp_rank, tp_rank, ep_rank, device_index,
                        label, soc, world_size, model (null where unknown); may repeat, the last
                        one counts
hook                    hook, phase, need, target, detail, state (pending|bound|missing|absent_ok|
                        overwritten|never_called|error)
phase                   phase, edge (before|after), id, parent, hook, snapshot, error, detail
figures                 source, values {FIGURES name: number or null}
kv_plan                 KV_PLAN keys, role engine_core
ranks                   RANKS keys, of a plan: which ranks are run, and which ranks they stand for
weights                 once a model is loaded: the fields of ``weights.Loaded``
ready                   what (model|server|plan|end); end: the engine is about to kill
                        its own processes
unread                  what (components|processes), reason: a reading that this process does not
                        get; once per reason
failure                 an allocation that failed, read after its exception: message, oom (id of
                        its phase event), site, chain, requests, allocator_settings, snapshot,
                        pools (failures.Failure)
error                   where, message
lost                    since_t_ns, until_t_ns, events, reason: events that could not be written, as
                        on a full disk. until_t_ns and events are null while they cannot: that
                        event stands in room behind the first line, overwritten by a later one
allocations             with --trace-allocations, once per kind of memory: the fields of
                        ``allocations.AllocationTrace``
ray                     of a process on a Ray node: node (its id), folder (null: the run folder;
                        else the folder on that node whose lines are sent back through Ray)
ray_lost                engine core or collector: node (id of a Ray node), rank (null: the node is
                        gone; else the worker of that rank is, and its node lives), reason
======================  ============================================================================

While serving, with ``--sample`` only, in files of a bounded size (``SAMPLES_DIR``). Level 0 has the
samples as they were written; a line of level N + 1 stands for ``FOLD`` lines of level N, with the
lowest and the highest value of each figure. What is no sample is in ``requests-<number>``. Of each
level the newest files are kept.

======================  ============================================================================
kind                    keys
======================  ============================================================================
sample                  a step of a worker, at its end: step (of this process, from 1), steps (since
                        the last sample), requests [[id, scheduled tokens, tokens so far or null]]
                        (SAMPLED_REQUESTS at most), SAMPLE_FIGURES
kv_sample               a step of an engine core: step, steps, KV_SAMPLE_FIGURES
device_sample           of a thread, not of a step; every process: DEVICE_SAMPLE_FIGURES, and
                        ``runtime.<module>``, the bytes of the runtime's counters
stage                   a STAGES passage of a worker: stage, begin_ns, step, items
                        (failures.Item), requests [id], STAGE_FIGURES, error
request                 engine core. edge begin: id, prompt_tokens, items (failures.Item); edge
                        end: id, output_tokens, reason
request_memory          worker, when a request has ended: samples.RequestMemory
dropped                 kinds {kind: lines}: no longer in any file, because of the bound
======================  ============================================================================

Folded lines of the first three have besides: since_ns (of the first line), folded (lines), low and
high {figure: number}; figures without these are those of the last line, ``requests`` is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import ClassVar

from vllm_memprof.record.host import HostRecord
from vllm_memprof.record.weights import Checkpoint
from vllm_memprof.units import minus

#: Bytes unless a name says otherwise. None is unknown, never 0.
Count = int | None

RUN_SCHEMA = "memprof.run/1"
EVENTS_SCHEMA = "memprof.events/1"
REPORT_SCHEMA = "memprof.report/3"

#: Environment variable that switches capture on: the run folder. Without it the plugin is inert.
ENV_RUN_DIR = "MEMPROF_RUN_DIR"
#: "1": a required hook that cannot bind ends the engine instead of leaving a finding.
ENV_STRICT = "MEMPROF_STRICT"
#: Phase after which the engine is to stop; set by ``memprof plan`` to ``kv_plan``.
ENV_STOP_AFTER = "MEMPROF_STOP_AFTER"
#: Phases, comma-separated, at whose end memprof itself empties the cache: an experiment that the
#: user asked for.
ENV_EMPTY_CACHE_AT = "MEMPROF_EMPTY_CACHE_AT"

#: Requests over which allocations that stay are traced. Without it none are.
ENV_TRACE_ALLOCATIONS = "MEMPROF_TRACE_ALLOCATIONS"
#: ``id`` of run.json: a process on another host knows by it that it sees the same run folder.
ENV_RUN_ID = "MEMPROF_RUN_ID"
#: Folder on a Ray node for what its processes record there, sent back through Ray. Without it they
#: write to the run folder where they see it, else to the node's temporary folder.
ENV_NODE_DIR = "MEMPROF_NODE_DIR"
#: "0": this package is installed on every Ray node, and is not sent there.
ENV_RAY_SHIP = "MEMPROF_RAY_SHIP"
#: How often the engine's steps are sampled: "16" (every 16th step) or "5s". Without it never.
ENV_SAMPLE = "MEMPROF_SAMPLE"
#: Folder in which ``memprof share`` says where a plan stops and waits (``engines.vllm.hold``).
ENV_HOLD = "MEMPROF_HOLD"
#: Moments at which a plan to the end can wait: its largest batches are ahead, or have run.
READY, SERVED = MOMENTS = ("ready", "served")
#: Files of a moment in that folder: it is asked to wait; it waits until the file is gone.
HOLD_SUFFIX, HELD_SUFFIX = ".hold", ".held"

#: Variables of a run that processes on other hosts get. Every other one named MEMPROF_ belongs to
#: its host.
TRAVELS = (
    ENV_RUN_DIR,
    ENV_RUN_ID,
    ENV_STRICT,
    ENV_STOP_AFTER,
    ENV_EMPTY_CACHE_AT,
    ENV_TRACE_ALLOCATIONS,
    ENV_SAMPLE,
)

#: The begin of a note on a record that has figures that cannot be.
DAMAGED = "damaged record"
RUN_FILE = "run.json"
EVENTS_DIR = "events"
SAMPLES_DIR = "samples"
#: Snapshots of torch's allocator for PyTorch's memory viewer, with ``--trace-allocations``.
ALLOCATIONS_DIR = "allocations"
ENGINE_LOG = "engine.log"
REPORT_JSON = "report.json"
REPORT_MD = "report.md"

#: Phases at whose end an experiment may empty the cache: those that a worker leaves with its device
#: in use.
EMPTY_CACHE_AT = (
    "weight_load",
    "mm_profile",
    "profile_run",
    "kv_cache_alloc",
    "graph_capture",
    "warm_up",
    "sleep",
    "wake_up",
    "weight_update",
)

#: Names in a ``figures`` event: what the engine itself holds, in bytes unless the name says
#: otherwise.
FIGURES = (
    "device_total_bytes",  # init_snapshot.total_memory
    "initial_free_bytes",  # init_snapshot.free_memory
    "initial_non_torch_bytes",  # init_snapshot.non_torch_memory
    "gpu_memory_utilization",  # float
    "requested_bytes",  # float: requested_memory, unrounded where the engine does not round
    "weights_bytes",  # model_runner.model_memory_usage
    "peak_activation_bytes",  # torch_peak_increase that the equation charges
    "non_torch_increase_bytes",  # non_torch_increase that the equation charges
    "profile_before_allocated_peak_bytes",  # before_profile.torch_peak
    "profile_before_non_torch_bytes",
    "profile_after_allocated_peak_bytes",
    "profile_after_non_torch_bytes",
    "profile_after_free_bytes",
    "profiled_tokens",  # of the largest step of the profile run, a count
    "kv_storage_bytes",  # of the tensors of the KV cache, each storage once
    "graph_bytes",  # npugraph_memory_bytes, null when no graph was captured
    "kv_cache_bytes",  # what determine_available_memory returned
    "kv_cache_memory_bytes_arg",  # --kv-cache-memory-bytes, null when not given
    "startup_plan_bytes",  # the same, set by a start-up plan that the engine kept from a start
    "kv_largest_group_page_bytes",  # of a block, all layers of the largest group: multi-group
    "kv_all_page_bytes",  # of a block, all layers of all groups; null where nothing was scaled
    "kv_layer_reuse",  # float: logical over physical bytes of layers that share buffers
    "kv_planner_input_bytes",  # device bytes that the engine's planner of blocks was given
    "kv_planner_bytes",  # what it returned, host memory or other ranks included
)

#: Lines of one level that a line of the next one stands for.
FOLD = 16
#: Bytes of the files of one process at most, 64 MiB in all: its events, its samples by level, its
#: requests. The newest of a level's ``FILES`` files takes the place of the oldest.
EVENTS_BYTES = 16 << 20
LEVEL_BYTES = (8 << 20, 6 << 20, 6 << 20, 6 << 20, 6 << 20)
REQUESTS_BYTES = 16 << 20
#: Of one process: both, and a line that each file may have more.
MOST_SAMPLES_BYTES = sum(LEVEL_BYTES) + REQUESTS_BYTES + (1 << 20)
FILES = 4
#: What makes a request large, and how many are kept longer than their file by each of these.
RANKED_BY = ("allocated_peak_bytes", "left_allocated_bytes", "left_reserved_bytes")
LARGEST = 10
#: Requests that a sample names at most; ``request_count`` counts all.
SAMPLED_REQUESTS = 8

#: Figures of a ``sample``. Unknown is null.
SAMPLE_FIGURES = (
    "tokens",  # scheduled in this step, all requests
    "request_count",  # requests scheduled in this step
    "allocated_bytes",  # at the end of the step, as the two below
    "reserved_bytes",
    "encoder_cache_bytes",  # outputs of the encoder that the runner keeps; null without an encoder
    # Most that was allocated (reserved) since the last sample. Known only where the allocator's
    # own peak rose in that time, since memprof resets no peak; otherwise null, and the figure lies
    # between the readings and the run peak.
    "allocated_peak_bytes",
    "reserved_peak_bytes",
    "allocated_run_peak_bytes",  # since the process began, folded over the engine's resets
    "reserved_run_peak_bytes",
)

#: Figures of a ``kv_sample``.
KV_SAMPLE_FIGURES = (
    "host_rss_bytes",  # of this process
    "host_shared_bytes",  # of it: files that it has mapped, and memory that others may map too
    "kv_blocks_used",  # not free; a block that only the prefix cache holds counts as free
    "kv_blocks_total",  # without the block that is always empty
    "running",  # requests
    "waiting",
)

#: Figures of a ``device_sample``; null in a process without a device but for those of the host.
DEVICE_SAMPLE_FIGURES = (
    "device_total_bytes",
    "device_free_bytes",
    "non_torch_bytes",
    "allocated_bytes",
    "reserved_bytes",
    "npu_workspace_bytes",  # null: not read while serving
    "connector_device_bytes",  # of the KV connector's own tensors; null without one
    "connector_host_bytes",
    "host_rss_bytes",
    "host_shared_bytes",
    "host_pinned_bytes",
)

#: Multimodal parts of a step, each a ``stage`` event.
STAGES = (
    "mm_encoder",  # the model's encoder, one batch of items of one kind
    "mm_merge",  # text and multimodal embeddings into one tensor
    "mm_cache_insert",  # outputs of the encoder that stay with the runner
    "mm_cache_evict",
)

#: Figures of a ``stage``, in bytes.
STAGE_FIGURES = (
    "allocated_before_bytes",
    "allocated_bytes",  # after it
    "reserved_before_bytes",
    "reserved_bytes",
    "allocated_total_bytes",  # handed out during it, whether or not it was freed again
    "allocated_peak_bytes",  # as of a sample: null where the allocator's peak did not rise
    "reserved_peak_bytes",
    "encoder_cache_bytes",  # after it
)


@dataclass(frozen=True)
class HoldsMore:
    """Something that one rank holds and another does not."""

    #: token_embedding | lm_head | layers | experts | contexts (of the runtime, of other ranks on
    #: its device)
    what: str
    count: Count  # layers; experts in each layer; contexts
    bytes: Count  # as the model's sizes give it


@dataclass(frozen=True)
class PlannedRanks:
    """Which ranks of a plan are run, and which they stand for; numbered over all replicas."""

    mode: str  # one | all | edges
    why: str | None  # what chose the mode
    world_size: int
    run: list[int]
    alike: dict[int, list[int]]  # rank that is run -> others that hold the same and are not run
    not_run: list[int]  # ranks that hold something else than any rank that is run
    #: Rank of ``not_run`` -> what it holds beside what the first rank run holds.
    more: dict[int, list[HoldsMore]] | None = None


@dataclass(frozen=True)
class ModalityStep:
    """The largest batch of one kind of items (images, video, audio) that a plan ran."""

    modality: str
    items: Count  # encoded in one step; None: none was
    encoder_tokens: Count  # that the encoder gave in that step
    encoder_budget: Count  # tokens that it may give in one
    step_tokens: Count  # of that step
    not_run: str | None  # why


@dataclass(frozen=True)
class FullStep:
    """The largest batches that a plan ran, and what bounds them."""

    prefill_tokens: Count  # of the largest step; None: none was run
    decode_requests: Count  # together in a step, each with one token
    decode_length: Count  # tokens of the shortest of them
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    multimodal: bool  # the model takes images, video or audio
    steps: int
    seconds: float
    not_run: str | None  # why
    modalities: list[ModalityStep] | None = None  # None: of a release that ran text alone

    @property
    def ran(self) -> bool:
        """Return whether they ran to their end."""
        return self.not_run is None and bool(self.prefill_tokens)


@dataclass(frozen=True)
class Snapshot:
    """One reading of one device by one process. Integers of bytes; None is unknown, never 0."""

    t_ns: Count = None  # time.monotonic_ns(); None: not known, as in logs
    device_total_bytes: Count = None  # aclrtGetMemInfo / cudaMemGetInfo
    device_free_bytes: Count = None
    allocated_bytes: Count = None  # allocated_bytes.all.current
    allocated_peak_bytes: Count = None  # allocated_bytes.all.peak: since the engine last reset it
    allocated_run_peak_bytes: Count = None  # the same, folded over resets: since the process began
    reserved_bytes: Count = None  # reserved_bytes.all.current
    reserved_peak_bytes: Count = None
    reserved_run_peak_bytes: Count = None
    npu_workspace_bytes: Count = None  # operator workspace of all streams, outside reserved
    graph_pool_bytes: Count = None  # segments of private pools (captured graphs), inside reserved
    #: (total - free) - reserved + unmapped; all processes on the device.
    non_torch_bytes: Count = None
    #: Counted by reserved, not on the device: sleep mode; None before any sleep.
    unmapped_bytes: Count = None
    #: dcmi_get_device_resource_info: all that this process holds, context included.
    process_bytes: Count = None
    other_processes_bytes: Count = None  # the same of all other processes on the device
    host_rss_bytes: Count = None  # resident set of this process
    host_shared_bytes: Count = None  # of it: files, and memory that others may map too
    host_pinned_bytes: Count = None  # blocks of torch's allocator of pinned memory, free ones too
    alloc_retries: Count = None  # num_alloc_retries (a count)
    ooms: Count = None  # num_ooms (a count)
    components: dict[str, dict[str, int]] | None = (
        None  # aclrtGetMemUsageInfo, this process: module -> {"bytes", "peak_bytes"}
    )
    npu_workspace_streams: dict[str, int] | None = None  # stream, as a number -> bytes
    other_processes: dict[str, int] | None = None  # what other_processes_bytes is the sum of

    @property
    def used_bytes(self) -> int | None:
        """Device memory in use, by whatever process."""
        return minus(self.device_total_bytes, self.device_free_bytes)


#: Keys of a snapshot event that hold an object, a figure per name; and those that hold a figure,
#: ``t_ns`` aside. Unknown is null.
SNAPSHOT_OBJECTS = ("components", "npu_workspace_streams", "other_processes")
SNAPSHOT_FIELDS = tuple(
    key.name for key in fields(Snapshot)[1:] if key.name not in SNAPSHOT_OBJECTS
)


@dataclass(frozen=True)
class DeploymentPart:
    """Which part of a deployment on several hosts a run is, by its arguments. None: not said."""

    #: Name that all parts have: of ``--deployment``, else what the arguments have in common, as
    #: ``10.0.0.5:13345``.
    deployment: str | None
    source: str  # option | arguments
    #: Engines with a budget of their own within it, as prefill and decode; None: there is one.
    group: str | None = None
    headless: bool = False  # no API server here
    nodes: Count = None  # hosts that one engine core spans; None: one
    node_rank: Count = None  # among those
    dp_size: Count = None  # engine cores of the deployment
    dp_start: Count = None  # the first of them that runs here
    dp_local: Count = None  # how many run here
    world_size: Count = None  # workers of an engine core


@dataclass
class RunInfo:
    """``run.json``. Written by the launcher at the start (status running) and at the end."""

    id: str
    mode: str  # serve | offline | plan
    model: str
    command: list[str]  # as typed, secrets redacted
    engine_command: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)  # memory-relevant variables, secrets redacted
    versions: dict[str, str] = field(default_factory=dict)
    engine: str | None = None  # vllm-ascend | vllm, or another of ``ENGINES``
    engine_version: str | None = None
    device: str | None = None  # SoC name, or profile name when simulated
    simulated: bool = False
    device_profile: str | None = None
    host: str | None = None
    part: DeploymentPart | None = None  # of a deployment on several hosts
    started: str | None = None  # ISO 8601 UTC
    ended: str | None = None
    seconds: float | None = None
    start_t_ns: Count = None  # CLOCK_MONOTONIC at launch, same clock as the events
    status: str = "running"
    exit_code: Count = None
    exit_reason: str | None = (
        None  # e.g. "worker TP1 (pid 123) was killed by SIGKILL in weight_load"
    )
    notes: list[str] = field(default_factory=list)
    empty_cache_at: list[str] = field(default_factory=list)  # the experiment, if one was asked for
    sample: str | None = None  # as --sample says: every so many steps or seconds; None: not sampled
    ranks: PlannedRanks | None = None  # of a plan whose engine has said so
    until: str | None = None  # of a plan: kv | ready
    checkpoint: Checkpoint | None = None  # None: its files were not found
    full_step: FullStep | None = None  # of a plan that went on until the engine was ready
    host_memory: HostRecord | None = None  # of the launcher's host
    SCHEMA: ClassVar[str] = RUN_SCHEMA

    @property
    def model_name(self) -> str:
        """Return the model without the folder or the organisation that it is in."""
        return self.model.rstrip("/").rpartition("/")[2]

    @property
    def group(self) -> str | None:
        """Return the engines of the deployment that it is of; None: there is one budget."""
        return None if self.part is None else self.part.group

    @property
    def planned_only(self) -> bool:
        """Return whether it is a plan that runs nothing after the KV plan."""
        return self.mode == "plan" and self.until != "ready"

    @property
    def interrupted(self) -> bool:
        """Return whether a person ended the run before it was done."""
        return (self.exit_reason or "").startswith("interrupted by ")
