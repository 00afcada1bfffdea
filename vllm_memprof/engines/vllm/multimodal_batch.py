"""The largest batch of images, video or audio that an engine may be given in one step.

An item is the engine's own dummy data of its profile run, the largest that the model takes, made
smaller where a request of ``max_model_len`` tokens could not hold it. So many of them enter, in as
many requests as they need, that one step fills the encoder's budget and ``max_num_batched_tokens``:
encoder, merge of its embeddings and prefill run together. All items of a batch share what the
processor made of one of them, and have names of their own, so that no cache answers for the
encoder. Imports vLLM where it runs.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm_memprof.engines.vllm.batch_limits import Limits, token_ids

#: Sizes that are tried for an image of a number of tokens, each a little smaller than the last.
_TRIES, _SMALLER = 12, 0.98


@dataclass(frozen=True)
class MediaItem:
    """One image, video or audio, and a prompt of nothing else."""

    modality: str
    tokens: list[int]  # of the prompt
    embeds: int  # tokens of it that the encoder gives
    position: Any  # PlaceholderRange within the prompt
    data: Any  # what the engine's processor made of it: MultiModalKwargsItem
    source: Any  # what the processor was given: a PIL image, an array of frames or of samples


@dataclass(frozen=True)
class Prompt:
    """A request of a batch."""

    text: list[int]  # token ids, after its items
    items: tuple[MediaItem, ...] = ()
    new_tokens: int = 1

    @property
    def tokens(self) -> list[int]:
        """Token ids of the whole prompt."""
        return [token for item in self.items for token in item.tokens] + self.text


@dataclass(frozen=True)
class Room:
    """What bounds the items of a batch, from the engine's configuration."""

    per_prompt: int  # items
    encoder_tokens: int  # that the encoder may give in one step
    whole: bool  # no step ends within an item


@dataclass(frozen=True)
class Batch:
    """The largest batch of one modality."""

    modality: str
    prompts: list[Prompt]
    encoder_tokens: int | None = None  # that a step may have
    not_run: str | None = None  # why there are no prompts

    def largest_item(self) -> int:
        """Return the encoder's tokens of its largest item; 0 without one."""
        return max((item.embeds for prompt in self.prompts for item in prompt.items), default=0)


def fill(limits: Limits, room: Room, tokens: int, embeds: int) -> list[tuple[int, int]]:
    """Return (items, tokens of text after them) of each request of a batch.

    Args:
        limits: of the engine.
        room: for the items.
        tokens: of a prompt of one item.
        embeds: of these, what the encoder gives.
    """
    longest = limits.longest()
    per_prompt = min(room.per_prompt, longest // tokens)
    if per_prompt < 1 or embeds < 1 or limits.requests < 1:
        return []
    held = limits.in_blocks(per_prompt * tokens + 1)  # by a full request
    together = max(1, min(limits.requests, limits.cached_tokens // held))
    # an item is encoded whole in the step that reaches its first token
    reached = limits.batched_tokens // tokens if room.whole else -(-limits.batched_tokens // tokens)
    count = max(1, min(room.encoder_tokens // embeds, per_prompt * together, reached))
    whole, rest = divmod(count, per_prompt)
    items = [per_prompt] * whole + [rest] * bool(rest)
    spare = limits.cached_tokens - sum(limits.in_blocks(number * tokens + 1) for number in items)
    left = max(0, min(limits.batched_tokens - count * tokens, spare))
    made = []
    for number in items:
        text = min(left, longest - number * tokens)
        left -= text
        made.append((number, text))
    return made


def prompts_of(
    limits: Limits, room: Room, item: MediaItem, smaller: Callable[[int], MediaItem | None]
) -> list[Prompt]:
    """Return the prompts of a batch; none where no request can hold the item.

    Args:
        limits: of the engine.
        room: for the items.
        item: the largest.
        smaller: makes an item of at most so many tokens of the encoder; it goes first, into a
            request of its own, where the largest ones leave room for it.
    """

    def filled(limits: Limits, room: Room) -> list[Prompt]:
        sizes = fill(limits, room, len(item.tokens), item.embeds)
        return [Prompt(token_ids(text, 0), (item,) * number) for number, text in sizes]

    def count(prompts: list[Prompt]) -> int:
        return sum(len(prompt.items) for prompt in prompts)

    prompts = filled(limits, room)
    left = room.encoder_tokens - count(prompts) * item.embeds
    if prompts and left > 0 and limits.requests > len(prompts):
        first = smaller(left)
        if first is not None:
            beside = dataclasses.replace(room, encoder_tokens=room.encoder_tokens - first.embeds)
            after = filled(limits.without(len(first.tokens)), beside)
            if count(after) == count(prompts):
                return [Prompt([], (first,)), *after]
    return prompts


def largest(vllm_config: Any, scheduler: Any, limits: Limits) -> Iterator[Batch]:
    """Yield the batch of each modality that the model takes and the configuration allows.

    Args:
        vllm_config: the engine's configuration.
        scheduler: of the engine core: it has the encoder's budget.
        limits: of the engine.
    """
    model = vllm_config.model_config
    if not getattr(model, "is_multimodal_model", False):
        return
    try:
        maker = _Maker(model)
        allowed = maker.allowed()
    except Exception as error:  # what a processor without its files raises
        yield Batch("items", [], not_run=f"the model's processor: {_said(error)}")
        return
    budget = min(
        int(scheduler.max_num_encoder_input_tokens), int(scheduler.encoder_cache_manager.cache_size)
    )
    whole = bool(getattr(vllm_config.scheduler_config, "disable_chunked_mm_input", False))
    for modality, per_prompt in allowed.items():
        if per_prompt < 1:
            yield Batch(modality, [], not_run="none is allowed (--limit-mm-per-prompt)")
            continue
        try:
            item = maker.make(modality, limits.longest())
            room = Room(per_prompt, budget, whole)
            if len(item.tokens) > limits.longest():
                over = len(item.tokens) - item.embeds
                item = maker.make_smaller(item, limits.longest() - over) or item
            prompts = prompts_of(limits, room, item, partial(maker.make_smaller, item))
        except Exception as error:  # what a processor raises of data that it does not take
            yield Batch(modality, [], budget, f"it could not be made: {_said(error)}")
            continue
        said = f"one takes {len(item.tokens):,} tokens, a request {limits.longest():,}"
        yield Batch(modality, prompts, budget, None if prompts else said)


def features_of(name: str, items: tuple[MediaItem, ...]) -> list[Any]:
    """Return the items of a request as the engine takes them, each under a name of its own.

    Args:
        name: of the request.
        items: in the order of its prompt.
    """
    from vllm.multimodal.inputs import MultiModalFeatureSpec

    takes = {field.name for field in dataclasses.fields(MultiModalFeatureSpec)}
    features, offset = [], 0
    for place, item in enumerate(items):
        at = item.position
        identifier = f"{name}-{item.modality}-{place}"
        given = {
            "data": item.data,
            "modality": item.modality,
            "identifier": identifier,
            "mm_position": type(at)(offset + at.offset, at.length, at.is_embed),
            "mm_hash": identifier,  # not in 0.13
        }
        features.append(MultiModalFeatureSpec(**{k: v for k, v in given.items() if k in takes}))
        offset += len(item.tokens)
    return features


def _said(error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"


class _Maker:
    """The engine's processor, and what it makes of the data of the profile run.

    (vllm 0.23.0, ``vllm/multimodal/registry.py::MultiModalRegistry.get_dummy_mm_inputs``; 0.13.0,
    ``vllm/multimodal/profiling.py::MultiModalProfiler._get_dummy_mm_inputs``)
    """

    def __init__(self, model_config: Any) -> None:
        from vllm.multimodal import MULTIMODAL_REGISTRY

        self._processor = MULTIMODAL_REGISTRY.create_processor(model_config)
        self._options = model_config.get_multimodal_config().limit_per_prompt

    def allowed(self) -> Mapping[str, int]:
        """Return how many items of each modality a prompt may have."""
        of = self._processor
        of = of if hasattr(of, "allowed_mm_limits") else of.info  # 0.13: of the processor
        found: Mapping[str, int] = of.allowed_mm_limits
        return found

    def make(self, modality: str, length: int, source: Any = None) -> MediaItem:
        """Return an item.

        Args:
            modality: of it.
            length: tokens of a request.
            source: what the processor is given; None: the largest that the model takes.
        """
        one = {modality: 1}
        dummies = self._processor.dummy_inputs
        if source is None:
            source = dummies.get_dummy_mm_data(length, one, self._options)[modality][0]
        data = {modality: [source]}
        inputs = dummies.get_dummy_processor_inputs(length, one, self._options)
        if hasattr(inputs, "mm_data_items"):
            from vllm.multimodal.processing.context import TimingContext

            parsed = self._processor.info.parse_mm_data(data, validate=False)
            made = self._processor.apply(
                dataclasses.replace(inputs, mm_data_items=parsed), TimingContext(enabled=False)
            )
        else:
            takes = inspect.signature(self._processor.apply).parameters
            given = {**vars(inputs), "mm_data": data}
            made = self._processor.apply(**{k: v for k, v in given.items() if k in takes})
        [(named, places)] = made["mm_placeholders"].items()
        [position] = places
        embeds = position.get_num_embeds
        return MediaItem(
            modality=named,
            tokens=list(made["prompt_token_ids"]),
            embeds=int(embeds() if callable(embeds) else embeds),  # a property in 0.13
            position=position,
            data=made["mm_kwargs"][named][0],
            source=source,
        )

    def make_smaller(self, item: MediaItem, embeds: int) -> MediaItem | None:
        """Return an image of at most so many tokens of the encoder, and nearly as many.

        None: it is no image, or the model takes none that is so small.
        """
        width, height = getattr(item.source, "size", (None, None))
        if not isinstance(width, int) or not isinstance(height, int) or embeds < 1:
            return None
        scale = (embeds / item.embeds) ** 0.5
        for _ in range(_TRIES):
            size = (int(width * scale), int(height * scale))
            if min(size) < 1:
                return None
            made = self.make(item.modality, len(item.tokens), item.source.resize(size))
            if made.embeds <= embeds:
                return made
            scale *= _SMALLER
        return None
