"""Convert KV-cache bytes to blocks and tokens; check the plan by the budget and the allocation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from vllm_memprof.accounting.budget.equations import counted_per_byte
from vllm_memprof.accounting.budget.layers import page_bytes, request_blocks
from vllm_memprof.accounting.model import Check, Kv, KvGroup, RankReport
from vllm_memprof.accounting.readings.run import RankReadings
from vllm_memprof.accounting.readings.startup import (
    after,
    before,
    engine_figures,
    grown_by,
    growth,
)
from vllm_memprof.accounting.titles import TITLES
from vllm_memprof.engines import row_of_run
from vllm_memprof.record.codec import from_json
from vllm_memprof.record.spans import first_of
from vllm_memprof.text import text
from vllm_memprof.units import Amount, either, known_items, minus, product_or_none, sum_or_none

#: A KV connector gets tensors that begin at whole 2 MiB: keys and values of a layer are padded by
#: as much each. (vllm-ascend 0.23.0, vllm_ascend/worker/model_runner_v1.py::
#: NPUModelRunner._allocate_kv_cache_tensors)
PADDING_BYTES, _PADDED_TENSORS = 2 << 20, 2
#: Phases inside kv_cache_alloc that allocate something else.
_BESIDE_KV = ("kv_connector", "kv_register", "request_pool")
#: The check that holds the plan against the allocator.
ALLOCATED = "allocated for the KV cache = planned bytes, within 1%"


def build_kv(
    plan: dict[str, Any] | None,
    worker_index: Amount,
    allocated_bytes: Amount,
    printed: Mapping[str, int | float] | None = None,
    counted: float = 1.0,
    drafter: Collection[str] | None = None,
    storage_bytes: Amount = None,
) -> Kv:
    """One rank's share of the engine's KV plan, with its cross-checks.

    Args:
        plan: the ``kv_plan`` event of the rank's engine core, None where there was none.
        worker_index: position of the rank in the plan's per-worker lists.
        allocated_bytes: growth of allocated memory while the KV cache was allocated.
        printed: the same figures as the engine printed them.
        counted: bytes that the engine counts per byte that the device holds of the KV cache.
            (``accounting.budget.equations.counted_per_byte``)
        drafter: names of the layers that the rank's drafter has added; None: not known, or none.
        storage_bytes: of the tensors of the KV cache.
    """
    if plan is None:
        return Kv()
    own = {name: _of(plan.get(name), worker_index) for name in ("available_bytes", "planned_bytes")}
    own |= {
        "override_blocks": plan.get("num_gpu_blocks_override"),
        "groups": _of(plan.get("worker_groups"), worker_index) or plan.get("groups"),
        "allocated_bytes": allocated_bytes,
        "storage_bytes": storage_bytes,
    }
    known = known_items(plan | own)
    kv = from_json(Kv, {"group_count": len(plan.get("groups") or ()) or None, **known})
    layers = _of(plan.get("layer_bytes"), worker_index)
    if drafter is not None and layers is not None:
        # bytes of layers of the plan; unknown where one shares its tensor with another
        sizes = [size for name, size in layers.items() if name in drafter]
        kv = replace(kv, draft_layers=len(sizes), draft_bytes=sum_or_none(sizes))
    fitting = _fitting_blocks(plan)
    kv = replace(
        kv,
        bytes_per_block=_bytes_per_block(kv),
        fitting_blocks=min(fitting, default=kv.fitting_blocks),
        own_blocks=_of(fitting, worker_index),
        poorest_rank=fitting.index(min(fitting)) if fitting else None,
    )
    held = kv.planned_bytes
    if held is not None and counted != 1.0:
        held = round(held / counted)
    padded = plan.get("padding_bytes") or 0
    over = minus(allocated_bytes, held)  # the allocator pads each tensor by some bytes
    if plan.get("kv_transfer"):
        padded += padding_bytes(kv.groups)
        kv = replace(kv, alignment_bytes=over)
    kept = None if over is None else 0 <= over <= (held or 0) // 100 + padded
    checks = [*_checks(kv), Check(ALLOCATED, held, allocated_bytes, kept)]
    if printed is not None and kv.recorded:
        checks += _printed_checks(kv, printed)
    return replace(kv, checks=checks)


def padding_bytes(groups: Collection[KvGroup]) -> int:
    """Return the most that a KV connector's alignment adds to the tensors of some layers, bytes."""
    return _PADDED_TENSORS * PADDING_BYTES * sum(group.layers or 0 for group in groups)


def _of(values: Any, worker_index: Amount) -> Any:
    """Return what a list of the plan has for a worker; one that is not known may be the only."""
    if not isinstance(values, list) or (worker_index is None and len(values) > 1):
        return None
    return dict(enumerate(values)).get(worker_index or 0)


def kv_cache(read: RankReadings, rank: RankReport) -> RankReport:
    """Add the KV cache of a rank by its own plan, else its replica's, else any."""
    run, process, of = read.run, read.process, read.startup
    dp_rank, planners = process.identity.dp_rank, run.whole.planners
    own = [each for each in planners if each is process]
    replica = [each for each in planners if each.identity.dp_rank == dp_rank]
    plan = next((each.kv_plan for each in (*own, *replica, *planners)), None)
    span, draft = first_of(process.phases, "kv_cache_alloc"), of.last("draft_load")
    beside = [
        grown_by(inner)
        for inner in process.phases
        if span is not None and inner.phase in _BESIDE_KV and inner.parent == span.order
    ]
    allocated = growth(before(span), after(span), "allocated_bytes")
    layers = None if draft is None else draft.listed("layers")
    printed = run.printed_kv.get(dp_rank, run.printed_kv.get(None, {}))
    kv = build_kv(
        plan,
        process.identity.rank,
        minus(allocated, sum_or_none(beside)),
        printed or run.whole.printed_kv.get(dp_rank, {}),
        counted_per_byte(of.equation, of.figures),
        None if layers is None else {*map(str, layers)},
        of.figure("kv_storage_bytes"),
    )
    if kv.tokens is None and kv.blocks is not None and not kv.recorded:  # of vLLM V0's log
        kv = replace(kv, tokens=tokens_for_blocks(kv, kv.blocks))
    peers = [each for each in run.workers if each.identity.dp_rank == dp_rank]
    stages = {each.identity.pp_rank for each in peers}  # that hold other layers
    if not kv.recorded and of.figure("kv_cache_bytes") is not None and len(stages) < 2:
        # the engine serves with the tokens of the rank that has the least
        least = min(peers, key=lambda each: each.figures.get("kv_cache_bytes") or math.inf)
        granted = engine_figures(least, False, None).get("kv_cache_bytes")
        half = least.figures_half_units.get("kv_cache_bytes", 0)
        size = None if granted is None else int(granted)
        kv = infer_layout(kv, size, half, read.summary.engine)
    return replace(rank, kv=kv)


#: Tokens per block that an engine takes by default; a log does not print it. vLLM's own default is
#: 16, but attention backends and platform plugins set others, up to 128.
_DEFAULT_BLOCK_SIZE = {"vllm-ascend": 128}
_LARGEST_BLOCK = 128
#: Bytes per token and layer: keys and values of the heads of a rank, with head sizes from 64 on and
#: two bytes per number or one, or the 576 numbers of latent attention (MLA): multiples of this.
#: Layouts with scales or an index beside them (656 and 132 bytes of DeepSeek in fp8) are none.
_BYTES_PER_TOKEN_STEP = 64


def infer_layout(kv: Kv, granted_bytes: Amount, half_unit_bytes: int, engine: str | None) -> Kv:
    """Infer blocks and bytes per token of a plan of which a log prints the tokens alone.

    The size of the KV cache over its tokens leaves a range for the bytes per token. A value counts
    as known where the range holds a single multiple of 64 bytes; the range is kept either way.
    Nothing is inferred where a layer does not grow with the length of a request. The result is
    marked derived. The engine's default stands for a block size that is not printed; where it has
    none, blocks stay unknown.
    """
    overridden = is_overridden(kv)
    if (kv.blocks is not None and not overridden) or not granted_bytes or is_hybrid(kv):
        return kv
    block_size = kv.block_size or _DEFAULT_BLOCK_SIZE.get(engine or "")
    if not kv.tokens or (block_size is not None and kv.tokens % block_size):
        return kv
    tokens = kv.tokens  # what the granted memory holds: an override serves another number
    if overridden:
        if not kv.fitting_blocks or block_size is None:
            return kv
        tokens = kv.fitting_blocks * block_size
    # the granted memory holds these blocks and less than one more
    one_more = block_size or math.gcd(tokens, _LARGEST_BLOCK)
    if row_of_run(engine).whole_pools:
        one_more = 0
    low = math.floor((granted_bytes - half_unit_bytes) / (tokens + one_more)) + 1
    high = math.floor((granted_bytes + half_unit_bytes) / tokens)
    last = high // _BYTES_PER_TOKEN_STEP
    single = last > 0 and last == -(-low // _BYTES_PER_TOKEN_STEP)
    per_token = last * _BYTES_PER_TOKEN_STEP if single else None
    found = replace(
        kv,
        bytes_per_token=per_token,
        bytes_per_token_limits=[low, high] if 0 < low <= high else None,
        derived=True,
    )
    if block_size is None:
        return found
    blocks = kv.tokens // block_size
    return replace(
        found,
        block_size=block_size,
        default_block_size=kv.block_size is None,
        blocks=blocks,
        bytes_per_block=None if per_token is None else per_token * block_size,
        override_blocks=blocks if overridden else None,
    )


def is_overridden(kv: Kv) -> bool:
    """Return True where the budget's blocks were replaced.

    A log may not say by how many: the number ends the line and may have been cut.
    """
    unknown = kv.blocks is None and kv.fitting_blocks is not None
    return unknown or kv.override_blocks is not None


def is_hybrid(kv: Kv) -> bool:
    """Return True where tokens / max_model_len is not the engine's concurrency.

    Then the layers do not all grow alike with the length of a request.
    """
    if not kv.tokens or not kv.max_model_len or kv.max_concurrency is None:
        return False
    return abs(kv.tokens / kv.max_model_len - kv.max_concurrency) > 0.01 + 0.01 * kv.max_concurrency


def blocks_per_request(kv: Kv) -> Amount:
    """Return the blocks of one request of ``max_model_len`` tokens, None where it is unknown.

    vllm 0.23.0, vllm/v1/core/kv_cache_utils.py::get_max_concurrency_for_kv_cache_config divides the
    blocks by this whole number, so it can be read back from the concurrency.
    """
    if not kv.blocks or not kv.max_concurrency:
        return None
    return round(kv.blocks / kv.max_concurrency)


def concurrency_at(plan: dict[str, Any], length: int) -> float | None:
    """Return how many requests of ``length`` tokens the planned blocks hold at once.

    None where a layer's rule is not known. The engine's own figure is the same at
    ``max_model_len``: blocks over the blocks that one request takes.
    """
    kv = build_kv(plan, None, None)
    needed = blocks_of_request(replace(kv, max_model_len=min(length, kv.max_model_len or length)))
    if not needed or kv.blocks is None:
        return kv.max_concurrency if length == kv.max_model_len else None
    return kv.blocks / needed


def tokens_for_blocks(kv: Kv, blocks: int) -> Amount:
    """Return the tokens that a number of blocks holds, as the engine prints its "KV cache size".

    vllm/v1/core/kv_cache_utils.py::_report_kv_cache_config: blocks of one group in
    tokens (to 0.19.1), then int(concurrency x max_model_len) (0.20.2 to 0.33.0;
    update_kv_cache_capacity in the latest).
    """
    if kv.derived:
        return None if kv.block_size is None else blocks * kv.block_size
    if kv.tokens_rule == "blocks":
        if not kv.group_count or kv.block_size is None:
            return None
        return blocks // kv.group_count * kv.block_size * kv.context_parallel
    per_request = blocks_per_request(kv)
    if not per_request or kv.max_model_len is None:
        return None
    return int(blocks / per_request * kv.max_model_len)


def tokens_for_bytes(kv: Kv, size_bytes: Amount) -> Amount:
    """Tokens that a KV budget holds: whole blocks only; 0 for a negative budget."""
    if not kv.bytes_per_block or size_bytes is None:
        return None
    return tokens_for_blocks(kv, max(0, size_bytes) // kv.bytes_per_block)


def worth_in_tokens(kv: Kv, size_bytes: Amount) -> Amount:
    """What an amount of memory is worth in KV tokens: whole blocks, rounded down, sign kept."""
    if size_bytes is None:
        return None
    tokens = tokens_for_bytes(kv, abs(size_bytes))
    return tokens if tokens is None or size_bytes >= 0 else -tokens


def _bytes_per_block(kv: Kv) -> Amount:
    """Return the bytes of one block on the device over all layers, as the plan divides them.

    Several groups share pools, one per layer of the largest group; the layers of a single group
    have pages of their own. In a shared backing a block has the bytes of the largest group.
    (vllm 0.11.0 to 0.26.0, vllm/v1/core/kv_cache_utils.py::get_kv_cache_config_from_groups; 0.30.0,
    _get_kv_cache_bytes_per_block)
    """
    if kv.planned_bytes is not None and kv.blocks and kv.planned_bytes % kv.blocks == 0:
        return kv.planned_bytes // kv.blocks
    pages = {group.page_size_bytes for group in kv.groups}
    sizes = [
        group.page_size_bytes * group.layers
        for group in kv.groups
        if group.page_size_bytes is not None and group.layers is not None
    ]
    if not sizes or len(sizes) < len(kv.groups):
        return None
    if kv.group_count == 1:
        return sum(sizes)
    # a group of several layer types: which row is whose is not known
    alike = kv.group_count == len(sizes) and (kv.shared_backing or len(pages) == 1)
    return max(sizes) if alike else None


def _fitting_blocks(plan: dict[str, Any]) -> list[int]:
    """Return the blocks that each worker can hold; empty: not known.

    The engine serves with the minimum over workers.
    """
    blocks, available, planned = map(plan.get, ("blocks", "available_bytes", "planned_bytes"))
    if not blocks or not available or not planned or None in (*available, *planned):
        return []
    counted = plan.get("divisor_bytes") or [None] * len(planned)
    rooms = zip(available, planned, counted, strict=False)
    return [int(room // (divisor or size // blocks or 1)) for room, size, divisor in rooms]


def _checks(kv: Kv) -> list[Check]:
    pages = [page_bytes(group) for group in kv.groups]
    per_block = None
    if None not in pages:
        sized = [replace(g, page_size_bytes=page) for g, page in zip(kv.groups, pages, strict=True)]
        per_block = _bytes_per_block(replace(kv, groups=sized, planned_bytes=None))
    by_type = "bytes per block = those of its layers, by their types", per_block, kv.bytes_per_block
    if kv.planned_bytes is not None:
        product = product_or_none(kv.blocks, per_block)
        name = "planned bytes = blocks x bytes per block of their layers, by type"
        by_type = name, product, kv.planned_bytes
    checks = [Check.of(*by_type)]
    if kv.override_blocks is None:
        left = minus(kv.available_bytes, kv.planned_bytes)
        within = None if left is None else left >= 0
        name = "planned bytes fit into the budget"
        checks.append(Check(name, kv.available_bytes, kv.planned_bytes, within))
        name = "blocks = budget // bytes per block, least of all workers"
        checks.append(Check.of(name, kv.fitting_blocks, kv.blocks))
    else:
        checks.append(Check.of("blocks = --num-gpu-blocks-override", kv.override_blocks, kv.blocks))
    needed = _counted_blocks(kv)
    concurrent = kv.blocks / needed if kv.blocks and needed else None
    tokens = tokens_for_blocks(replace(kv, max_concurrency=concurrent), kv.blocks or 0)
    name = "blocks of a request of max_model_len, by its layers"
    checks.append(Check.of(name, needed, blocks_per_request(kv)))
    name = "tokens = what the engine's release makes of its blocks"
    return [*checks, Check.of(name, tokens if kv.blocks else None, kv.tokens)]


def _printed_checks(kv: Kv, printed: Mapping[str, int | float]) -> list[Check]:
    """Compare the recorded plan with what the engine printed of it into its log.

    The concurrency is printed with two digits and compared in hundredths.
    """
    if not printed:
        return [Check(text("tokens and concurrency as the engine printed them"), None, None, None)]

    checks = []
    for name, title in TITLES["printed_plan"].items():
        if name not in printed:
            continue
        figures = [getattr(kv, name), printed[name]]
        if name == "max_concurrency":
            figures = [each and round(float(f"{each:.2f}") * 100) for each in figures]
        checks.append(Check.of(title, *figures))
    return checks


def blocks_of_request(kv: Kv, length: Amount = None) -> Amount:
    """Return the blocks of a request over all groups.

    The layers of one group share their blocks.

    Args:
        kv: the plan.
        length: as of ``layers.request_blocks``.
    """
    return sum(_blocks_by_group(kv, length).values()) or None


def _blocks_by_group(kv: Kv, length: Amount = None) -> dict[int, int]:
    """Return the blocks of a request by the number of their group; none where one is not known."""
    needed: dict[int, int] = {}
    for number, group in _numbered(kv):
        blocks = request_blocks(group, kv, length)
        if blocks is None:
            return {}
        needed[number] = max(blocks, needed.get(number, 0))
    return needed if kv.group_count == len(needed) else {}


def _numbered(kv: Kv) -> Iterator[tuple[int, KvGroup]]:
    for at, group in enumerate(kv.groups):
        yield either(group.group, 0 if kv.group_count == 1 else at) or 0, group


def _counted_blocks(kv: Kv) -> Amount:
    """Return the blocks of a request as the engine counts them: its bytes over a block's.

    A block is one of the first group, of all its layers where layers of a group differ (their
    spec is then one for all). (vllm 0.23.0,
    vllm/v1/core/kv_cache_utils.py::get_max_concurrency_for_kv_cache_config)
    """
    pages, differ = Counter[int](), len(kv.groups) > (kv.group_count or 1)
    for number, group in _numbered(kv):
        pages[number] += (group.page_size_bytes or 0) * ((group.layers or 0) if differ else 1)
    needed = _blocks_by_group(kv)
    if len(needed) < 2 or not all(pages.values()):
        return sum(needed.values()) or None
    return -(-sum(pages[number] * blocks for number, blocks in needed.items()) // pages[min(pages)])
