"""Findings about the engine's plan of the KV cache, and about what was allocated for it."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_memprof.accounting.budget.equations import divisor_of
from vllm_memprof.accounting.budget.kv import ALLOCATED, is_hybrid, tokens_for_blocks
from vllm_memprof.accounting.findings.advice import keep_apart
from vllm_memprof.accounting.findings.needs import KV_ALLOCATED, NOTHING
from vllm_memprof.accounting.findings.registry import (
    INFO,
    WARNING,
    Context,
    Found,
    RankContext,
    finding,
    finding_of_run,
)
from vllm_memprof.text import join, text


@finding(
    "block-override-beyond-budget",
    severity=WARNING,
    title=text("--num-gpu-blocks-override plans more KV blocks than the budget holds"),
    needs=NOTHING,
)
def block_override_beyond_budget(context: RankContext) -> Iterator[Found]:
    """Find plans with more blocks than the KV cache of the budget holds.

    Meaning:
        The engine takes the number of `--num-gpu-blocks-override` as it is, and allocates more
        than its equation granted.

    Computed:
        Blocks asked for less the blocks that the budget holds
        (`vllm/v1/core/kv_cache_utils.py::may_override_num_blocks`), times bytes per block.

    To do:
        Leave the option out, or ask for the number that the budget holds.
    """
    kv = context.rank.kv
    asked, fitting = kv.override_blocks, kv.fitting_blocks
    if asked is None or fitting is None or asked <= fitting:
        return
    over = asked - fitting
    evidence = text(
        "{asked:,} blocks, and the budget holds {fitting:,}: {over:,} too many",
        asked=asked,
        fitting=fitting,
        over=over,
    )
    yield Found(
        evidence,
        None if kv.bytes_per_block is None else over * kv.bytes_per_block,
        text("--num-gpu-blocks-override {count} fits, as does none at all", count=fitting),
        kv_tokens=tokens_for_blocks(kv, over),
    )


@finding(
    "kv-allocation-off-plan",
    severity=WARNING,
    title=text("The KV cache took another amount of memory than the engine planned for it"),
    needs=KV_ALLOCATED,
)
def kv_allocation_off_plan(context: RankContext) -> Iterator[Found]:
    """Find KV caches whose tensors took more or less than the plan.

    Meaning:
        The engine sized the KV cache by its plan, and the tensors on the device have another size:
        some layouts allocate a tensor per layer where the plan shares one between groups.

    Computed:
        Growth of allocated memory in kv_cache_alloc less the planned bytes, where it is negative,
        or more than 1 % and the padding of a KV connector
        (`vllm_memprof/accounting/budget/kv.py::ALLOCATED`).

    To do:
        Report it with the run folder; until then give the KV cache a fixed size that leaves the
        difference free.
    """
    rows = context.rank.kv.checks
    check = next((row for row in rows if row.name == ALLOCATED and row.ok is False), None)
    if check is None or check.found is None or check.expected is None:
        return
    evidence = text(
        "planned {expected:gib} GiB, allocated {found:gib} GiB",
        expected=check.expected,
        found=check.found,
    )
    yield Found(evidence, check.found - check.expected)


@finding_of_run(
    "hybrid-concurrency",
    severity=INFO,
    title=text(
        "KV cache tokens over max_model_len is not the number of requests that fit: some layers "
        "do not grow with the length of a request"
    ),
    needs=NOTHING,
)
def hybrid_concurrency(context: Context) -> Iterator[Found]:
    """Find plans whose printed size does not tell how many requests fit.

    Meaning:
        Sliding-window and state-space layers hold a bounded number of blocks per request. The size
        in tokens and the concurrency that the engine prints then do not belong together by a
        division.

    Computed:
        Tokens / max_model_len differs from the engine's concurrency by more than 1 %
        (`vllm/v1/core/kv_cache_utils.py::get_max_concurrency_for_kv_cache_config`).

    To do:
        Go by the concurrency. `memprof plan` computes it for other lengths.
    """
    for rank in context.ranks:
        kv = rank.kv
        if is_hybrid(kv) and kv.tokens and kv.max_model_len:
            yield Found(
                text(
                    "{tokens:,} / {length:,} = {quotient:.2f}, the engine's concurrency is "
                    "{concurrency:.2f}x",
                    tokens=kv.tokens,
                    length=kv.max_model_len,
                    quotient=kv.tokens / kv.max_model_len,
                    concurrency=kv.max_concurrency,
                )
            )
            return  # the plan is the same on every rank


@finding(
    "budget-halved",
    severity=INFO,
    title=text(
        "On this device the engine grants half of its budget and keeps as much for operator "
        "workspace"
    ),
    needs=NOTHING,
)
def budget_halved(context: RankContext) -> Iterator[Found]:
    """Find KV caches of 310P devices, which get half of the budget.

    Meaning:
        On 310P the engine keeps half of what its equation leaves for operator workspace.

    Computed:
        The engine's line ends with "halved for workspace", or a log's device total is that of a
        310P (`vllm_ascend/_310p/worker_310p.py::NPUWorker310.determine_available_memory`). The
        bytes are those of the granted half.

    To do:
        Nothing, where the device is this engine's own. A byte more of the request gives half a byte
        of KV cache, and a byte of another process takes half a byte of it.
    """
    granted = context.rank.budget.engine_kv_cache_bytes
    halved = context.rank.figures.get("halved")
    if halved is None:
        halved = divisor_of(context.rank.budget.equation) != 1
    if halved and granted is not None and granted > 0:
        evidence = text("KV cache {size:gib} GiB, halved for workspace", size=granted)
        left = context.rank.budget.implied_term(divisor_of(context.rank.budget.equation))
        if left is not None and left[0] == "cleared":
            context_of = text(
                "twice that leaves {size:gib} GiB for what was in use at the start and freed by "
                "empty_cache: the context of a 310P alone is about 1 GiB",
                size=left[1],
            )
            evidence = join("; ", [evidence, context_of])
        neighbours = text(
            "if other processes are on the device: equation {equation} subtracts what they hold; "
            "{advice}",
            equation="E4p",
            advice=keep_apart(context.rank),
        )
        unknown = context.rank.initial_free_bytes is None
        yield Found(evidence, granted, neighbours if unknown else "")
