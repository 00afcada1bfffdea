"""The result of accounting: every reporter starts from it, and ``report.json`` is made of it.

Made by ``accounting.build`` from a ``Run``; holds no file, no clock and no engine object. Bytes are
integers, None is unknown. Its JSON is ``memprof.report/2``: fields may be added, none is renamed
within it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from vllm_memprof.accounting.allocation_sites import AllocationSite as AllocationSite
from vllm_memprof.accounting.allocation_sites import TracedProcess as TracedProcess
from vllm_memprof.accounting.forensics import FreeBlocks as FreeBlocks
from vllm_memprof.accounting.forensics import Remedy as Remedy
from vllm_memprof.accounting.hosts import Deployment as Deployment
from vllm_memprof.accounting.reclaim import Cycle as Cycle
from vllm_memprof.accounting.reclaim import EmptyCacheCall as EmptyCacheCall
from vllm_memprof.accounting.reclaim import ReclaimSummary as ReclaimSummary
from vllm_memprof.accounting.requests import MmProfile as MmProfile
from vllm_memprof.accounting.requests import Point as Point
from vllm_memprof.accounting.requests import RequestRow as RequestRow
from vllm_memprof.accounting.requests import StageRow as StageRow
from vllm_memprof.accounting.serving_growth import HostGrowth as HostGrowth
from vllm_memprof.accounting.serving_growth import OwnerGrowth as OwnerGrowth
from vllm_memprof.record.cause import NamedFailure
from vllm_memprof.record.codec import OPTIONAL, Allowed, computed
from vllm_memprof.record.failures import StepReading as StepReading
from vllm_memprof.record.failures import StepRequest as StepRequest
from vllm_memprof.record.schema import REPORT_SCHEMA, PlannedRanks
from vllm_memprof.record.spans import DERIVED as DERIVED
from vllm_memprof.record.spans import ESTIMATED as ESTIMATED
from vllm_memprof.record.spans import MEASURED as MEASURED
from vllm_memprof.record.spans import MODELLED as MODELLED
from vllm_memprof.record.spans import ComponentRow as ComponentRow
from vllm_memprof.record.spans import DeviceMemory as DeviceMemory
from vllm_memprof.record.spans import How, Span


@dataclass(frozen=True)
class RunSummary:
    """The head of a report."""

    id: str
    source: Annotated[str, Allowed(("hooks", "log"))]
    status: str  # as recorded; "running" when the report was made before the end
    model: str
    mode: str  # serve | offline | plan
    engine: str | None
    engine_version: str | None
    device: str | None
    simulated: bool
    device_profile: str | None
    command: list[str]
    started: str | None
    seconds: float | None
    exit_code: int | None = None
    exit_reason: str | None = None
    truncated: bool = False
    eager: bool = False  # --enforce-eager was given
    notes: list[str] = field(default_factory=list)
    empty_cache_at: list[str] = field(
        default_factory=list
    )  # memprof's own experiment: phases at whose end it called
    ranks: PlannedRanks | None = None  # of a plan: which were run, and which they stand for
    until: str | None = None  # of a plan: kv (it stopped at the KV plan) or ready
    versions: dict[str, str] = field(default_factory=dict)  # package -> version, names with "-"
    env: dict[str, str] = field(
        default_factory=dict
    )  # variables that bear on device memory, secrets redacted
    host: str | None = None  # the launcher's
    start_t_ns: int | None = None  # CLOCK_MONOTONIC of that host at launch

    @property
    @computed
    def outcome(self) -> Annotated[str, Allowed(("ok", "failed", "oom", "truncated"))]:
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
    bytes: int | None
    subtracted: bool  # False: the engine reports it and subtracts it from nothing
    half_unit_bytes: int = 0  # half of the last printed digit; 0 from hooks
    #: What memprof divides the engine's figure into; the equation has it whole.
    parts: tuple[ItemPart, ...] = field(default=(), metadata={"json": OPTIONAL})


@dataclass(frozen=True)
class Check:
    """Two figures that have to agree."""

    name: str
    expected: int | None  # bytes, or the tokens or blocks that the name speaks of
    found: int | None
    ok: bool | None  # None: one of them is unknown


@dataclass(frozen=True)
class AuditRow:
    """A figure of the engine, and memprof's own reading of the same memory beside it; bytes."""

    term: str  # of the equation, or a figure of ``record.schema.FIGURES`` without its unit
    engine_bytes: int | None
    own_bytes: int | None  # from memprof's snapshots alone; None: no independent reading
    tolerance_bytes: int | None  # what may lie between both moments
    how: How | None  # of own_bytes
    source: str | None  # the edges that memprof read it at
    between: str | None  # what lies between memprof's reading and the engine's
    reason: str | None = None  # why a figure is None, or why the row decides nothing
    #: The device moved between the readings that enclose the engine's: no verdict.
    undecided: bool = False

    @property
    @computed
    def difference_bytes(self) -> int | None:
        """The engine's figure less memprof's reading."""
        if self.engine_bytes is None or self.own_bytes is None:
            return None
        return self.engine_bytes - self.own_bytes

    @property
    @computed
    def agrees(self) -> bool | None:
        """None: nothing to compare, or no verdict."""
        if self.difference_bytes is None or self.tolerance_bytes is None or self.undecided:
            return None
        return abs(self.difference_bytes) <= self.tolerance_bytes


@dataclass(frozen=True)
class NotSubtracted:
    """Memory that the run held and that no term of its equation subtracts."""

    name: str
    title: str
    bytes: int | None
    how: How
    formula: str  # in the names of figures and snapshots
    source: str  # the moment or the file it was read at
    reason: str | None = None  # why bytes is None
    required: bool = True  # False: does not apply to this run, and the sum does without it
    kv_tokens: int | None = None
    parts: tuple[ItemPart, ...] = ()  # empty: not divided


@dataclass(frozen=True)
class PeakItem:
    """Memory that a rank holds beside its KV cache at the serving peak."""

    name: str  # of ``accounting.quantities``
    title: str
    bytes: int | None
    how: How
    source: str  # the moment it was read at
    reason: str | None = None  # why bytes is None


@dataclass(frozen=True)
class Suggestion:
    """A KV cache size that the engine suggests for ``--kv-cache-memory-bytes``."""

    limit: Annotated[str, Allowed(("request", "device"))]  # that the engine says it fits into
    bytes: int
    how: How
    kv_tokens: int | None
    spare_bytes: int | None  # fits_device_bytes less it; negative: it does not fit the device


@dataclass(frozen=True)
class Correction:
    """Another reading of the same budget, from figures that the log itself prints."""

    name: str
    title: str
    bytes: int
    kv_tokens: int | None
    formula: str
    parts: tuple[
        str, ...
    ] = ()  # not_subtracted items that make the difference to the run's own equation


@dataclass(frozen=True)
class Tried:
    """An equation of the engine with a log's figures in it, where the release's own is off."""

    equation: str
    releases: str  # that have it, as a specifier of PEP 440
    kv_cache_bytes: int | None  # by the equation; None: a figure is not in the log
    residual_bytes: int | None  # the granted KV cache less that
    tolerance_bytes: int  # rounding of the printed figures
    given: bool = False  # that of the release, or of the form of the lines
    missing: str | None = None  # the only term that is not in the log
    missing_bytes: int | None = None  # what the granted KV cache leaves for it
    missing_tolerance_bytes: int = 0

    @property
    @computed
    def closes(self) -> bool | None:
        """Whether it gives the granted KV cache, within rounding; None: it cannot be computed."""
        if self.residual_bytes is None:
            return None
        return abs(self.residual_bytes) <= self.tolerance_bytes

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
    device_total_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    requested: float | int | None = (
        None  # exactly as the engine holds it; a float where it does not round
    )
    terms: list[TermRow] = field(default_factory=list)
    kv_cache_bytes: int | None = None  # recomputed
    engine_kv_cache_bytes: int | None = None
    tolerance_bytes: int = 0
    checks: list[Check] = field(default_factory=list)
    not_subtracted: list[NotSubtracted] = field(default_factory=list)
    fits_request_bytes: int | None = None
    kv_tokens: int | None = None  # what kv_cache_bytes would hold on this rank alone
    fits_request_tokens: int | None = None
    #: Beside the KV cache at the serving peak; an unknown one makes what follows estimated.
    held_at_peak: list[PeakItem] = field(default_factory=list)
    fits_device_bytes: int | None = None  # device total less held_at_peak
    fits_device_tokens: int | None = None
    #: The same if the allocator releases every unallocated block and operator workspace.
    fits_device_released_bytes: int | None = None
    #: fits_device_bytes less the KV cache that the rank serves with; negative: it does not fit.
    spare_bytes: int | None = None
    #: The same with ``fits_device_released_bytes``.
    released_spare_bytes: int | None = None
    unprofiled_bytes: int | None = None  # that serving may hold beyond the profile run
    device_tolerance_bytes: int = 0  # half-units of what a log printed; 0 from hooks
    suggestions: list[Suggestion] = field(default_factory=list)
    how: dict[str, str] = field(default_factory=dict)  # figure of this budget -> how it is known
    corrections: list[Correction] = field(default_factory=list)  # from logs
    #: The engine's figures beside memprof's readings; ``residual_bytes`` compares neither.
    audit: list[AuditRow] = field(default_factory=list)
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
    ) -> Annotated[str, Allowed(("fits", "narrow", "release", "exceeds"))] | None:
        """Whether the device holds the KV cache and the serving peak; None where it is unknown.

        ``narrow``: it does, with less to spare than profiling may miss. ``release``: it does if the
        allocator releases blocks and workspace that nothing uses, and reserves them again.
        ``exceeds``: not even then.
        """
        slack = self.device_tolerance_bytes
        if self.spare_bytes is not None and self.spare_bytes >= -slack:
            margin = 0 if self.unprofiled_bytes is None else self.unprofiled_bytes
            return "fits" if self.spare_bytes >= margin - slack else "narrow"
        if self.released_spare_bytes is not None and self.released_spare_bytes < -slack:
            return "exceeds"
        return None if self.spare_bytes is None else "release"

    @property
    @computed
    def residual_bytes(self) -> int | None:
        """What the engine granted minus what its equation gives from the recorded figures."""
        if self.kv_cache_bytes is None or self.engine_kv_cache_bytes is None:
            return None
        return self.engine_kv_cache_bytes - self.kv_cache_bytes

    @property
    @computed
    def balanced(self) -> bool | None:
        if self.residual_bytes is None:
            return None
        return abs(self.residual_bytes) <= self.tolerance_bytes

    @property
    @computed
    def implied_requested_bytes(self) -> int | None:
        """Return the request that the subtracted terms and the granted KV cache add up to."""
        sizes = [row.bytes for row in self.terms if row.subtracted]
        known = [size for size in sizes if size is not None]
        if (
            self.requested is not None
            or self.engine_kv_cache_bytes is None
            or not known
            or len(known) < len(sizes)
        ):
            return None
        return sum(known) + self.engine_kv_cache_bytes

    def implied_term(self, divisor: int = 1) -> tuple[str, int] | None:
        """Return (name, bytes) of the only unknown term, as the granted KV cache leaves it."""
        missing = [row.name for row in self.terms if row.subtracted and row.bytes is None]
        granted, asked = self.engine_kv_cache_bytes, self.requested_bytes
        if len(missing) != 1 or granted is None or asked is None or self.override:
            return None
        known = sum(row.bytes for row in self.terms if row.subtracted and row.bytes is not None)
        return missing[0], asked - known - granted * divisor

    @property
    @computed
    def requested_bytes(self) -> int | None:
        return None if self.requested is None else int(self.requested)

    def term(self, name: str) -> int | None:
        return next((row.bytes for row in self.terms if row.name == name), None)


@dataclass(frozen=True)
class KvGroup:
    """The layers that share one layout of KV blocks."""

    type: str  # class name of the engine's KV cache spec
    layers: int | None
    block_size: int | None  # tokens
    page_size_bytes: int | None  # of one layer
    bytes_per_token: float | None  # all layers of the group
    dtype: str | None
    layout: dict[str, int | str | bool | None] | None = (
        None  # heads, sizes, windows: what the formula of its type needs
    )


@dataclass(frozen=True)
class Kv:
    """The KV cache that the engine serves with, as one rank holds it."""

    tokens: int | None = None
    block_size: int | None = None
    blocks: int | None = None
    bytes_per_token: float | int | None = None
    max_model_len: int | None = None
    max_concurrency: float | None = None
    bytes_per_block: int | None = None
    available_bytes: int | None = None
    planned_bytes: int | None = None
    groups: list[KvGroup] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    derived: bool = False  # blocks and bytes per block follow from a log's tokens and GiB
    default_block_size: bool = False  # the block size is the engine's default, not printed
    bytes_per_token_limits: list[int] | None = None  # [least, most] by a log's rounding
    override_blocks: int | None = (
        None  # --num-gpu-blocks-override: blocks that replaced those of the budget
    )
    fitting_blocks: int | None = None  # blocks that the budget holds, least of all workers
    tokens_rule: str | None = (
        None  # concurrency | blocks: what the engine's number of tokens is made of
    )
    group_count: int | None = None  # groups that share the blocks
    context_parallel: int = 1  # ranks that share the tokens of a request
    #: Of ``planned_bytes``, layers of the drafter; None: no drafter, or they share their bytes.
    draft_bytes: int | None = field(default=None, metadata={"json": OPTIONAL})
    draft_layers: int | None = field(default=None, metadata={"json": OPTIONAL})

    @property
    def recorded(self) -> bool:
        """Whether it is the engine's plan; else what a log prints of it."""
        return bool(self.groups) or self.planned_bytes is not None


@dataclass(frozen=True)
class Oom:
    """An allocation that failed, as the engine's message and the reading after it tell; bytes."""

    requested_bytes: int | None
    device_total_bytes: int | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    free_bytes: int | None  # of the device
    active_bytes: int | None
    device: str | None
    fragmentation_bytes: int | None  # reserved memory that no tensor held
    other_bytes: int | None  # device memory that was not this allocator's
    components: dict[str, dict[str, int]] | None  # runtime module -> {"bytes", "peak_bytes"}
    process_bytes: int | None = None  # of the device, as the message says: torch and the rest
    process_non_torch_bytes: int | None = None  # of it, not reserved by the allocator
    other_processes_bytes: int | None = None  # total - free - process_bytes
    graph_pools_bytes: int | None = None  # allocated in private pools
    #: Who asked, where it was not torch's caching allocator; None: that one, or not known.
    asked_by: Annotated[str, Allowed(("npu_workspace", "runtime"))] | None = None
    phase: str | None = None  # the innermost phase that was under way, where it is known
    #: Of a log without a phase: the last phase whose lines come before the message.
    last_phase: str | None = None
    #: Of what was asked for, where a message printed it rounded: half its last digit.
    requested_half_unit_bytes: int = field(default=0, metadata={"json": OPTIONAL})
    #: Part of a step, see ``record.failures.STAGE_OF``; None: not known.
    stage: str | None = field(default=None, metadata={"json": OPTIONAL})
    site: str | None = field(default=None, metadata={"json": OPTIONAL})  # file:line
    chain: list[str] = field(
        default_factory=list, metadata={"json": OPTIONAL}
    )  # module:function, innermost first
    #: Of the step that failed; None: no step, or not known.
    requests: list[StepRequest] | None = field(default=None, metadata={"json": OPTIONAL})
    at_request: int | None = field(default=None, metadata={"json": OPTIONAL})  # counted from 1
    request_count: int | None = field(default=None, metadata={"json": OPTIONAL})
    input: str | None = field(default=None, metadata={"json": OPTIONAL})  # name of its file
    #: Of a log: what the parts of a step took before.
    readings: list[StepReading] = field(default_factory=list, metadata={"json": OPTIONAL})
    #: Of the allocator's variable, in the process that failed; None: not read.
    allocator_settings: str | None = field(default=None, metadata={"json": OPTIONAL})
    #: The device at the failure; those that are no part of another add up to its total.
    owners: list[ComponentRow] = field(default_factory=list, metadata={"json": OPTIONAL})
    free_blocks: FreeBlocks | None = field(default=None, metadata={"json": OPTIONAL})
    remedies: list[Remedy] = field(default_factory=list, metadata={"json": OPTIONAL})

    @property
    @computed
    def missing_bytes(self) -> int | None:
        """Return what was asked for less what was free on the device; None: free in pieces."""
        if self.requested_bytes is None or self.free_bytes is None:
            return None
        missing = self.requested_bytes - self.free_bytes
        return missing if missing > 0 else None


@dataclass(frozen=True)
class RankReport:
    """One worker."""

    rank: int | None
    label: str
    pid: int | None
    host: str | None
    dp_rank: int | None
    pp_rank: int | None
    tp_rank: int | None
    ep_rank: int | None
    device_total_bytes: int | None
    initial_free_bytes: int | None
    phases: list[Span]  # with the device by owner at their edges
    budget: Budget
    kv: Kv
    empty_cache: list[EmptyCacheCall]
    oom: Oom | None = None
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
    lines: tuple[int, int] | None = (
        None  # of a log, the first and the last of a worker that nothing names
    )
    #: While it served, where the run was sampled; requests in the order in which they began.
    requests: list[RequestRow] = field(default_factory=list, metadata={"json": OPTIONAL})
    stages: list[StageRow] = field(default_factory=list, metadata={"json": OPTIONAL})
    samples: list[Point] = field(default_factory=list, metadata={"json": OPTIONAL})
    growth: list[OwnerGrowth] = field(default_factory=list, metadata={"json": OPTIONAL})
    #: What profiling assumed of multimodal items, and what came.
    mm_profile: MmProfile | None = field(default=None, metadata={"json": OPTIONAL})
    #: Older samples are lowest and highest values of several readings.
    thinned: bool = field(default=False, metadata={"json": OPTIONAL})
    #: Kind of event -> lines that are in no file any more, because the files are bounded.
    dropped: dict[str, int] = field(default_factory=dict, metadata={"json": OPTIONAL})
    #: Of a deployment whose engines have budgets of their own: prefill | decode.
    group: str | None = field(default=None, metadata={"json": OPTIONAL})

    @property
    @computed
    def open_phases(self) -> list[str]:
        """Phases that the rank never left, outermost first."""
        return [row.phase for row in self.phases if row.open]


@dataclass(frozen=True)
class Finding:
    """Something a reader should know, with the figure that shows it."""

    id: str
    severity: Annotated[str, Allowed(("info", "warning", "error"))]
    rank: int | None  # None: the run as a whole
    label: str | None
    title: str
    evidence: str
    bytes: int | None = None
    kv_tokens: int | None = None
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
    growth: list[HostGrowth] = field(default_factory=list, metadata={"json": OPTIONAL})
    #: With --trace-allocations: lines of code whose memory stayed.
    allocations: list[TracedProcess] = field(default_factory=list, metadata={"json": OPTIONAL})
    #: Of processes on several hosts; None: one host.
    deployment: Deployment | None = field(default=None, metadata={"json": OPTIONAL})
    SCHEMA: ClassVar[str] = REPORT_SCHEMA

    @property
    def world_size(self) -> int:
        """Ranks of the engine: more than ``ranks`` where a plan ran some of them alone."""
        return len(self.ranks) if self.run.ranks is None else self.run.ranks.world_size
