"""Convert KV-cache bytes to blocks and tokens; check the plan by the budget and the allocation."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from vllm_memprof.accounting.budget.layers import RequestLimits, page_bytes, request_blocks
from vllm_memprof.accounting.model import Check, Kv, KvGroup
from vllm_memprof.engines import row_of_run
from vllm_memprof.text import text
from vllm_memprof.units import minus

#: A KV connector gets tensors that begin at whole 2 MiB: keys and values of a layer are padded by
#: as much each. (vllm-ascend 0.23.0, vllm_ascend/worker/model_runner_v1.py::
#: NPUModelRunner._allocate_kv_cache_tensors)
PADDING_BYTES, _PADDED_TENSORS = 2 << 20, 2
#: The check that holds the plan against the allocator.
ALLOCATED = "allocated for the KV cache = planned bytes, within 1%"


def build_kv(
    plan: dict[str, Any] | None,
    worker_index: int | None,
    allocated_bytes: int | None,
    printed: Mapping[str, int | float] | None = None,
    counted: float = 1.0,
    drafter: Collection[str] | None = None,
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
    """
    if plan is None:
        return Kv()

    def whole(name: str) -> int | None:
        return _integer(plan.get(name))

    groups = [read_group(data) for data in plan.get("groups") or []]
    blocks = whole("blocks")
    planned = _item(plan.get("planned_bytes"), worker_index)
    available = _item(plan.get("available_bytes"), worker_index)
    count = whole("group_count")
    if count is None and groups:
        count = len(groups)  # of records from before it was recorded
    shared = bool(plan.get("shared_backing"))
    per_block = _bytes_per_block(groups, planned, blocks, count, shared)
    override = whole("num_gpu_blocks_override")
    draft_layers, draft_bytes = _of_drafter(plan, worker_index, drafter)
    fitting = _fitting_blocks(plan, blocks)
    if fitting is None:
        fitting = whole("fitting_blocks")
    kv = Kv(
        tokens=whole("tokens"),
        block_size=whole("block_size"),
        blocks=blocks,
        bytes_per_token=plan.get("bytes_per_token"),
        max_model_len=whole("max_model_len"),
        max_concurrency=plan.get("max_concurrency"),
        bytes_per_block=per_block,
        available_bytes=available,
        planned_bytes=planned,
        groups=groups,
        override_blocks=override,
        fitting_blocks=fitting,
        tokens_rule=plan.get("tokens_rule") or ("concurrency" if groups else None),
        group_count=count,
        context_parallel=whole("context_parallel") or 1,
        draft_bytes=draft_bytes,
        draft_layers=draft_layers,
    )
    limits = RequestLimits(
        kv.max_model_len,
        whole("max_num_batched_tokens"),
        kv.context_parallel,
        plan.get("mamba_cache_mode"),
    )
    padding = _PADDED_TENSORS * PADDING_BYTES * sum(group.layers or 0 for group in groups)
    checks = _checks(kv, limits, shared)
    held = planned if planned is None or counted == 1.0 else round(planned / counted)
    padded = whole("padding_bytes") or 0
    if plan.get("kv_transfer"):
        padded += padding
    over = minus(allocated_bytes, held)  # the allocator pads each tensor by some bytes
    kept = None if over is None else 0 <= over <= (held or 0) // 100 + padded
    checks.append(Check(ALLOCATED, held, allocated_bytes, kept))
    if printed is not None and kv.recorded:
        checks += _printed_checks(kv, printed)
    return replace(kv, checks=checks)


#: Tokens per block that an engine takes by default; a log does not print it. vLLM's own default is
#: 16, but attention backends and platform plugins set others, up to 128.
_DEFAULT_BLOCK_SIZE = {"vllm-ascend": 128}
_LARGEST_BLOCK = 128
#: Bytes per token and layer: keys and values of the heads of a rank, with head sizes from 64 on and
#: two bytes per number or one, or the 576 numbers of latent attention (MLA): multiples of this.
#: Layouts with scales or an index beside them (656 and 132 bytes of DeepSeek in fp8) are none.
_BYTES_PER_TOKEN_STEP = 64


def infer_layout(kv: Kv, granted_bytes: int | None, half_unit_bytes: int, engine: str | None) -> Kv:
    """Infer blocks and bytes per token of a plan of which a log prints the tokens alone.

    The size of the KV cache over its tokens leaves a range for the bytes per token. A value counts
    as known where the range holds a single multiple of 64 bytes; the range is kept either way.
    Nothing is inferred where a layer does not grow with the length of a request. The result is
    marked derived. The engine's default stands for a block size that is not printed; where it has
    none, blocks stay unknown.
    """
    overridden = kv.override_blocks is not None or is_overridden_by_an_unknown(kv)
    if kv.blocks is not None and not overridden:
        return kv
    if not kv.tokens or not granted_bytes or is_hybrid(kv):
        return kv
    block_size = kv.block_size or _DEFAULT_BLOCK_SIZE.get(engine or "")
    if block_size is not None and kv.tokens % block_size:
        return kv
    tokens = kv.tokens  # what the granted memory holds: an override serves another number
    if overridden:
        if not kv.fitting_blocks or block_size is None:
            return kv
        tokens = kv.fitting_blocks * block_size
    # the granted memory holds these blocks and less than one more
    one_more = (
        0 if row_of_run(engine).whole_pools else block_size or math.gcd(tokens, _LARGEST_BLOCK)
    )
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
    return replace(
        found,
        block_size=block_size,
        default_block_size=kv.block_size is None,
        blocks=kv.tokens // block_size,
        bytes_per_block=None if per_token is None else per_token * block_size,
        override_blocks=kv.tokens // block_size if overridden else None,
    )


def is_overridden_by_an_unknown(kv: Kv) -> bool:
    """Return True where a log says that the budget's blocks were replaced, but not by how many.

    The number ends the line and may have been cut.
    """
    return kv.blocks is None and kv.fitting_blocks is not None


def is_hybrid(kv: Kv) -> bool:
    """Return True where tokens / max_model_len is not the engine's concurrency.

    Then the layers do not all grow alike with the length of a request.
    """
    if not kv.tokens or not kv.max_model_len or kv.max_concurrency is None:
        return False
    return abs(kv.tokens / kv.max_model_len - kv.max_concurrency) > 0.01 + 0.01 * kv.max_concurrency


def blocks_per_request(kv: Kv) -> int | None:
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
    limits = RequestLimits(
        min(length, kv.max_model_len or length),
        _integer(plan.get("max_num_batched_tokens")),
        kv.context_parallel,
        plan.get("mamba_cache_mode"),
    )
    needed = _request_blocks(kv, limits)
    if not needed or kv.blocks is None:
        return kv.max_concurrency if length == kv.max_model_len else None
    return kv.blocks / needed


def tokens_for_blocks(kv: Kv, blocks: int) -> int | None:
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


def tokens_for_bytes(kv: Kv, size_bytes: int | None) -> int | None:
    """Tokens that a KV budget holds: whole blocks only; 0 for a negative budget."""
    if not kv.bytes_per_block or size_bytes is None:
        return None
    return tokens_for_blocks(kv, max(0, size_bytes) // kv.bytes_per_block)


def worth_in_tokens(kv: Kv, size_bytes: int | None) -> int | None:
    """What an amount of memory is worth in KV tokens: whole blocks, rounded down, sign kept."""
    if size_bytes is None:
        return None
    tokens = tokens_for_bytes(kv, abs(size_bytes))
    return None if tokens is None else int(tokens if size_bytes >= 0 else -tokens)


def _bytes_per_block(
    groups: list[KvGroup],
    planned: int | None,
    blocks: int | None,
    count: int | None,
    shared_backing: bool,
) -> int | None:
    """Return the bytes of one block on the device over all layers, as the plan divides them.

    Several groups share pools, one per layer of the largest group; the layers of a single group
    have pages of their own. In a shared backing a block has the bytes of the largest group.
    (vllm 0.11.0 to 0.26.0, vllm/v1/core/kv_cache_utils.py::get_kv_cache_config_from_groups; 0.30.0,
    _get_kv_cache_bytes_per_block)
    """
    if planned is not None and blocks and planned % blocks == 0:
        return planned // blocks
    pages = [group.page_size_bytes for group in groups]
    layers = [group.layers for group in groups]
    if not groups or None in pages or None in layers:
        return None
    known = [
        (page, number)
        for page, number in zip(pages, layers, strict=True)
        if page is not None and number
    ]
    if count == 1:
        return sum(page * number for page, number in known)
    if count != len(groups):  # a group of several layer types: which row is whose is not known
        return None
    if shared_backing:
        return max(page * number for page, number in known)
    if len(set(pages)) != 1:
        return None
    return known[0][0] * max(number for _, number in known)


def _fitting_blocks(plan: dict[str, Any], blocks: int | None) -> int | None:
    """Return the blocks that the worker with the least memory can hold.

    The engine serves with the minimum over workers.
    """
    available, planned = plan.get("available_bytes"), plan.get("planned_bytes")
    if (
        not isinstance(available, list)
        or not isinstance(planned, list)
        or len(available) != len(planned)
    ):
        return None
    if (
        not blocks
        or None in available
        or any(size is None or int(size) < blocks for size in planned)
    ):
        return None
    counted = plan.get("divisor_bytes")
    if not isinstance(counted, list) or len(counted) != len(planned):
        counted = [None] * len(planned)  # of records from before it was recorded
    fitting = [
        int(room) // (divisor or int(size) // blocks)
        for room, size, divisor in zip(available, planned, counted, strict=True)
    ]
    return min(fitting, default=None)


def _checks(kv: Kv, limits: RequestLimits, shared_backing: bool) -> list[Check]:
    pages = [page_bytes(group) for group in kv.groups]
    per_block = None
    if pages and None not in pages:
        replaced = [
            replace(g, page_size_bytes=page) for g, page in zip(kv.groups, pages, strict=True)
        ]
        per_block = _bytes_per_block(replaced, None, None, kv.group_count, shared_backing)
    if kv.planned_bytes is None:
        name = "bytes per block = those of its layers, by their types"
        checks = [Check.of(name, per_block, kv.bytes_per_block)]
    else:
        product = None if kv.blocks is None or per_block is None else kv.blocks * per_block
        name = "planned bytes = blocks x bytes per block of their layers, by type"
        checks = [Check.of(name, product, kv.planned_bytes)]
    if kv.override_blocks is None:
        fits = kv.planned_bytes is not None and kv.available_bytes is not None
        within = (kv.planned_bytes or 0) <= (kv.available_bytes or 0) if fits else None
        checks += [
            Check(
                "planned bytes fit into the budget", kv.available_bytes, kv.planned_bytes, within
            ),
            Check.of(
                "blocks = budget // bytes per block, least of all workers",
                kv.fitting_blocks,
                kv.blocks,
            ),
        ]
    else:
        checks.append(Check.of("blocks = --num-gpu-blocks-override", kv.override_blocks, kv.blocks))
    needed = _request_blocks(kv, limits)
    tokens = None
    if kv.blocks is not None and kv.tokens_rule == "blocks":
        tokens = tokens_for_blocks(kv, kv.blocks)
    elif kv.blocks is not None and needed and kv.max_model_len is not None:
        tokens = int(kv.blocks / needed * kv.max_model_len)
    checks += [
        Check.of(
            "blocks of a request of max_model_len, by its layers",
            needed,
            blocks_per_request(kv),
        ),
        Check.of("tokens = what the engine's release makes of its blocks", tokens, kv.tokens),
    ]
    return checks


def _printed_checks(kv: Kv, printed: Mapping[str, int | float]) -> list[Check]:
    """Compare the recorded plan with what the engine printed of it into its log.

    The concurrency is printed with two digits and compared in hundredths.
    """

    if not printed:
        return [Check(text("tokens and concurrency as the engine printed them"), None, None, None)]
    rows = (
        ("tokens", text("tokens as the engine printed them"), kv.tokens),
        ("max_concurrency", text("max concurrency as the engine printed it, in hundredths"),
         kv.max_concurrency),
        ("max_model_len", text("max_model_len as the engine printed it"), kv.max_model_len),
        ("blocks", text("blocks as the engine printed them"), kv.blocks),
    )  # fmt: skip

    def comparable(name: str, figure: float | None) -> float | None:
        hundredths = figure is not None and name == "max_concurrency"
        return round(float(f"{figure:.2f}") * 100) if hundredths else figure

    return [
        Check.of(title, comparable(name, recorded), comparable(name, printed[name]))
        for name, title, recorded in rows
        if name in printed
    ]


def _request_blocks(kv: Kv, limits: RequestLimits) -> int | None:
    """Return the blocks of a request of full length over all groups.

    The layers of one group share their blocks.
    """
    needed = [request_blocks(group, limits) for group in kv.groups]
    if not needed or None in needed:
        return None
    known = [number for number in needed if number is not None]
    if kv.group_count == 1:
        return max(known)
    return sum(known) if kv.group_count == len(known) else None


def _of_drafter(
    plan: dict[str, Any], worker_index: int | None, drafter: Collection[str] | None
) -> tuple[int | None, int | None]:
    """Return how many layers of the plan are the drafter's, and the bytes of their tensors.

    Bytes are None where one of them shares its tensor with another layer.
    """
    of_workers = plan.get("layer_bytes")
    if drafter is None or not isinstance(of_workers, list) or not of_workers:
        return None, None
    index = 0 if worker_index is None and len(of_workers) == 1 else worker_index
    if index is None or not 0 <= index < len(of_workers):
        return None, None
    sizes = [size for name, size in of_workers[index].items() if name in drafter]
    known = [int(size) for size in sizes if size is not None]
    return len(sizes), sum(known) if len(known) == len(sizes) else None


def read_group(data: dict[str, Any]) -> KvGroup:
    """A row of a plan's ``groups``."""
    return KvGroup(
        type=str(data.get("type")),
        layers=_integer(data.get("layers")),
        block_size=_integer(data.get("block_size")),
        page_size_bytes=_integer(data.get("page_size_bytes")),
        bytes_per_token=data.get("bytes_per_token"),
        dtype=data.get("dtype"),
        layout=data.get("layout"),
    )


def _integer(value: Any) -> int | None:
    return None if value is None else int(value)


def _item(values: Any, index: int | None) -> int | None:
    if not isinstance(values, list) or not values:
        return None
    if index is None:
        return _integer(values[0]) if len(values) == 1 else None
    return _integer(values[index]) if 0 <= index < len(values) else None
