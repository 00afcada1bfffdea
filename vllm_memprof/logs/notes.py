"""What a log notes of a run's progress and of the parts of a step, before an allocation fails.

A driver prints which request it is at; a person notes beside it what the parts of a step took::

    profiling:
    mm_encoder_attention.py:141:forward_oot peak activation: 3.8 G
    image1:
    kv_cache: 52.921 G
    mm_encoder_attention.py:141:forward_oot: 1.884 G (54.805 G)
    _merge_multimodal_embeddings: 1.908 G (54.829 G)

The second figure is what was allocated then, the first how much more than before the request.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from decimal import Decimal

from vllm_memprof.record.failures import PROFILE, StepReading, stage_of
from vllm_memprof.units import GIB

#: Readings that are kept, the last ones.
_MOST_READINGS = 32
_DONE = re.compile(r"(?<![\w/])request (?P<done>\d+)/(?P<count>\d+): \d+ prompt tokens")
_FAILED_AT = re.compile(r"^\W{0,3}(?P<at>\d+)/(?P<count>\d+)\s*:\s*OOM\b")
_INPUT = re.compile(r"^\W{0,3}Processing\s*:\s*(?P<name>[^\s/\\]{1,120})\s*$")
_MOMENT = re.compile(r"^\W{0,3}(?P<moment>profiling|image ?\d+)\s*:\s*$", re.IGNORECASE)
_PART = re.compile(
    r"^\W{0,3}(?:(?P<file>\w+)\.py:\d+:)?(?P<function>\w+)\b[^\d\n]{0,24}?"
    r"(?<![\w.])(?P<size>\d+(?:\.\d+)?) ?G(?:i?B)?\b(?:\s*\((?P<level>\d+(?:\.\d+)?) ?G(?:i?B)?\))?"
)
#: In the name of a file: the part of a step that its functions belong to.
_ENCODER = "mm_encoder"


@dataclass
class LogNotes:
    """The state of a log while it is read."""

    at_request: int | None = None  # counted from 1
    request_count: int | None = None
    input: str | None = None  # name of the file that was processed
    readings: list[StepReading] = field(default_factory=list)
    _moment: str | None = None

    def read(self, text: str) -> None:
        """Read one line without markup."""
        if match := _DONE.search(text):
            done, count = int(match["done"]), int(match["count"])
            self.at_request, self.request_count = min(done + 1, count), count
            self.input = None
        elif match := _FAILED_AT.match(text):
            self.at_request, self.request_count = int(match["at"]), int(match["count"])
        elif match := _INPUT.match(text):
            self.input = match["name"]
        elif match := _MOMENT.match(text):
            self._moment = match["moment"].lower()
        elif self._moment is not None and "G" in text and (match := _PART.match(text)):
            of_file = _ENCODER if _ENCODER in (match["file"] or "") else None
            stage = stage_of([match["function"]]) or of_file
            if stage is not None:
                moment = PROFILE if self._moment == "profiling" else self._moment
                size, level = (
                    None if number is None else round(Decimal(number) * GIB)
                    for number in match.group("size", "level")
                )
                self.readings.append(StepReading(moment, stage, size or 0, level))
                del self.readings[:-_MOST_READINGS]
