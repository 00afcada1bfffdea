"""What arguments ask of host memory, before an engine starts: rows of its ``host_asks.toml``.

``counts``: name -> groups of options whose values are multiplied, 1 where none of a group is given.
A row of ``asks`` has the ``owner`` (of ``accounting/owners/host.toml``), the ``options`` that say
its size (a name without dashes is one of the environment; the first that is given counts), the
``default`` of a size that is taken without one, the ``unit`` in bytes (of a share of the host's
memory "memory"), the count that it is taken ``per``, the ``limits`` it counts to, and whether it is
``at_most`` that much. It applies if the count ``several`` is above 1, if each option of ``when``
has that value (true) or not (false), and, if it is ``multimodal``, for models with an encoder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path

from vllm_memprof.engines.base import EngineRow
from vllm_memprof.files import read_table
from vllm_memprof.options import typed, value_of
from vllm_memprof.record.host import HostAsk, HostLimit

#: Parts of a model's configuration that only one with an encoder of images or audio has.
_ENCODERS = "vision_config|audio_config|thinker_config"


def host_asks(
    row: EngineRow,
    tokens: Sequence[str],
    model: Path,
    limits: Sequence[HostLimit],
    environ: Mapping[str, str],
) -> list[HostAsk]:
    """Return what the arguments of an engine ask for on one host; empty of an engine without rows.

    Args:
        row: of the engine.
        tokens: its arguments.
        model: its folder; of another name what a default takes for an encoder is not known.
        limits: of the host.
        environ: of the engine.
    """
    file = row.folder / "host_asks.toml"
    table = read_table(file) if file.exists() else {"counts": {}, "asks": ()}
    memory = next((each.bytes for each in limits if each.name == "MemAvailable"), 0)
    encodes = False
    with suppress(OSError):
        encodes = re.search(_ENCODERS, (model / "config.json").read_text()) is not None

    def given(names: Sequence[str]) -> Iterator[tuple[str, str]]:
        for name in names:
            value = value_of(tokens, name) if name[0] == "-" else environ.get(name)
            if value is not None:
                yield name, value

    def number(names: Sequence[str], default: float = 1) -> float:
        values = [typed(value, float) for _, value in given(names)]
        return float(values[0] or 0) if values else default

    counts = {name: prod(map(number, groups)) for name, groups in table["counts"].items()}
    found = []
    for ask in table["asks"]:
        words = next(map(" ".join, given(ask["options"])), "")
        states = [
            (dict(given([name])).get(name) == wanted) is so for name, wanted, so in ask["when"]
        ]
        unit = memory if ask["unit"] == "memory" else ask["unit"]
        size = number(ask["options"], ask["default"]) * unit * counts[ask["per"]]
        states += [encodes or bool(words) or not ask.get("multimodal")]
        if size and all(states) and counts.get(ask.get("several"), 2) > 1:
            limited, at_most = [*ask["limits"]], ask.get("at_most", False)
            found.append(HostAsk(ask["owner"], words, int(size), limited, at_most))
    return found
