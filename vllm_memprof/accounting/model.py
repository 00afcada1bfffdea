"""The ledger's result: what every reporter starts from, and ``report.json`` as other programs read it.

Made by ``accounting.build`` from a ``Run``; holds no file, no clock and no engine object. Bytes are integers, None is
unknown. ``Report.to_json`` is the schema ``memprof.report/1``: its keys may grow, never change.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm_memprof.accounting.reclaim import Cycle as Cycle
from vllm_memprof.accounting.reclaim import EmptyCacheCall as EmptyCacheCall
from vllm_memprof.accounting.reclaim import ReclaimSummary as ReclaimSummary
from vllm_memprof.record.schema import REPORT_SCHEMA, SNAPSHOT_FIELDS, Snapshot
from vllm_memprof.record.spans import ComponentRow as ComponentRow
from vllm_memprof.record.spans import DeviceMemory as DeviceMemory
from vllm_memprof.record.spans import Edge, Span, edges_of

#: Where a figure comes from: read from the device or the allocator, derived from other figures, or set by the
#: profile of a simulated device.
MEASURED, INFERRED, MODELLED = "measured", "inferred", "modelled"


@dataclass(frozen=True)
class RunSummary:
    """The head of a report."""

    id: str
    source: str  # hooks | log
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
    ranks: dict[str, Any] | None = (
        None  # of a plan: which ranks were run, and which they stand for (schema.RANKS)
    )
    versions: dict[str, str] = field(default_factory=dict)  # package -> version, names with "-"
    env: dict[str, str] = field(
        default_factory=dict
    )  # variables that bear on device memory, secrets redacted
    # for timelines, not part of report.json:
    host: str | None = None  # the launcher's
    start_t_ns: int | None = None  # CLOCK_MONOTONIC of that host at launch

    def to_json(self) -> dict[str, Any]:
        status = self.status
        if status == "running" or (status == "ok" and self.truncated):
            status = "truncated"
        return {
            "id": self.id,
            "source": self.source,
            "status": status,
            "model": self.model,
            "engine": self.engine,
            "engine_version": self.engine_version,
            "device": self.device,
            "command": self.command,
            "started": self.started,
            "seconds": self.seconds,
            "mode": self.mode,
            "simulated": self.simulated,
            "device_profile": self.device_profile,
            "running": self.status == "running",
            "truncated": self.truncated,
            "exit_code": self.exit_code,
            "exit_reason": self.exit_reason,
            "notes": self.notes,
            "empty_cache_at": self.empty_cache_at,
            "ranks": self.ranks,
            "versions": self.versions,
            "env": self.env,
        }


def _span_json(span: Span) -> dict[str, Any]:
    return {
        "phase": span.phase,
        "order": span.order,
        "seconds": span.seconds,
        "before": None if span.before is None else span.before.to_json(),
        "after": None if span.after is None else span.after.to_json(),
        "delta": snapshot_delta(span.before, span.after),
        "depth": span.depth,
        "parent": span.parent,
        "open": span.open,
        "error": span.error,
        "detail": dict(span.detail),
        "start_t_ns": span.start_t_ns,
        "end_t_ns": span.end_t_ns,
    }


def _edge_json(span: Span, edge: Edge) -> dict[str, Any]:
    rows, parts, rest = [], [], None
    if edge.owners is not None:
        rows = [row.to_json() for row in edge.owners.rows]
        parts = [row.to_json() for row in edge.owners.parts]
        rest = edge.owners.unaccounted_bytes
    return {
        "phase": span.phase,
        "order": span.order,
        "edge": edge.side,
        "rows": rows,
        "unaccounted_bytes": rest,
        "parts": parts,
    }


def snapshot_delta(before: Snapshot | None, after: Snapshot | None) -> dict[str, int | None] | None:
    """After minus before, field by field; None where either is unknown."""
    if before is None or after is None:
        return None
    delta: dict[str, int | None] = {}
    for name in ("t_ns", *SNAPSHOT_FIELDS):
        old, new = getattr(before, name), getattr(after, name)
        delta[name] = None if old is None or new is None else new - old
    return delta


@dataclass(frozen=True)
class TermRow:
    """A term of the budget equation with its figure in this run."""

    name: str
    bytes: int | None
    subtracted: bool  # False: the engine reports it and subtracts it from nothing
    half_unit_bytes: int = 0  # half of the last printed digit; 0 from hooks

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "bytes": self.bytes,
            "half_unit_bytes": self.half_unit_bytes,
            "subtracted": self.subtracted,
        }


@dataclass(frozen=True)
class Check:
    """Two figures that have to agree."""

    name: str
    expected: int | None  # bytes, or the tokens or blocks that the name speaks of
    found: int | None
    ok: bool | None  # None: one of them is unknown

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "expected": self.expected, "found": self.found, "ok": self.ok}


@dataclass(frozen=True)
class NotSubtracted:
    """Memory that the run held and that no term of its equation subtracts."""

    name: str
    title: str
    bytes: int | None
    how: str
    formula: str  # in the names of figures and snapshots
    source: str  # the moment or the file it was read at
    reason: str | None = None  # why bytes is None
    required: bool = True  # False: does not apply to this run, so the honest figure does without it
    kv_tokens: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "title": self.title,
            "bytes": self.bytes,
            "kv_tokens": self.kv_tokens,
            "how": self.how,
            "formula": self.formula,
            "source": self.source,
            "reason": self.reason,
        }


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

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "parts": list(self.parts)}


@dataclass(frozen=True)
class Budget:
    """The engine's equation, recomputed, and the honest figure beside it."""

    equation: str | None = None  # E0 ... E6; None where no row fits the version
    cite: str | None = None
    chosen_by: str | None = None
    takes_fixed_size: bool = True  # the engine honours --kv-cache-memory-bytes
    override: str | None = None  # "kv_cache_memory_bytes" where a fixed size replaced the equation
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
    fits_request_kv_cache_bytes: int | None = None
    kv_tokens: int | None = None  # what kv_cache_bytes would hold on this rank alone
    fits_request_kv_tokens: int | None = None
    corrections: list[Correction] = field(default_factory=list)  # from logs

    @property
    def residual_bytes(self) -> int | None:
        """What the engine granted minus what its equation gives from the recorded figures."""
        if self.kv_cache_bytes is None or self.engine_kv_cache_bytes is None:
            return None
        return self.engine_kv_cache_bytes - self.kv_cache_bytes

    @property
    def balanced(self) -> bool | None:
        if self.residual_bytes is None:
            return None
        return abs(self.residual_bytes) <= self.tolerance_bytes

    @property
    def implied_requested_bytes(self) -> int | None:
        """The request that the subtracted terms and the granted KV cache give together, where none is known."""
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
        """(name, bytes) of the only unknown subtracted term, as far as the granted KV cache leaves it."""
        missing = [row.name for row in self.terms if row.subtracted and row.bytes is None]
        granted, asked = self.engine_kv_cache_bytes, self.requested_bytes
        if len(missing) != 1 or granted is None or asked is None or self.override:
            return None
        known = sum(row.bytes for row in self.terms if row.subtracted and row.bytes is not None)
        return missing[0], asked - known - granted * divisor

    @property
    def requested_bytes(self) -> int | None:
        return None if self.requested is None else int(self.requested)

    def term(self, name: str) -> int | None:
        return next((row.bytes for row in self.terms if row.name == name), None)

    def to_json(self) -> dict[str, Any]:
        implied = self.implied_requested_bytes
        return {
            "equation": self.equation,
            "requested_bytes": self.requested_bytes,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "terms": [term.to_json() for term in self.terms],
            "kv_cache_bytes": self.kv_cache_bytes,
            "engine_kv_cache_bytes": self.engine_kv_cache_bytes,
            "residual_bytes": self.residual_bytes,
            "tolerance_bytes": self.tolerance_bytes,
            "balanced": self.balanced,
            "fits_request_kv_cache_bytes": self.fits_request_kv_cache_bytes,
            "kv_tokens": self.kv_tokens,
            "fits_request_kv_tokens": self.fits_request_kv_tokens,
            "not_subtracted": [item.to_json() for item in self.not_subtracted],
            **({"implied_requested_bytes": implied} if implied is not None else {}),
            **(
                {"corrections": [row.to_json() for row in self.corrections]}
                if self.corrections
                else {}
            ),
            "requested_exact": self.requested,
            "override": self.override,
            "cite": self.cite,
            "chosen_by": self.chosen_by,
            "checks": [check.to_json() for check in self.checks],
        }


@dataclass(frozen=True)
class KvGroup:
    """The layers that share one layout of KV blocks."""

    type: str  # class name of the engine's KV cache spec
    layers: int | None
    block_size: int | None  # tokens
    page_size_bytes: int | None  # of one layer
    bytes_per_token: float | None  # all layers of the group
    dtype: str | None
    layout: dict[str, Any] | None = (
        None  # heads, sizes, windows: what the formula of its type needs
    )

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


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
    inferred: bool = False  # blocks and bytes per block follow from a log's tokens and GiB
    override_blocks: int | None = (
        None  # --num-gpu-blocks-override: blocks that replaced those of the budget
    )
    fitting_blocks: int | None = None  # blocks that the budget holds, least of all workers
    tokens_rule: str | None = (
        None  # concurrency | blocks: what the engine's number of tokens is made of
    )
    group_count: int | None = None  # groups that share the blocks
    context_parallel: int = 1  # ranks that share the tokens of a request

    def to_json(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "block_size": self.block_size,
            "blocks": self.blocks,
            "bytes_per_token": self.bytes_per_token,
            "max_model_len": self.max_model_len,
            "max_concurrency": self.max_concurrency,
            "bytes_per_block": self.bytes_per_block,
            "available_bytes": self.available_bytes,
            "planned_bytes": self.planned_bytes,
            "groups": [group.to_json() for group in self.groups],
            "checks": [check.to_json() for check in self.checks],
            **({"how": INFERRED} if self.inferred else {}),
            **(
                {
                    "num_gpu_blocks_override": self.override_blocks,
                    "fitting_blocks": self.fitting_blocks,
                }
                if self.override_blocks is not None
                else {}
            ),
        }


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
    oom: dict[str, Any] | None = None
    reclaim: ReclaimSummary | None = (
        None  # the calls of empty_cache added up; None where there was none
    )
    cycles: list[Cycle] = field(default_factory=list)  # of sleep mode and of weight updates
    errors: list[str] = field(default_factory=list)
    spare_bytes: int | None = (
        None  # device total less what all owners held at the worst moment seen
    )
    figures: dict[str, int | float | None] = field(
        default_factory=dict
    )  # the engine's, by their names in the record
    unread: dict[str, str] = field(
        default_factory=dict
    )  # components | processes: why nothing was read
    half_units: dict[str, int] = field(
        default_factory=dict
    )  # of figures that a log prints, bytes: half a last digit

    @property
    def open_phases(self) -> list[str]:
        """Phases that the rank never left, outermost first."""
        return [row.phase for row in self.phases if row.open]

    def to_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "label": self.label,
            "pid": self.pid,
            "device_total_bytes": self.device_total_bytes,
            "initial_free_bytes": self.initial_free_bytes,
            "phases": [_span_json(span) for span in self.phases],
            "device_memory": [_edge_json(*each) for each in edges_of(self.phases)],
            "budget": self.budget.to_json(),
            "kv": self.kv.to_json(),
            "empty_cache": [call.to_json() for call in self.empty_cache],
            "oom": self.oom,
            "host": self.host,
            "dp_rank": self.dp_rank,
            "pp_rank": self.pp_rank,
            "tp_rank": self.tp_rank,
            "ep_rank": self.ep_rank,
            "open_phases": self.open_phases,
            "errors": self.errors,
            "spare_bytes": self.spare_bytes,
            "empty_cache_summary": None if self.reclaim is None else self.reclaim.to_json(),
            "cycles": [cycle.to_json() for cycle in self.cycles],
            "figures": self.figures,
            "unread": self.unread,
            **({"half_units": self.half_units} if self.half_units else {}),
        }


@dataclass(frozen=True)
class Finding:
    """Something a reader should know, with the figure that shows it."""

    id: str
    severity: str  # info | warning | error
    rank: int | None  # None: the run as a whole
    label: str | None
    title: str
    evidence: str
    bytes: int | None = None
    kv_tokens: int | None = None
    action: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "severity": self.severity,
            "rank": self.rank,
            "bytes": self.bytes,
            "kv_tokens": self.kv_tokens,
            "title": self.title,
            "evidence": self.evidence,
            "action": self.action,
            "label": self.label,
        }


@dataclass(frozen=True)
class NotMeasured:
    """A phase that a start-up has, and that this run has no figure for."""

    phase: str
    reason: str
    labels: list[str] | None = None  # ranks it concerns; None: all

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class Report:
    """Everything a reporter needs."""

    run: RunSummary
    ranks: list[RankReport]
    findings: list[Finding] = field(default_factory=list)
    not_measured: list[NotMeasured] = field(default_factory=list)

    @property
    def world_size(self) -> int:
        """Ranks of the engine: more than ``ranks`` where a plan ran some of them alone."""
        said = (self.run.ranks or {}).get("world_size")
        return said if isinstance(said, int) else len(self.ranks)

    def to_json(self, each_rank: bool = False) -> dict[str, Any]:
        """``memprof.report/1``.

        Args:
            each_rank: ``ranks`` is an iterator that makes one rank at a time, not a list of all.
        """
        ranks = (rank.to_json() for rank in self.ranks)
        return {
            "schema": REPORT_SCHEMA,
            "run": self.run.to_json(),
            "ranks": ranks if each_rank else list(ranks),
            "findings": [finding.to_json() for finding in self.findings],
            "not_measured": [row.to_json() for row in self.not_measured],
        }
