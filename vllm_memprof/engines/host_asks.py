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

from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path

from vllm_memprof.engines.base import EngineRow
from vllm_memprof.files import read_table
from vllm_memprof.options import typed, value_of
from vllm_memprof.record.host import HostAsk, HostLimit

#: Parts of a model's configuration that only one with an encoder of images or audio has.
_ENCODERS = ("vision_config", "audio_config", "thinker_config")


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
    if not file.exists():
        return []
    table = read_table(file)
    memory = next((each.bytes for each in limits if each.name == "MemAvailable"), None) or 0
    config = ""
    with suppress(OSError):
        config = (model / "config.json").read_text()

    def given(names: Sequence[str]) -> tuple[str, str | None]:
        known = (value_of(tokens, each) if each[0] == "-" else environ.get(each) for each in names)
        found = (pair for pair in zip(names, known, strict=True) if pair[1] is not None)
        return next(found, ("", None))

    def number(names: Sequence[str], default: float) -> float:
        value = typed(given(names)[1] or "", float)
        return default if value is None else float(value)

    counts = {
        name: prod(int(number(names, 1)) for names in groups)
        for name, groups in table["counts"].items()
    }
    found = []
    for ask in table["asks"]:
        option, value = given(ask["options"])
        encodes = option or any(each in config for each in _ENCODERS) or not ask.get("multimodal")
        states = ((given([name])[1] == wanted) is so for name, wanted, so in ask.get("when", ()))
        unit = memory if ask["unit"] == "memory" else ask["unit"]
        size = int(number(ask["options"], ask.get("default", 0)) * unit) * counts[ask["per"]]
        if encodes and size and all(states) and counts.get(ask.get("several"), 2) > 1:
            said = f"{option} {value}".strip() if option else ""
            found.append(
                HostAsk(ask["owner"], said, size, [*ask["limits"]], ask.get("at_most", False))
            )
    return found
