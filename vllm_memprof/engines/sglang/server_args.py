"""SGLang's set-up: ``server_args=ServerArgs(...)``, ``server_args={...}``, or its command.

The line holds Python's own text of a few hundred values. It is walked as text, value by value, and
never evaluated; only the arguments of ``engines.sglang.options.SET_UP`` are read, so that no other
value, a secret for one, leaves this module. An argument counts where something follows it, because
lines get cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from vllm_memprof.engines.line_format import Given
from vllm_memprof.engines.sglang.options import SET_UP
from vllm_memprof.options import Value, typed

SERVER_ARGS = "server_args="
#: Between the lines on which a long line was wrapped: a number or a name across it is not read.
TORN = "\x00"
#: The line has up to 16 kB.
_MOST = 1 << 16
_RECORD = re.compile(r"^\W{0,3}\d{4}-\d\d-\d\d")
#: The beginning of a command that starts SGLang.
COMMAND = re.compile(
    r"(?:(?:^|[\s$#;&|])(?P<serve>sglang\s+serve\s+(?!.*<)\S.*)"
    r"|\bpython3?\s+-m\s+(?P<module>sglang\.launch_server\s+-(?!.*<).*))$"
)

_TYPES = {option.field: option.kind for option in SET_UP}
#: Argument -> field of ``logs.config.Config``.
_FIELDS = {
    "model_path": "model",
    "served_model_name": "served_model_name",
    "tp_size": "tensor_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "dp_size": "data_parallel_size",
    "context_length": "max_model_len",
    "page_size": "block_size",
}
#: Arguments without which nothing is recomputed: each may have set the KV cache.
_NEEDED = ("mem_fraction_static", "max_total_tokens", "tp_size", "pp_size", "speculative_algorithm")
#: Arguments that tell which options a release has.
_NAMES = ("cuda_graph_max_bs_decode",)


@dataclass(frozen=True)
class ServerArgs(Given):
    """What SGLang was started with, as far as its line or its command says it; None is unknown."""

    engine: str = "sglang"
    mem_fraction_static: float | None = None
    max_total_tokens: int | None = None  # given by --max-total-tokens
    page_size: int | None = None  # tokens
    #: Ranks that agree on one KV cache. None with pipeline stages, too: they hold other layers, so
    #: that the equation of one does not tell the tokens of all.
    world_size: int | None = None
    #: Nothing that the equation needs was cut off: what is None was not given.
    complete: bool = False
    #: Names of ``_NAMES`` that the release has.
    names: frozenset[str] = frozenset()


def read_server_args(text: str) -> dict[str, Value]:
    """Return the arguments of ``_TYPES`` in a line, and those of ``_NAMES`` as None.

    Args:
        text: of a line, from anywhere before ``server_args=``. It may have been cut.
    """
    found: dict[str, Value] = {}
    rest = text[text.index(SERVER_ARGS) + len(SERVER_ARGS) :].lstrip()
    if rest.startswith("ServerArgs("):
        body, joint = rest[len("ServerArgs(") :], "="
    elif rest.startswith("{"):
        body, joint = rest[1:], ":"
    else:
        return found
    for piece in _pieces(body):
        name, said, value = piece.partition(joint)
        name = name.strip().strip(TORN).strip().strip("'\"")
        if TORN in value:
            continue
        if said and name in _TYPES and name not in found:
            found[name] = typed(value, _TYPES[name])
        elif said and name in _NAMES:
            found[name] = None
    return found


class Lines:
    """Puts a ``server_args=`` line together that a terminal or a mail program has wrapped."""

    opens = SERVER_ARGS

    def __init__(self) -> None:
        self._text = ""

    @property
    def is_open(self) -> bool:
        return bool(self._text)

    def feed(self, text: str) -> Mapping[str, Value]:
        """Return the arguments of a line, or of as much as there is; none where more may follow."""
        ended = False
        if SERVER_ARGS in text:
            self._text = text
        elif not text.strip() or _RECORD.match(text) or len(self._text) > _MOST:
            ended = True
        else:
            self._text += TORN + text
        body = self._text.partition(SERVER_ARGS)[2].lstrip()
        if not ended and body.startswith(("ServerArgs(", "{")) and not _is_closed(body):
            return {}
        whole, self._text = self._text, ""
        return read_server_args(whole)


def set_up(found: Mapping[str, Value], whole: bool) -> dict[str, object]:
    """Return the fields of ``logs.config.Config`` that arguments say; ``whole`` as ``settings``."""
    fields: dict[str, object] = {
        field: found[name] for name, field in _FIELDS.items() if found.get(name)
    }
    given = settings(found, whole=whole)
    return {**fields, "enforce_eager": is_eager(found), "engine": given.engine, "given": given}


def is_eager(found: Mapping[str, Value]) -> bool | None:
    """Return whether decode runs without graphs; None where nothing says it."""
    if found.get("disable_cuda_graph") or found.get("disable_decode_cuda_graph"):
        return True
    if found.get("cuda_graph_backend_decode") == "disabled":
        return True
    return False if "disable_cuda_graph" in found else None


def settings(found: Mapping[str, Value], *, whole: bool) -> ServerArgs:
    """Return what the budget needs.

    Args:
        found: by ``read_server_args``, or of a command.
        whole: what is not there was not given, so that sizes have their defaults: a command says
            all that a person asked for, and a cut line does not.
    """
    tp, pp = (_integer(found.get(name)) for name in ("tp_size", "pp_size"))
    if whole:
        tp, pp = tp or 1, pp or 1
    fraction = found.get("mem_fraction_static")
    device = found.get("device")
    return ServerArgs(
        mem_fraction_static=fraction if isinstance(fraction, float) and 0 < fraction < 1 else None,
        max_total_tokens=_integer(found.get("max_total_tokens")),
        page_size=_integer(found.get("page_size")),
        world_size=tp if pp == 1 else None,
        draft_model=found.get("speculative_algorithm") is not None,
        complete=whole or all(name in found for name in _NEEDED),
        device=device if isinstance(device, str) else None,
        names=frozenset(name for name in _NAMES if name in found),
    )


def _integer(value: Value) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _is_closed(body: str) -> bool:
    """Return True where the outermost bracket of a text is closed in it."""
    first = body.index("(") if body.startswith("ServerArgs(") else 0
    pieces = list(_pieces(body[first + 1 :], rest=True))
    return not pieces or pieces[-1] != _OPEN


#: Stands for the rest of a text whose bracket is not closed.
_OPEN = "\x00open"


def _pieces(body: str, *, rest: bool = False) -> Iterator[str]:
    """Yield ``name=value`` of the outermost level; the last only where its end is there.

    Args:
        body: behind the bracket that opens it.
        rest: yield ``_OPEN`` where the bracket is not closed.
    """
    begin, depth, quote, at = 0, 0, "", 0
    while at < len(body):
        char = body[at]
        if quote:
            if char == "\\":
                at += 1
            elif char == quote:
                quote = ""
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            if depth == 0:
                yield body[begin:at]
                return
            depth -= 1
        elif char == "," and depth == 0:
            yield body[begin:at]
            begin = at + 1
        at += 1
    if rest:
        yield _OPEN
