"""Where an allocation failed: request, part of the step, and a merge that was not profiled."""

from __future__ import annotations

from vllm_memprof.accounting.model import Oom
from vllm_memprof.accounting.oom import STAGE_TITLES
from vllm_memprof.record.failures import PROFILE
from vllm_memprof.text import Text, join, text
from vllm_memprof.units import format_gib


def where(oom: Oom) -> list[str]:
    """Return the part of the step that failed, and the request and images that it was for."""
    parts: list[str] = []
    if oom.at_request is not None:
        at = text("request {at}", at=oom.at_request)
        if oom.request_count is not None:
            at = text("{request} of {count}", request=at, count=oom.request_count)
        parts.append(at)
    if oom.stage is not None:
        parts.append(text("in the part {stage}", stage=STAGE_TITLES[oom.stage]))
    sizes = [
        f"{item.size[0]}x{item.size[1]}"
        for request in oom.requests or []
        for item in request.items
        if item.encoded and item.size is not None
    ]
    if sizes:
        parts.append(text("images encoded in the step: {sizes}", sizes=", ".join(sizes[:8])))
    return [join(", ", parts)] if parts else []


def merge_not_profiled(oom: Oom) -> Text | None:
    """Return what a log notes of a merge of embeddings that its profile has none of; else None."""
    profiled = {each.stage for each in oom.readings if each.moment == PROFILE}
    served = [each for each in oom.readings if each.moment != PROFILE]
    merge = next((each for each in served if each.stage == "mm_merge"), None)
    if merge is None or not profiled or "mm_merge" in profiled:
        return None
    encoder = next(
        (each for each in served if (each.moment, each.stage) == (merge.moment, "mm_encoder")),
        None,
    )
    took = text(
        "the merge of multimodal embeddings took {size} GiB for {moment}",
        size=format_gib(merge.bytes, 3),
        moment=merge.moment,
    )
    if encoder is not None:
        took = text(
            "{took}, {more} GiB more than the encoder",
            took=took,
            more=format_gib(merge.bytes - encoder.bytes, 3),
        )
    return text("{took}; what the log notes of its profile has no merge", took=took)
