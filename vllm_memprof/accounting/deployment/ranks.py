"""What a plan ran, in words: which ranks, which are assumed to be like them, and which batches."""

from __future__ import annotations

from collections import defaultdict

from vllm_memprof.record.schema import FullStep, PlannedRanks
from vllm_memprof.text import spans
from vllm_memprof.units import format_gib


def rank_notes(ranks: PlannedRanks | None) -> list[str]:
    """Return notes on a plan that ran only some of its ranks; none where all ran.

    Args:
        ranks: of the run record, None for a run that has none.
    """
    if ranks is None or ranks.mode == "all":
        return []
    run, not_run, alike = ranks.run, ranks.not_run, ranks.alike
    notes = [f"ranks run: {spans(run)} of {ranks.world_size} ({ranks.why})"]
    if alike:
        same = "; ".join(
            f"{spans(others)} as rank {rank}" for rank, others in sorted(alike.items())
        )
        notes.append(f"ranks not run, assumed alike: {same}")
    if not_run:
        notes.append(
            f"ranks not run and not known: {spans(not_run)}, "
            "with other layers, experts or neighbours than any rank that was run; "
            "the KV cache is that of the rank with the least; --ranks edges runs one of each kind"
        )
        alike_more: dict[str, list[int]] = defaultdict(list)
        for rank, each in (ranks.more or {}).items():
            held = []
            for more in each:
                size = "" if more.bytes is None else f" {format_gib(more.bytes, 3)} GiB"
                held.append(_MORE[more.what].format(count=more.count, size=size))
            alike_more[", ".join(held)].append(rank)
        if alike_more:
            named = "; ".join(f"{spans(those)}: {said}" for said, those in alike_more.items())
            notes.append(
                f"ranks not run that hold more than rank {run[0]}, as the model's sizes give it: "
                + named
            )
    return notes


#: What a rank holds more, in words.
_MORE = {
    "token_embedding": "first pipeline stage (token embedding{size})",
    "lm_head": "last pipeline stage (LM head{size}, sampler)",
    "layers": "layers of its stage (+{count}{size})",
    "experts": "experts in each layer (+{count}{size})",
    "contexts": "its device (+{count} contexts of other ranks{size})",
}


def step_notes(step: FullStep | None, stopped_before: bool = False) -> list[str]:
    """Return a note on the largest batches of a plan; none where it has recorded none.

    Args:
        step: of the run record.
        stopped_before: the plan ended at its KV plan, and could have gone on.
    """
    if stopped_before:
        return ["graphs, warm-up and the largest batches are not in this plan: "
                "--until ready runs them"]  # fmt: skip
    if step is None:
        return []
    if step.not_run is not None:
        return [f"the largest batches were not run: {step.not_run}"]
    parts = []
    if step.prefill_tokens is not None:
        of = step.max_num_batched_tokens
        parts.append(f"a step of {step.prefill_tokens:,} tokens (max_num_batched_tokens {of:,})")
    if step.decode_requests is not None:
        parts.append(
            f"a decode of {step.decode_requests:,} requests at {step.decode_length:,} tokens "
            f"(max_num_seqs {step.max_num_seqs:,}, max_model_len {step.max_model_len:,})"
        )
    parts += [
        f"{of.items:,} {of.modality} items in a step of {of.step_tokens:,} tokens "
        f"(the encoder's {of.encoder_tokens:,} of {of.encoder_budget:,})"
        for of in step.modalities or []
        if of.items is not None
    ]
    missing = [f"no {of.modality}: {of.not_run}" for of in step.modalities or [] if of.not_run]
    if step.multimodal and step.modalities is None:
        missing.append("text alone, no multimodal batch")
    return [f"largest batches run: {'; '.join([', '.join(parts), *missing])}"] if parts else []
