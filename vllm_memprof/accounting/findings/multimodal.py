"""Findings about multimodal requests beside what profiling assumed of them."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_memprof.accounting.findings.needs import SAMPLED
from vllm_memprof.accounting.findings.registry import (
    INFO,
    WARNING,
    Found,
    RankContext,
    by_bytes,
    finding,
    known,
)
from vllm_memprof.accounting.model import MmProfile
from vllm_memprof.text import Text, join, text
from vllm_memprof.units import minus

#: Profiling is said to assume too much where less than this share of its tokens ever came.
OVER_SHARE = 0.5


@finding(
    "mm-profile-under",
    severity=WARNING,
    title=text("Larger multimodal items came than profiling assumed"),
    needs=SAMPLED,
    priced=False,  # the language model's part of the peak may be larger still
)
def mm_profile_under(context: RankContext) -> Iterator[Found]:
    """Find a step whose multimodal items were larger than those that were profiled.

    Meaning:
        The KV cache was sized with the peak of the profile run. A step that takes more than that
        needs memory that nothing has kept free.

    Computed:
        Tokens of the items that the encoder ran in one step, the step with most of them, beside
        items times tokens of the profiled batch; or the most that any passage of the encoder took
        beside what the profiled one took, where the allocator's peak rose in both
        (`vllm_memprof/accounting/serving/requests.py::mm_profile`). The bytes are the difference.

    To do:
        Limit what one request may hold (`--limit-mm-per-prompt`, `--mm-processor-kwargs` with a
        smaller `max_pixels`), or leave the difference free with a lower `--gpu-memory-utilization`.
    """
    profile = context.rank.mm_profile
    if profile is None:
        return
    tokens, came = profile.tokens, profile.came_tokens
    beyond = minus(profile.came_bytes, profile.bytes)
    more_tokens = tokens is not None and came is not None and came > tokens
    if not more_tokens and (beyond is None or beyond <= 0):
        return
    action = text(
        "--limit-mm-per-prompt or a smaller max_pixels in --mm-processor-kwargs keeps requests "
        "within what was profiled"
    )
    yield Found(_beside(profile), beyond if beyond is not None and beyond > 0 else None, action)


@finding(
    "mm-profile-over",
    severity=INFO,
    title=text("Profiling assumed larger multimodal items than came"),
    needs=SAMPLED,
    priced=False,  # another part of the profile run may hold as much
)
def mm_profile_over(context: RankContext) -> Iterator[Found]:
    """Find profiled multimodal items of which less than half ever came in one step.

    Meaning:
        What the profile run took for the encoder is not available to the KV cache, where it made
        the peak of that run. Requests of this run needed less; another run may need it.

    Computed:
        Tokens of the items that the encoder ran in one step, the step with most of them, less than
        half of items times tokens of the profiled batch
        (`vllm_memprof/accounting/serving/requests.py::mm_profile`). The bytes are the most that the
        profiled encoder took less the most that one took while serving, where the allocator's peak
        rose in both.

    To do:
        Where requests stay like this, `--limit-mm-per-prompt` with the largest size, or a smaller
        `max_pixels` in `--mm-processor-kwargs`, makes the profiled items smaller.
    """
    profile = context.rank.mm_profile
    if profile is None or profile.tokens is None or not profile.came_tokens:
        return
    if profile.came_tokens >= OVER_SHARE * profile.tokens:
        return
    unused = minus(profile.bytes, profile.came_bytes)
    action = text(
        "where requests stay like this: a smaller max_pixels in --mm-processor-kwargs makes the "
        "profiled items smaller"
    )
    yield Found(_beside(profile), unused if unused is not None and unused > 0 else None, action)


@finding(
    "merge-not-profiled",
    severity=by_bytes,
    title=text("Profiling did not run the merge of embeddings"),
    needs=SAMPLED,
    priced=False,  # they need not be beyond the peak that was profiled
)
def merge_not_profiled(context: RankContext) -> Iterator[Found]:
    """Find a merge of text and multimodal embeddings that took memory and was not profiled.

    Meaning:
        The profile run encodes a batch of items and runs the language model on dummy tokens; the
        model's `embed_input_ids` with multimodal embeddings is first called by a request. What it
        takes was not in the peak that the KV cache was sized with. It need not be more than that
        peak: the profiled encoder's own memory is free by then.

    Computed:
        `embed_input_ids` was observed and not called with multimodal embeddings during the profile
        run, and was while serving. The bytes are those that the allocator handed out during the
        largest such call, whether or not they were freed within it
        (`vllm_memprof/accounting/serving/requests.py::mm_profile`).

    To do:
        Leave these bytes free: lower `--gpu-memory-utilization`, or smaller images.
    """
    profile = context.rank.mm_profile
    if profile is None or profile.merged is not False or not profile.merge_bytes:
        return
    parts = known(
        (text("{size:gib4} GiB handed out during the largest merge"), profile.merge_bytes)
    )
    parts += known((text("{count:,} multimodal tokens"), profile.merge_tokens), name="count")
    if profile.merge_size is not None:
        width, height = profile.merge_size
        parts.append(text("image {width}x{height}", width=width, height=height))
    parts += known((text("{size:gib4} GiB at its peak"), profile.merge_peak_bytes))
    action = text("leave that free: a lower --gpu-memory-utilization, or smaller images")
    yield Found(join(", ", parts), profile.merge_bytes, action)


def _beside(profile: MmProfile) -> Text:
    """Say what was profiled and what came, in items, tokens, pixels and bytes."""
    return text(
        "profiled: {profiled}; largest step: {came}",
        profiled=_said(profile.items, profile.tokens, profile.size, profile.bytes, profile.frames),
        came=_said(profile.came_items, profile.came_tokens, profile.came_size, profile.came_bytes),
    )


def _said(
    items: int | None,
    tokens: int | None,
    size: list[int] | None,
    taken: int | None,
    frames: int | None = None,
) -> Text:
    counted = (text("{count} item(s)"), items), (text("{count:,} tokens"), tokens)
    parts = known(*counted, name="count")
    if size is not None:
        parts.append(text("{width}x{height} pixels", width=size[0], height=size[1]))
    parts += known((text("{count} frames each"), frames or None), name="count")
    parts += known((text("{size:gib4} GiB at most"), taken))
    return join(", ", parts) if parts else text("nothing known")
