"""Tokens that requests can hold at once: rules of ``usable.toml``, of which the first that binds
counts; and the largest step of the scheduler against the step that was profiled.

Requests hold most tokens where they are as long as they may be: a block is lost to each at most,
and what a request holds besides its length (states, windows) counts least.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace

from vllm_memprof.accounting.budget.equations import of_release
from vllm_memprof.accounting.budget.kv import blocks_of_request
from vllm_memprof.accounting.budget.layers import request_blocks
from vllm_memprof.accounting.model import Kv, KvGroup, KvLimit, LargestStep, RankReport, Report
from vllm_memprof.accounting.readings.run import RunReadings
from vllm_memprof.engines import row_of_run
from vllm_memprof.files import read_own
from vllm_memprof.text import Sentence, sentences, titled
from vllm_memprof.units import Amount, minus, product_or_none, sum_or_none

_TABLE = read_own(__file__, "usable.toml")
#: Bytes of a row of logits and vocabulary in float32, into which log probabilities are computed.
_FLOAT32 = 4


@dataclass(frozen=True)
class Rule:
    """A row of ``usable.toml``."""

    name: str
    #: layers: bytes of the budget over those of a request; pool: the blocks that ``blocks`` of the
    #: plan names; margin: of these one for each group of layers of type ``per`` stays free;
    #: admission; kernel; requests: as many as run at once, at full length.
    kind: str
    title: Sentence | tuple[Sentence, ...]  # alternatives
    source: str  # file::symbol with releases, or an issue
    blocks: str = "blocks"
    unless: str | None = None  # name in the plan: where it is set, the rule limits nothing
    engines: tuple[str, ...] = ()  # as runs name them; empty: every one
    versions: str = ""  # of the engine
    attention: str | None = None  # backend
    model: str | None = None  # ``model_version`` of a layer
    bits: int = 0
    per: str = ""  # what a block counts of the kernel's numbers; type of a layer


RULES = [Rule(**row) for row in _TABLE["rules"]]


def usable(read: RunReadings, report: Report) -> Report:
    """Add to each rank which tokens of its KV cache requests can hold, and which rule binds."""
    workers = [each.identity for each in read.run.whole.workers]
    labels = {(who.dp_rank, who.rank): who.label for who in workers}
    last = max((who.pp_rank or 0 for who in workers), default=0)
    run = report.run

    def limited_rank(rank: RankReport) -> RankReport:
        kv = replace(rank.kv, poorest=labels.get((rank.dp_rank, rank.kv.poorest_rank)))
        kv = limited(kv, run.engine, run.engine_version)
        profiled = row_of_run(run.engine).profiles
        steps = largest_steps(rank, (rank.pp_rank or 0) == last) if profiled else ()
        return replace(rank, kv=replace(kv, steps=[*steps]))

    return replace(report, ranks=[*map(limited_rank, report.ranks)])


def limited(kv: Kv, engine: str | None, version: str | None) -> Kv:
    """Return a plan with its limits; as it is where the rule of a layer is not known."""
    length, reserved = kv.max_model_len, _TABLE["reserved"].get(row_of_run(engine).name)
    if not kv.blocks or not length or reserved is None or not blocks_of_request(kv, length):
        return kv
    free = kv.blocks - reserved
    admitted = _longest(kv, free, length)
    if admitted < length - 1:
        needed = blocks_of_request(kv, admitted + 1)
        kv = replace(kv, longest_tokens=admitted, needed_blocks=needed)
    kv = replace(kv, free_blocks=free)
    groups = kv.group_count if (kv.group_count or 1) > 1 else None
    figures, limits, most = vars(kv) | {"groups": groups}, list[KvLimit](), 0
    for rule in of_release(RULES, version or "") or RULES:
        tokens = _tokens(rule, kv, reserved) if _applies(rule, kv, engine) else None
        if tokens is None:
            continue
        if rule.kind in ("layers", "pool"):
            most = max(most, tokens)
        repeats = rule.kind == "pool" and limits and limits[-1].tokens == tokens
        if not figures.get(rule.unless or "") and not repeats:
            title = sentences([rule.title], figures)
            limits.append(KvLimit(rule.name, title, tokens, rule.source, rule.kind == "kernel"))
    binding = min(limits, key=lambda limit: limit.tokens)
    lost = max(0, most - binding.tokens)
    size = kv.available_bytes
    return replace(
        kv,
        limits=limits,
        usable_tokens=binding.tokens,
        usable_why=binding.title,
        out_of_reach_tokens=lost,
        out_of_reach_bytes=None if size is None else size * lost // (most or 1),
    )


def _applies(rule: Rule, kv: Kv, engine: str | None) -> bool:
    models = [(group.layout or {}).get("model_version") for group in kv.groups]
    return (
        (not rule.engines or engine in rule.engines)
        and rule.attention in (None, kv.attention_backend)
        and (rule.model is None or rule.model in models)
    )


def _tokens(rule: Rule, kv: Kv, reserved: int) -> Amount:
    """Return the most tokens by a rule; None: it limits nothing here, or is not known."""
    length, blocks = kv.max_model_len or 0, getattr(kv, rule.blocks)
    if rule.kind == "requests":
        return None if kv.max_num_seqs is None else kv.max_num_seqs * length
    if rule.kind == "admission":
        return kv.longest_tokens
    serving = replace(kv, max_num_batched_tokens=1)  # a step of a request that decodes
    if rule.kind == "layers":
        size = kv.available_bytes if kv.group_count != 1 else None
        needed = sum_or_none(
            product_or_none(request_blocks(group, serving), group.page_size_bytes, group.layers)
            for group in kv.groups
        )
        return size * length // needed if size and needed else None
    if rule.kind == "kernel":
        blocks = min(2**rule.bits // (_count(rule.per, group) or 1) for group in kv.groups)
    if rule.kind == "margin":
        kept = sum(group.type == rule.per for group in kv.groups)
        blocks = blocks - kept if kept else None
    if blocks is None:
        return None
    found = 0
    for longest in {length, max(1, length // (kv.block_size or 1) * (kv.block_size or 1))}:
        each, left = blocks_of_request(serving, longest) or 1, max(0, blocks - reserved)
        whole = left // each * longest
        found = max(found, whole + _longest(serving, left % each, longest))
    return found


def _longest(kv: Kv, blocks: int, below: int) -> int:
    """Return the tokens of the longest request below ``below`` that takes no more blocks."""
    return bisect_right(range(1, below), blocks, key=lambda each: blocks_of_request(kv, each) or 0)


def _count(per: str, group: KvGroup) -> Amount:
    """Return what a block of a layer is to a kernel."""
    size = group.page_size_bytes
    if per == "page elements":
        return None if size is None else size // int((group.layout or {}).get("dtype_bytes") or 1)
    return {"ids": 1, "slots": group.block_size, "page bytes": size}[per]


def largest_steps(rank: RankReport, gives_logits: bool) -> Iterator[LargestStep]:
    """Yield the largest steps, each with the bytes beyond the profile run's peak, at least.

    A profile run computes logits of ``max_num_seqs`` rows. The logits of a prompt are computed of
    all its tokens in a step, in the model's dtype, and as log probabilities in float32 (0.13.0 and
    0.23.0, vllm/v1/worker/gpu_model_runner.py::_get_prompt_logprobs_dict, profile_run); those of
    speculative tokens likewise (vllm/v1/sample/rejection_sampler.py). By then the rest of the
    activations is free, so that what they take is held against the whole peak.

    Args:
        rank: with its plan and its readings.
        gives_logits: it is of the last pipeline stage.
    """
    kv, peak = rank.kv, rank.readings.get("peak_activation")
    tokens, rows, vocab = kv.step_tokens, kv.max_num_seqs, kv.vocab_size
    width, profiled = kv.dtype_bytes, rank.figure("profiled_tokens")
    if tokens is None or rows is None or width is None or kv.runner_type != "generate":
        return

    def row(name: str, largest: int, known: Amount, size: Amount) -> LargestStep:
        return LargestStep(name, titled(_TABLE["steps"][name]), largest, known, size)

    if profiled is not None:
        profiled *= kv.prefill_context_parallel or 1  # each of these ranks takes a part of a step
        vectors = product_or_none(max(0, tokens - profiled), kv.hidden_size, width)
        yield row("tokens", tokens, profiled, vectors)
    kinds = {
        "prompt-logprobs": kv.max_logprobs and min(tokens, (kv.max_model_len or tokens) - 1),
        "speculative": kv.speculative_tokens and min(tokens, rows * (1 + kv.speculative_tokens)),
    }
    for name, largest in kinds.items():
        if largest and gives_logits:
            size = product_or_none(largest, vocab, width + _FLOAT32)
            more = minus(size, None if peak is None else peak.bytes)
            yield row(name, largest, min(rows, tokens), None if more is None else max(0, more))
    batch = next((each for each in rank.phases if each.phase == "mm_profile"), None)
    encoded = 0 if kv.skip_mm_profiling else None
    if batch is not None:
        encoded = product_or_none(batch.integer("mm_items"), batch.integer("mm_tokens_per_item"))
    if encoded is not None and kv.encoder_tokens:
        more = max(0, kv.encoder_tokens - encoded)
        vectors = product_or_none(more, kv.hidden_size, width)
        yield row("encoder", max(kv.encoder_tokens, encoded), encoded, vectors)
