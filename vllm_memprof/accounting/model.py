"""The result of accounting: every reporter starts from it, and ``report.json`` is made of it.

Made by ``accounting.build`` from a ``Run``; holds no file, no clock and no engine object. Bytes are
integers, None is unknown. Its JSON is ``memprof.report/3``: fields may be added, none is renamed
within it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, TypedDict

from vllm_memprof.accounting.evidence import EVIDENCE, Evidence
from vllm_memprof.accounting.serving.trend import GROWING, Verdict
from vllm_memprof.options import read_option
from vllm_memprof.record.allocations import TraceTotals
from vllm_memprof.record.cause import NamedFailure
from vllm_memprof.record.codec import computed, one_of
from vllm_memprof.record.deployment import Gap
from vllm_memprof.record.failures import StepReading, StepRequest
from vllm_memprof.record.host import HostAsk, HostLimit
from vllm_memprof.record.loader import Identity
from vllm_memprof.record.memory_files import MemoryFile
from vllm_memprof.record.samples import RequestFigures
from vllm_memprof.record.schema import REPORT_SCHEMA, RunInfo, Snapshot
from vllm_memprof.record.spans import DERIVED, MEASURED, ComponentRow, How, Span
from vllm_memprof.units import MIB, Amount, either, minus, only_known, sum_or_none

ENGINE, MEMPROF = "engine", "memprof"
EXACT, AT_MOST, AT_LEAST = "exact", "at_most", "at_least"
#: How a host's clock was brought to that of the first host.
FIRST, COLLECTIVES, WALL, UNKNOWN = "first", "collectives", "wall", "unknown"
#: Where the device moved by more than this between the two readings that enclose the engine's, the
#: row agrees with nothing and contradicts nothing.
MOST_TOLERANCE_BYTES = 64 * MIB
PROCESS_ROLES = ("worker", "engine_core", "api")


@dataclass
class RunSummary(RunInfo):
    """The head of a report: ``run.json``, with what its processes and the log add.

    ``status`` is "running" when the report was made before the end. ``versions`` are those of all
    processes, names with "-".
    """

    source: Annotated[str, one_of("hooks", "log", "file")] = "hooks"
    truncated: bool = False
    eager: bool = False  # --enforce-eager was given

    @property
    def evidence(self) -> Evidence:
        """What the run was read from, and what that cannot tell."""
        return EVIDENCE[self.source]

    @property
    @computed
    def outcome(self) -> Annotated[str, one_of("ok", "failed", "terminated", "oom", "truncated")]:
        """How the run ended; truncated where the record does not reach its end."""
        cut = self.status == "running" or (self.status == "ok" and self.truncated)
        return "truncated" if cut else self.status


@dataclass(frozen=True)
class ItemPart:
    """A part of an item or a term; with the others it adds up to it."""

    name: str
    title: str
    bytes: int
    how: How


@dataclass(frozen=True)
class TermRow:
    """A term of the budget equation with its figure in this run."""

    name: str
    bytes: Amount
    subtracted: bool  # False: the engine reports it and subtracts it from nothing
    half_unit_bytes: int = 0  # half of the last printed digit; 0 from hooks
    #: What memprof divides the engine's figure into; the equation has it whole.
    parts: tuple[ItemPart, ...] = ()


def _is_within(difference: float | None, tolerance: int) -> bool | None:
    return None if difference is None else abs(difference) <= tolerance


@dataclass(frozen=True)
class Check:
    """Two figures that have to agree."""

    name: str
    expected: Amount  # bytes, or the tokens or blocks that the name speaks of
    found: Amount
    ok: bool | None  # None: one of them is unknown

    @classmethod
    def of(cls, name: str, expected: float | None, found: float | None, slack: int = 0) -> Check:
        """Compare two figures, that may differ by ``slack``."""
        ok = _is_within(minus(expected, found), slack)
        whole = None if expected is None else int(expected)
        return cls(name, whole, None if found is None else int(found), ok)


@dataclass(frozen=True)
class Reading:
    """Memory of a rank as its evidence gives it, or the reason why it does not."""

    bytes: Amount
    how: How = MEASURED
    source: str | None = None  # the moment, the edges or the file it was read at
    reason: str | None = None  # why a figure is None, or why a comparison decides nothing
    formula: str = ""  # in the names of figures and snapshots
    parts: tuple[ItemPart, ...] = ()  # empty: not divided
    name: str = ""  # of ``accounting.readings.quantities``, or a figure without its unit
    title: str = ""
    required: bool = True  # False: does not apply to this run, and a sum does without it
    kv_tokens: Amount = None
    #: In an audit: the engine's own figure of the same memory, and what may lie between both.
    engine_bytes: Amount = None
    tolerance_bytes: Amount = None
    between: str | None = None

    @property
    @computed
    def difference_bytes(self) -> Amount:
        """The engine's figure less memprof's reading."""
        return minus(self.engine_bytes, self.bytes)

    @property
    @computed
    def undecided(self) -> bool:
        """The device moved between the readings that enclose the engine's: no verdict."""
        return (self.tolerance_bytes or 0) > MOST_TOLERANCE_BYTES

    @property
    @computed
    def agrees(self) -> bool | None:
        """None: nothing to compare, or no verdict."""
        if self.undecided:
            return None
        return _is_within(self.difference_bytes, self.tolerance_bytes or 0)


@dataclass(frozen=True)
class Suggestion:
    """A KV cache size that the engine suggests for ``--kv-cache-memory-bytes``."""

    limit: Annotated[str, one_of("request", "device")]  # that the engine says it fits into
    bytes: int
    how: How
    kv_tokens: Amount
    headroom_bytes: Amount  # fits_device_bytes less it; negative: it does not fit the device


@dataclass(frozen=True)
class Tried:
    """An equation of the engine with a log's figures in it, where the release's own is off."""

    equation: str
    releases: str  # that have it, as a specifier of PEP 440
    kv_cache_bytes: Amount  # by the equation; None: a figure is not in the log
    residual_bytes: Amount  # the granted KV cache less that
    tolerance_bytes: int  # rounding of the printed figures
    given: bool = False  # that of the release, or of the form of the lines
    missing: str | None = None  # the only term that is not in the log
    missing_bytes: Amount = None  # what the available KV cache leaves for it
    missing_tolerance_bytes: int = 0

    @property
    @computed
    def closes(self) -> bool | None:
        """Whether it gives the granted KV cache, within rounding; None: it cannot be computed."""
        return _is_within(self.residual_bytes, self.tolerance_bytes)

    @property
    def leaves_less_than_nothing(self) -> bool:
        """The granted KV cache is larger than the equation allows, whatever the missing term is."""
        size = self.missing_bytes
        return size is not None and size < -self.missing_tolerance_bytes


@dataclass(frozen=True)
class Budget:
    """The engine's equation, recomputed, and the KV caches that fit the request and the device."""

    equation: str | None = None  # E0 ... E6; None where no row fits the version
    cite: str | None = None
    chosen_by: str | None = None
    takes_fixed_size: bool = True  # the engine honours --kv-cache-memory-bytes
    #: What replaced the equation: "kv_cache_memory_bytes", a fixed size, or "startup_plan".
    override: str | None = None
    formula: str | None = None
    device_total_bytes: Amount = None
    gpu_memory_utilization: float | None = None
    requested: float | int | None = (
        None  # exactly as the engine holds it; a float where it does not round
    )
    terms: list[TermRow] = field(default_factory=list)
    kv_cache_bytes: Amount = None  # recomputed
    engine_kv_cache_bytes: Amount = None
    tolerance_bytes: int = 0
    checks: list[Check] = field(default_factory=list)
    not_subtracted: list[Reading] = field(default_factory=list)
    fits_request_bytes: Amount = None
    kv_tokens: Amount = None  # what kv_cache_bytes would hold on this rank alone
    fits_request_tokens: Amount = None
    #: Beside the KV cache at the serving peak; an unknown one makes what follows estimated.
    held_at_peak: list[Reading] = field(default_factory=list)
    fits_device_bytes: Amount = None  # device total less held_at_peak
    fits_device_tokens: Amount = None
    #: The same if the allocator releases every unallocated block and operator workspace.
    fits_device_released_bytes: Amount = None
    #: fits_device_bytes less the KV cache that the rank serves with; negative: it does not fit.
    headroom_bytes: Amount = None
    #: The same with ``fits_device_released_bytes``.
    released_headroom_bytes: Amount = None
    unprofiled_bytes: Amount = None  # that serving may hold beyond the profile run
    device_tolerance_bytes: int = 0  # half-units of what a log printed; 0 from hooks
    suggestions: list[Suggestion] = field(default_factory=list)
    how: dict[str, str] = field(default_factory=dict)  # figure of this budget -> how it is known
    #: Of logs, the same budget from figures that they print; parts are the items of
    #: ``not_subtracted`` that make the difference.
    corrections: list[Reading] = field(default_factory=list)
    #: The engine's figures beside memprof's readings; ``residual_bytes`` compares neither.
    audit: list[Reading] = field(default_factory=list)
    #: Of a log whose release's equation does not close: what every equation of the engine gives.
    tried: list[Tried] = field(default_factory=list)

    @property
    @computed
    def suggested_bytes(self) -> list[int]:
        """The sizes of ``suggestions``."""
        return [each.bytes for each in self.suggestions]

    @property
    @computed
    def device_verdict(
        self,
    ) -> Annotated[str, one_of("fits", "narrow", "release", "exceeds")] | None:
        """Whether the device holds the KV cache and the serving peak; None where it is unknown.

        ``narrow``: it does, with less headroom than profiling may miss. ``release``: it does if the
        allocator releases blocks and workspace that nothing uses, and reserves them again.
        ``exceeds``: not even then.
        """
        slack = self.device_tolerance_bytes
        if self.headroom_bytes is not None and self.headroom_bytes >= -slack:
            margin = self.unprofiled_bytes or 0
            return "fits" if self.headroom_bytes >= margin - slack else "narrow"
        if self.released_headroom_bytes is not None and self.released_headroom_bytes < -slack:
            return "exceeds"
        return None if self.headroom_bytes is None else "release"

    @property
    @computed
    def residual_bytes(self) -> Amount:
        """What the engine granted minus what its equation gives from the recorded figures."""
        return minus(self.engine_kv_cache_bytes, self.kv_cache_bytes)

    @property
    @computed
    def balanced(self) -> bool | None:
        return _is_within(self.residual_bytes, self.tolerance_bytes)

    @property
    @computed
    def implied_requested_bytes(self) -> Amount:
        """Return the request that the subtracted terms and the granted KV cache add up to."""
        if self.requested is not None or not self.subtracted:
            return None
        return sum_or_none([*self.subtracted.values(), self.engine_kv_cache_bytes])

    @property
    def subtracted(self) -> dict[str, Amount]:
        """Return the bytes of the terms that the equation subtracts, by name."""
        return {row.name: row.bytes for row in self.terms if row.subtracted}

    def implied_term(self, divisor: int = 1) -> tuple[str, int] | None:
        """Return (name, bytes) of the only unknown term, as the available KV cache leaves it."""
        missing = [name for name, size in self.subtracted.items() if size is None]
        granted, asked = self.engine_kv_cache_bytes, self.requested_bytes
        if len(missing) != 1 or granted is None or asked is None or self.override:
            return None
        known = sum(only_known(self.subtracted.values()))
        return missing[0], asked - known - granted * divisor

    @property
    @computed
    def requested_bytes(self) -> Amount:
        return None if self.requested is None else int(self.requested)

    @property
    def total_bytes(self) -> Amount:
        """Return the device's total; a log may not print it: the request over its share."""
        asked, share = self.requested, self.gpu_memory_utilization
        derived = round(asked / share) if asked and share else None
        return either(self.device_total_bytes, derived)

    def term(self, name: str) -> Amount:
        return next((row.bytes for row in self.terms if row.name == name), None)


@dataclass(frozen=True)
class KvGroup:
    """The layers that share one layout of KV blocks."""

    type: str  # class name of the engine's KV cache spec
    layers: Amount = None
    block_size: Amount = None  # tokens
    page_size_bytes: Amount = None  # of one layer
    bytes_per_token: float | int | None = None  # all layers of the group
    dtype: str | None = None
    #: Heads, sizes, windows: what the formula of its type needs.
    layout: dict[str, int | str | bool | None] | None = None
    group: Amount = None  # number among the groups that share the blocks


@dataclass(frozen=True)
class KvLimit:
    """How many tokens requests can hold at once by one rule; see ``accounting.budget.usable``."""

    name: str
    title: str
    tokens: int
    source: str  # of the rule: file::symbol, or an issue
    #: A pool beyond it is used all the same, and answers are wrong or the engine ends.
    unchecked: bool = False


@dataclass(frozen=True)
class LargestStep:
    """The largest step that the scheduler can make against the step that was profiled."""

    name: str
    title: str
    largest: int  # in what the title names: tokens, rows of logits
    profiled: Amount
    #: That such a step takes beyond the peak of the profile run, at least; 0: none is shown.
    bytes: Amount


@dataclass(frozen=True)
class Kv:
    """The KV cache that the engine serves with, as one rank holds it.

    What a ``kv_plan`` event has under the same names (``record.schema.KV_PLAN``), and what follows.
    """

    tokens: Amount = None
    block_size: Amount = None
    blocks: Amount = None
    bytes_per_token: float | int | None = None
    max_model_len: Amount = None
    max_concurrency: float | None = None
    bytes_per_block: Amount = None
    available_bytes: Amount = None
    planned_bytes: Amount = None
    groups: list[KvGroup] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    derived: bool = False  # blocks and bytes per block follow from a log's tokens and GiB
    default_block_size: bool = False  # the block size is the engine's default, not printed
    bytes_per_token_limits: list[int] | None = None  # [least, most] by a log's rounding
    override_blocks: Amount = (
        None  # --num-gpu-blocks-override: blocks that replaced those of the budget
    )
    fitting_blocks: Amount = None  # blocks that the budget holds, least of all workers
    tokens_rule: str = "concurrency"  # or blocks: what the engine's number of tokens is made of
    group_count: Amount = None  # groups that share the blocks
    context_parallel: int = 1  # ranks that share the tokens of a request
    max_num_batched_tokens: Amount = None
    mamba_cache_mode: str | None = None  # none | all | align
    shared_backing: bool = False  # groups lie over each other in one allocation
    #: Of ``planned_bytes``, layers of the drafter; None: no drafter, or they share their bytes.
    draft_bytes: Amount = None
    draft_layers: Amount = None
    own_blocks: Amount = None  # that the rank's own budget holds
    #: Rank whose budget holds the fewest blocks, and its label.
    poorest_rank: Amount = None
    poorest: str | None = None
    #: Growth of allocated memory while it was allocated, and the storages of its tensors.
    allocated_bytes: Amount = None
    storage_bytes: Amount = None
    #: Most tokens that requests can hold at once, by the rule that binds.
    usable_tokens: Amount = None
    usable_why: str | None = None
    limits: list[KvLimit] = field(default_factory=list)  # by rule; the first of the least binds
    out_of_reach_tokens: Amount = None
    out_of_reach_bytes: Amount = None  # of ``available_bytes``, that no request can hold
    #: Longest request that is ever admitted, where that is less than max_model_len; its blocks.
    longest_tokens: Amount = None
    needed_blocks: Amount = None  # of a request of one token more
    free_blocks: Amount = None  # without those that the engine keeps for itself
    steps: list[LargestStep] = field(default_factory=list)
    max_num_seqs: Amount = None
    step_tokens: Amount = None  # max_num_batched_tokens
    encoder_tokens: Amount = None  # that the cache of encoder outputs holds
    vocab_size: Amount = None
    hidden_size: Amount = None
    dtype_bytes: Amount = None  # of the model
    max_logprobs: Amount = None
    runner_type: str | None = None
    speculative_tokens: Amount = None
    attention_backend: str | None = None
    prefill_context_parallel: Amount = None
    skip_mm_profiling: bool | None = None
    #: Allocated beyond the plan, where a KV connector gets tensors that begin at whole 2 MiB.
    alignment_bytes: Amount = None

    @property
    def recorded(self) -> bool:
        """Whether it is the engine's plan; else what a log prints of it."""
        return bool(self.groups) or self.planned_bytes is not None


@dataclass(frozen=True)
class Freed:
    """What calls of the allocator's ``empty_cache`` gave back to the device, and took for it."""

    seconds: float | None = None  # with the synchronisation of the device that a call contains
    freed_cached_bytes: Amount = None
    #: None where it was not read apart, as while requests run.
    freed_npu_workspace_bytes: Amount = None
    #: The rest of non-torch; with the workspace where that was not read apart.
    freed_other_bytes: Amount = None
    refilled_bytes: Amount = None  # of what was freed, taken again by the next reading
    #: CANN module -> bytes, by the runtime's counters; None: not read.
    freed_by_module: dict[str, int] | None = None

    @property
    @computed
    def freed_bytes(self) -> Amount:
        """Everything that came back, None where a part is unknown."""
        workspace = self.freed_npu_workspace_bytes or 0
        return sum_or_none([self.freed_cached_bytes, self.freed_other_bytes, workspace])


@dataclass(frozen=True)
class EmptyCacheCall(Freed):
    """One call of the allocator's ``empty_cache``."""

    phase: str | None = None  # the enclosing phase
    site: str | None = None  # file.py:line of the caller, the first frame outside torch
    #: Requests ran; in records that do not know, the call came after the engine was ready.
    while_serving: bool = False
    order: Amount = None  # of its passage, as in phases
    function: str | None = None
    thread: str | None = None
    requests: Amount = None  # that the model runner held
    in_step: bool | None = None  # called from inside a step of the model
    by: str = ENGINE  # engine | memprof (the experiment of --empty-cache-at)
    at: str | None = None  # memprof's own: the phase that had just ended
    after_ready: bool = False  # and before the shutdown
    at_end: bool = False  # in the shutdown or after it
    #: Failed allocations that made the allocator flush itself, since the last call.
    alloc_retries: Amount = None
    refilled_by: str | None = None  # which reading the next was
    chain: tuple[str, ...] = ()  # module:function, the innermost first
    #: Memprof's own: of what was freed, still free at the end of the start-up; for calls after it,
    #: at the next reading.
    kept_bytes: Amount = None
    kept_until: str | None = None


@dataclass(frozen=True)
class Cycle:
    """One sleep and wake-up, one weight update, or one pause with updates in it and its continue,
    with the growth since the one before.

    The first is compared with the moment before it. Residues are signed.
    """

    kind: str  # sleep | pause | weight_update
    number: int  # from 1
    order: int  # of its first passage
    seconds: float | None  # of its passages
    asleep_used_bytes: Amount  # device memory in use while asleep; None for the others
    #: From a log, which prints no more of a cycle: what the sleep freed, and how much more is in
    #: use while asleep than in the sleep before.
    freed_bytes: Amount = None
    asleep_residue_bytes: Amount = None
    used_bytes: Amount = None  # device total - free, after it; other processes count
    free_bytes: Amount = None  # of the device, after it
    reserved_bytes: Amount = None
    residue_bytes: Amount = None  # growth of used
    allocated_residue_bytes: Amount = None
    cached_residue_bytes: Amount = None  # reserved less allocated
    non_torch_residue_bytes: Amount = None
    emptied: bool = False  # empty_cache was called in it, or between it and the one before
    emptied_inside: bool = False  # in it: what is cached after it is what the call left


@dataclass(frozen=True)
class ReclaimSummary:
    """The engine's calls until its shutdown added up, and what is left to free after start-up."""

    calls: int
    engine: Freed
    calls_while_serving: int
    serving: Freed  # of those while requests ran
    left_after: str | None  # the end of the start-up: the phase after which the next two were read
    left_cached_bytes: Amount  # the most that a call there returns from the caching allocator
    left_npu_workspace_bytes: Amount
    left_kv_tokens: Amount = None  # what both are worth


@dataclass(frozen=True)
class FreeBlocks:
    """Reserved memory without a tensor, by the allocator's own segments after the failure; bytes.

    The parts add up to reserved less allocated at that reading.
    """

    stream: str  # whose blocks count as those that could be used
    streams: int  # that have segments, a count
    small: bool  # the pool of small blocks was asked
    expandable: bool  # segments of that pool can grow
    #: Nothing was freed between the failure and the reading; else every figure is of the latter.
    exact: bool
    freed_bytes: Amount  # allocated at the failure less allocated at the reading
    largest_bytes: int  # the largest free block of the pool and stream that were asked
    fitting_bytes: Amount  # in blocks as large as what was asked for; None: not said
    too_small_bytes: Amount
    other_streams_bytes: int  # free blocks of the same pool that belong to other streams
    other_pools_bytes: int  # of the pool for blocks of the other kind, small or large
    graph_pools_bytes: int  # of private pools (captured graphs)
    pending_bytes: int  # freed, but a stream may still use them


@dataclass(frozen=True)
class Remedy:
    """Something that makes room, with the bytes that it gives."""

    id: str
    argument: str
    bytes: Amount  # None: not known, and ``grounds`` says why
    bound: Annotated[str, one_of(EXACT, AT_MOST, AT_LEAST)] | None
    how: How | None
    #: Whether the allocation would have passed with it alone; None: not known.
    enough: bool | None
    grounds: str


@dataclass(frozen=True)
class HostClock:
    """A host's monotonic clock against that of the first host of the deployment; ns.

    True is ``least_ns <= offset <= most_ns``: no rank leaves a collective that blocks before every
    rank has entered it. The estimate assumes that the ranks leave it at the same time.
    """

    by: Annotated[str, one_of(FIRST, COLLECTIVES, WALL, UNKNOWN)]
    offset_ns: Amount  # by which it is ahead; None: nothing tells
    least_ns: Amount = None  # None: no collective bounds it
    most_ns: Amount = None
    #: By which the host's wall clock is ahead of the first host's, as the offset gives it.
    wall_ahead_ns: Amount = None
    #: By which the wall clocks differ at least; 0: they may agree. None: no collective tells.
    wall_differs_ns: Amount = None
    #: The collectives exclude each other: the record is damaged, or a clock was set.
    contradict: bool = False

    @property
    def uncertainty_ns(self) -> Amount:
        """Return the most that the offset is off; None: nothing bounds it."""
        if self.by == FIRST:
            return 0
        if self.offset_ns is None or self.least_ns is None or self.most_ns is None:
            return None
        return max(self.offset_ns - self.least_ns, self.most_ns - self.offset_ns)


@dataclass(frozen=True)
class HostRow:
    """One host of a deployment, or one of its runs there."""

    host: str | None
    folder: str
    labels: list[str]  # of its ranks
    clock: HostClock
    run: RunSummary

    @property
    @computed
    def status(self) -> str:
        """How its run stands; one that ended well may be truncated."""
        return self.run.outcome if self.run.status == "ok" else self.run.status


@dataclass(frozen=True)
class EngineCore:
    """An engine core: its ranks serve with the least KV cache that one of them was granted."""

    group: str | None
    dp_rank: Amount
    hosts: list[str]
    labels: list[str]
    least_label: str | None  # of the rank with the least; None: no grant is known
    granted_bytes: Amount
    tokens: Amount


@dataclass(frozen=True)
class Deployment:
    """Processes on several hosts that serve together."""

    name: str | None
    hosts: list[HostRow]
    cores: list[EngineCore]
    gaps: list[Gap] = field(default_factory=list)

    @property
    def groups(self) -> list[str | None]:
        """Return the groups whose engines have budgets of their own; one where there is but one."""
        return list(dict.fromkeys(row.run.group for row in self.hosts))

    def offsets(self) -> dict[str | None, int]:
        """Return host -> ns by which its monotonic clock is ahead of the first host's."""
        return {
            row.host: row.clock.offset_ns for row in self.hosts if row.clock.offset_ns is not None
        }


@dataclass(frozen=True)
class RequestRow(RequestFigures):
    """One request on one rank, with what its engine core knows."""

    output_tokens: Amount = None  # None: it did not end
    #: Width and height in pixels as the encoder got them; None where they were not to be read.
    images: list[list[int] | None] = field(default_factory=list)
    #: No step of the request was above it.
    allocated_peak_at_most_bytes: Amount = None
    image_tokens: Amount = None  # of the language model, all items
    begin_seconds: float | None = None  # since the launch
    end_seconds: float | None = None
    reason: str | None = None  # why it ended, as the engine names it
    finished: bool | None = None  # False: the process failed or ended with it


@dataclass(frozen=True)
class StageRow:
    """A multimodal stage of one rank: all passages through it while serving."""

    stage: str
    passages: int
    failed: int  # left by an exception
    items: int
    #: Of the passage that handed out most.
    allocated_total_bytes: Amount  # handed out during it, whether or not it was freed again
    held_bytes: Amount  # allocated after it less before it
    allocated_peak_bytes: Amount  # None: the allocator's peak did not rise in any passage
    request: str | None  # id, of that passage's first item
    image: list[int] | None  # size of its largest item
    cache_bytes: Amount = None  # most that the encoder cache held after a passage


@dataclass(frozen=True)
class Point:
    """A stretch of time: the lowest and the highest value of each figure in it."""

    begin_seconds: float  # since the launch
    end_seconds: float
    readings: int  # of the worker; 0 where only other processes were read
    low: dict[str, int]  # CURVES name -> value; a figure that was not read has no key
    high: dict[str, int]


@dataclass(frozen=True)
class MmProfile:
    """What profiling assumed of multimodal items, and what came. None is unknown."""

    modality: str | None
    items: Amount  # in the batch that was profiled
    tokens: Amount  # of the language model, all of them
    size: list[int] | None  # of each, pixels
    bytes: Amount  # most that was allocated in it, less what was before
    merged: bool | None  # whether profiling ran the merge of embeddings
    frames: Amount = None  # of each profiled item, of a video
    came_items: Amount = None  # of the step with most tokens that the encoder ran
    came_tokens: Amount = None
    came_size: list[int] | None = None  # of its largest item
    came_bytes: Amount = None  # most that any passage of the encoder took
    merge_bytes: Amount = None  # handed out by the allocator in the largest merge
    merge_peak_bytes: Amount = None  # most that any merge took, where the peak rose in it
    merge_tokens: Amount = None  # multimodal, of the largest merge
    merge_size: list[int] | None = None


@dataclass(frozen=True)
class OwnerGrowth:
    """One owner while the engine served. Bytes, of KV blocks blocks; None is unknown."""

    owner: str
    verdict: Verdict
    bounded: bool  # its room is fixed at the start: growth is filling
    readings: int
    #: Over requests that finished; None where none is known, or too few.
    bytes_per_request: float | None = None
    bytes_per_request_low: float | None = None  # of the interval, see accounting/serving/trend.py
    bytes_per_request_high: float | None = None
    bytes_per_hour: float | None = None
    bytes_per_hour_low: float | None = None
    bytes_per_hour_high: float | None = None
    grown_bytes: Amount = None  # from the begin of the window that was judged to its end
    requests: Amount = None  # that finished in the window
    seconds: float | None = None  # of the window
    last_bytes: Amount = None  # the last reading
    #: Until the device is full at this rate; None where it does not grow, or the room is unknown.
    requests_until_full: float | None = None
    hours_until_full: float | None = None

    @property
    def grows(self) -> bool:
        """Whether it grows without an end that is known."""
        return self.verdict == GROWING and not self.bounded


@dataclass(frozen=True)
class HostGrowth:
    """Host memory of one process while the engine served: resident, without what is shared."""

    process: Annotated[str, one_of(*PROCESS_ROLES, "unknown")]
    roles: list[str]  # all that it has: with one rank, engine core and worker are one process
    label: str | None  # of the rank, of a worker
    host: str | None
    pid: Amount
    growth: OwnerGrowth


@dataclass(frozen=True)
class AllocationSite:
    """A line of code, and what it allocated that was alive after the requests. Bytes."""

    site: str  # file:line, the innermost outside torch
    function: str  # empty where the stack has none
    path: str  # of the file
    bytes: int
    blocks: int
    grown_bytes: Amount  # since half of the requests; None: there was no such reading
    callers: list[str] = field(default_factory=list)  # of its largest stack, innermost first


@dataclass(frozen=True)
class TracedProcess(TraceTotals):
    """A process whose allocations were traced over some requests."""

    roles: list[str] = field(default_factory=list)
    label: str | None = None
    host: str | None = None
    pid: Amount = None
    sites: list[AllocationSite] = field(default_factory=list)  # those that grew most first


@dataclass(frozen=True)
class Oom:
    """An allocation that failed, as the engine's message and the reading after it tell; bytes."""

    requested_bytes: Amount
    device_total_bytes: Amount
    allocated_bytes: Amount
    reserved_bytes: Amount
    free_bytes: Amount  # of the device
    active_bytes: Amount
    device: str | None
    fragmentation_bytes: Amount  # reserved memory that no tensor held
    other_bytes: Amount  # device memory that was not this allocator's
    components: dict[str, dict[str, int]] | None  # runtime module -> {"bytes", "peak_bytes"}
    process_bytes: Amount = None  # of the device, as the message says: torch and the rest
    process_non_torch_bytes: Amount = None  # of it, not reserved by the allocator
    other_processes_bytes: Amount = None  # total - free - process_bytes
    graph_pools_bytes: Amount = None  # allocated in private pools
    #: Who asked, where it was not torch's caching allocator; None: that one, or not known.
    asked_by: Annotated[str, one_of("npu_workspace", "runtime")] | None = None
    phase: str | None = None  # the innermost phase that was under way, where it is known
    #: Of a log without a phase: the last phase whose lines come before the message.
    last_phase: str | None = None
    #: Of what was asked for, where a message printed it rounded: half its last digit.
    requested_half_unit_bytes: int = 0
    #: Part of a step, see ``record.failures.STAGE_OF``; None: not known.
    stage: str | None = None
    site: str | None = None  # file:line
    chain: list[str] = field(default_factory=list)  # module:function, innermost first
    #: Of the step that failed; None: no step, or not known.
    requests: list[StepRequest] | None = None
    at_request: Amount = None  # counted from 1
    request_count: Amount = None
    input: str | None = None  # name of its file
    #: Of a log: what the parts of a step took before.
    readings: list[StepReading] = field(default_factory=list)
    #: Of the allocator's variable, in the process that failed; None: not read.
    allocator_settings: str | None = None
    #: The device at the failure; those that are no part of another add up to its total.
    owners: list[ComponentRow] = field(default_factory=list)
    free_blocks: FreeBlocks | None = None
    remedies: list[Remedy] = field(default_factory=list)

    @property
    @computed
    def missing_bytes(self) -> Amount:
        """Return what was asked for less what was free on the device; None: free in pieces."""
        missing = minus(self.requested_bytes, self.free_bytes)
        return missing if missing is not None and missing > 0 else None

    @property
    def used_bytes(self) -> Amount:
        """Return what was in use on the device."""
        return minus(self.device_total_bytes, self.free_bytes)

    def taken_since(self, start: Snapshot | None) -> Amount:
        """Return by how much the device got fuller from a reading to the failure, bytes."""
        return minus(self.used_bytes, None if start is None else start.used_bytes)


#: Tensors of one class and dtype. Their causes add up to the difference where it is known.
WeightRow = TypedDict(
    "WeightRow",
    {
        "class": str,
        "dtype": str,  # as torch spells it
        "expected_bytes": Amount,  # the rank's share of the checkpoint; None: not known
        "loaded_bytes": int,
        "difference_bytes": Amount,
        "why": str,
        "causes": dict[str, int],
    },
)


@dataclass(frozen=True)
class Weights:
    """The weights of a rank; the rows add up to ``engine_bytes``."""

    expected_bytes: Amount = None
    loaded_bytes: Amount = None  # of all tensors that the model holds
    engine_bytes: Amount = None  # as the engine has measured it; else the growth of allocated
    rows: list[WeightRow] = field(default_factory=list)
    #: Where the expected bytes are from: the headers of the files, or what the configuration of a
    #: model without files stands for.
    source: Annotated[str, one_of("checkpoint", "layout")] | None = None
    not_allocated_bytes: Amount = None  # reserved after loading, without a tensor
    expandable: bool | None = None  # segments of the allocator grow

    @property
    def by_class(self) -> dict[str, int]:
        """Return the loaded bytes of each class, all dtypes."""
        found: Counter[str] = Counter()
        for row in self.rows:
            found[row["class"]] += row["loaded_bytes"]
        return found


@dataclass(frozen=True)
class HostOwner:
    """Host memory of one owner: of a process, or of all of a host."""

    owner: str  # kind:owner of accounting/owners/host.toml, as pinned:kv_offload, or rest
    bytes: int
    #: What its tensors need; the rest is rounding. None: not known, or no tensors.
    tensor_bytes: Amount = None
    grown_bytes: Amount = None  # since the engine was ready; None: it was not read again

    @property
    @computed
    def how(self) -> How:
        """What is left of the anonymous memory of a process is derived."""
        return DERIVED if "rest" in self.owner else MEASURED


@dataclass(frozen=True)
class HostMemory:
    """Host memory of a process or of a host, by owner, and the limits that apply."""

    rows: list[HostOwner] = field(default_factory=list)
    limits: list[HostLimit] = field(default_factory=list)  # of the host
    host: str | None = None
    asks: list[HostAsk] = field(default_factory=list)  # of the arguments; empty of a process
    used_bytes: Amount = None  # of the cgroup, at the same moment; None of a process

    @property
    @computed
    def unexplained_bytes(self) -> Amount:
        """What the cgroup uses less all rows, signed."""
        return minus(self.used_bytes, self.of(""))

    def of(self, kind: str) -> Amount:
        """Return the bytes of a kind of owners, "" for all; None where nothing was read."""
        sizes = [row.bytes for row in self.rows if row.owner.startswith(kind)]
        return sum(sizes) if self.rows else None


@dataclass(frozen=True)
class ConnectorRow:
    """What one KV connector, or all of a rank together, take on device or host."""

    connector: str | None  # as --kv-transfer-config names it; None: all of the rank
    owner: str  # of ``TITLES["connector_owners"]``
    place: Annotated[str, one_of("device", "host")]
    bytes: Amount
    how: How
    source: str  # file::symbol, attribute, or what was read
    argument: str | None = None  # that sizes it
    formula: str | None = None
    part_of: str | None = None  # what holds it already


class PrintedFigures:
    """What has the engine's figures; a log prints them rounded."""

    figures: Mapping[str, int | float | None]
    half_units: Mapping[str, int]  # of those that a log prints, bytes: half a last digit

    def figure(self, name: str) -> Amount:
        """Return a figure of the engine in whole bytes."""
        size = self.figures.get(name)
        return None if size is None else int(size)

    def rounding(self, *names: str) -> int:
        """Return what the rounding of printed figures adds up to, bytes; 0 from hooks."""
        return sum(self.half_units.get(name, 0) for name in names)


@dataclass(frozen=True)
class RankReport(Identity, PrintedFigures):
    """One worker."""

    label: str = ""
    device_total_bytes: Amount = None
    initial_free_bytes: Amount = None
    #: With the device by owner at their edges.
    phases: list[Span] = field(default_factory=list)
    budget: Budget = field(default_factory=Budget)
    kv: Kv = field(default_factory=Kv)
    weights: Weights | None = None  # None: they were not read
    empty_cache: list[EmptyCacheCall] = field(default_factory=list)
    oom: Oom | None = None
    connectors: list[ConnectorRow] = field(default_factory=list)  # empty: no KV connector
    reclaim: ReclaimSummary | None = (
        None  # the calls of empty_cache added up; None where there was none
    )
    cycles: list[Cycle] = field(default_factory=list)  # of sleep mode and of weight updates
    errors: list[str] = field(default_factory=list)
    figures: dict[str, int | float | None] = field(
        default_factory=dict
    )  # the engine's, by their names in the record
    unread: dict[str, str] = field(
        default_factory=dict
    )  # components | processes: why nothing was read
    half_units: dict[str, int] = field(
        default_factory=dict
    )  # of figures that a log prints, bytes: half a last digit
    #: Quantities of ``accounting.readings.quantities`` -> what was read of them.
    readings: dict[str, Reading] = field(default_factory=dict)
    #: While it served, where the run was sampled; requests in the order in which they began.
    requests: list[RequestRow] = field(default_factory=list)
    stages: list[StageRow] = field(default_factory=list)
    samples: list[Point] = field(default_factory=list)
    growth: list[OwnerGrowth] = field(default_factory=list)
    #: What profiling assumed of multimodal items, and what came.
    mm_profile: MmProfile | None = None
    #: Older samples are lowest and highest values of several readings.
    thinned: bool = False
    #: Kind of event -> lines that are in no file any more, because the files are bounded.
    dropped: dict[str, int] = field(default_factory=dict)
    #: Of a deployment whose engines have budgets of their own: prefill | decode.
    group: str | None = None
    host_memory: HostMemory = field(default_factory=HostMemory)
    #: What other tools measured of its device.
    files: list[MemoryFile] = field(default_factory=list)

    @property
    @computed
    def open_phases(self) -> list[str]:
        """Phases that the rank never left, outermost first."""
        return [row.phase for row in self.phases if row.open]


@dataclass(frozen=True)
class Finding:
    """Something a reader should know, with the figure that shows it."""

    id: str
    severity: Annotated[str, one_of("info", "warning", "error")]
    rank: Amount  # None: the run as a whole
    label: str | None
    title: str
    evidence: str
    bytes: Amount = None
    kv_tokens: Amount = None
    action: str = ""


@dataclass(frozen=True)
class NotMeasured:
    """A phase that a start-up has, and that this run has no figure for."""

    phase: str
    reason: str
    labels: list[str] | None = None  # ranks it concerns; None: all


@dataclass(frozen=True)
class Report:
    """Everything a reporter needs."""

    run: RunSummary
    ranks: list[RankReport]
    findings: list[Finding] = field(default_factory=list)
    not_measured: list[NotMeasured] = field(default_factory=list)
    #: What failed first, by the log; None: nothing, or the run has no log.
    failure: NamedFailure | None = None
    #: Resident host memory of each process while it served, where the run was sampled.
    growth: list[HostGrowth] = field(default_factory=list)
    #: With --trace-allocations: lines of code whose memory stayed.
    allocations: list[TracedProcess] = field(default_factory=list)
    #: Of processes on several hosts; None: one host.
    deployment: Deployment | None = None
    #: Of each host whose launcher has read it.
    host_memory: list[HostMemory] = field(default_factory=list)
    SCHEMA: ClassVar[str] = REPORT_SCHEMA

    @property
    def device_total_bytes(self) -> Amount:
        """The total of the first rank that has one."""
        return next(filter(None, (rank.device_total_bytes for rank in self.ranks)), None)

    @property
    def world_size(self) -> int:
        """Ranks of the engine: more than ``ranks`` where a plan ran some of them alone."""
        return len(self.ranks) if self.run.ranks is None else self.run.ranks.world_size

    @property
    def replicas(self) -> int:
        """Data-parallel replicas; of what is no plan those of which ranks are known."""
        if self.run.mode == "plan":
            return read_option(self.run.engine_command, "data-parallel-size", int) or 1
        return len({rank.dp_rank for rank in self.ranks})
