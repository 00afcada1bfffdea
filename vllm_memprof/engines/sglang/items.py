"""Multimodal items of SGLang, in sampled runs: its objects enter the sampler's items and stages.

A request's items are ``multimodal_inputs.mm_items``: each says where its tokens lie, what the
processor made of it, and a hash. The model's encoder is called with those of a request that no
cache holds (0.5.23 on an NPU; on CUDA with those of the whole batch), ``embed_mm_inputs`` makes one
tensor of them and of the text, and what the encoder gave stays in a cache of the process, by hash.

Nothing here is called for a batch without items. Runs in scheduler processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from vllm_memprof.capture.attributes import reach
from vllm_memprof.capture.hook import Call
from vllm_memprof.capture.recorder import Recorder
from vllm_memprof.engines.sglang.kept import kept

#: Index of an item among those of its request, by the request's id.
Inputs = dict[str, list[int]]


def items_of(request: Any) -> list[Any]:
    """Return the items of a request, in their order; none of a request of text."""
    return [item for item in reach(request, "multimodal_inputs.mm_items") or () if item is not None]


def features_of(request: Any) -> list[Any] | None:
    """Return the items of a request as vLLM's features, as far as ``items.describe`` reads them."""
    return [
        SimpleNamespace(
            # an image is one of several in the eyes of some processors
            modality=str(reach(item, "modality.name")).lower().replace("multi_images", "image"),
            data=item.model_specific_data,
            identifier=item.hash,
            mm_position=SimpleNamespace(
                # first and last of each run are its own
                length=sum(int(last) - int(first) + 1 for first, last in item.offsets)
                if item.offsets
                else None
            ),
        )
        for item in items_of(request)
    ] or None


# --- actions --------------------------------------------------------------------------------------


def enter_encoder(recorder: Recorder, call: Call) -> None:
    """Open the stage of one call of the model's encoder."""
    inputs = _inputs(recorder, call.argument("items") or ())
    call.token = recorder.sampler.begin_stage("mm_encoder", inputs)


def enter_embedding(recorder: Recorder, call: Call) -> None:
    """End the merge under way: the items of another modality follow."""
    _end_merge(recorder, None)


def leave_embedding(recorder: Recorder, call: Call) -> None:
    """Open the merge where the batch has embeddings of items; ``embed_mm_inputs`` ends it."""
    if call.result[0] is not None:
        inputs = _inputs(recorder, _in_chunk(call.kwargs))
        kept(recorder).mm_merge = recorder.sampler.begin_stage("mm_merge", inputs)


def leave_embed(recorder: Recorder, call: Call) -> None:
    _end_merge(recorder, call.error)


def _end_merge(recorder: Recorder, error: BaseException | None) -> None:
    opened, kept(recorder).mm_merge = kept(recorder).mm_merge, None
    if opened is not None:
        recorder.sampler.end_stage(opened, error)


def leave_cache_set(recorder: Recorder, call: Call) -> None:
    """Write what the cache of embeddings has taken, and what it gave up for it."""
    if recorder.serving:
        cache = call.subject.mm_cache
        recorder.sampler.note_cache({key: entry.embedding for key, entry in cache.items()})


def _inputs(recorder: Recorder, items: Iterable[Any]) -> Inputs:
    """Return whose items these are."""
    wanted, found = {id(item) for item in items}, Inputs()
    for name, request in recorder.requests.items():
        for at, item in enumerate(items_of(request)):
            if id(item) in wanted:
                found.setdefault(name, []).append(at)
    return found


def _in_chunk(given: Mapping[str, Any]) -> list[Any]:
    """Return the items with a token in the part of its prompt that this batch computes.

    Args:
        given: arguments of ``get_embedding_and_mask``: items of all requests, where those of each
            begin, and the part of each.
    """
    items, bounds = given.get("embedding_items") or (), given.get("items_size") or ()
    parts = zip(given.get("prefix_length") or (), given.get("extend_length") or (), strict=False)
    found = []
    for number, (begin, length) in enumerate(parts):
        for item in items[bounds[number] : bounds[number + 1]] if number + 1 < len(bounds) else ():
            if any(first < begin + length and last >= begin for first, last in item.offsets or ()):
                found.append(item)
    return found
