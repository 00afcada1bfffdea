"""What the actions of SGLang's rows keep between two calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_memprof.capture.recorder import Recorder


@dataclass
class Kept:
    """Of one process."""

    #: Tokens of a page of the KV cache, bytes of a token (None: pools differ in it), all tokens.
    sized: tuple[int, int | None, int] | None = None
    first_batches: int = 0  # that were run while communicators are watched
    rank: int | None = None  # within the replica
    mm_merge: Any = None  # stage of the sampler under way
    mm_pools: bool = False  # other processes put multimodal input on the device, too


def kept(recorder: Recorder) -> Kept:
    """Return what is kept of a process, from its first call on."""
    if not isinstance(recorder.kept, Kept):
        recorder.kept = Kept()
    return recorder.kept
