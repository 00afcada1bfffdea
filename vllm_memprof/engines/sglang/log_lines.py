"""SGLang's log: its lines (``log_lines.toml``), its arguments, and what follows from all ranks.

The arguments stand in ``server_args=ServerArgs(...)`` or ``server_args={...}``: Python's own text
of a few hundred values. It is walked as text and never evaluated; only the arguments of the row's
``set_up`` are read, so that no other value, a secret for one, leaves this module. An argument
counts where something follows it, because lines get cut.

SGLang sizes the KV cache by the least free memory of all ranks, and rounds it down to whole pages;
the pool holds one page more than the tokens that it serves (``MHATokenToKVPool``: size +
page_size). The printed sizes are those of the pool.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from math import ceil
from pathlib import Path

from vllm_memprof.engines import ENGINES
from vllm_memprof.engines.line_format import Given, PrintedRank, read_log_lines
from vllm_memprof.options import Value, typed, words_of
from vllm_memprof.text import text

_OPENS = re.compile(r"server_args=\s*(?:ServerArgs\(|\{)")
#: Between the lines on which a long line was wrapped: a number or a name across it is not read.
_TORN = "\x00"
#: The line has up to 16 kB.
_MOST = 1 << 16
_RECORD = re.compile(r"^\W{0,3}\d{4}-\d\d-\d\d")
#: Text in quotes, also where its end was cut off; brackets, commas.
_MARK = re.compile(r"'(?:\\.|[^'\\])*'?|\"(?:\\.|[^\"\\])*\"?|[()\[\]{},]")
_ARGUMENT = re.compile(r"[\s\x00]*['\"]?(?P<name>\w+)['\"]?[\s\x00]*[=:](?P<value>[^\x00]*)$")
_TYPES = {option.field: option.kind for option in ENGINES["sglang"].set_up}
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
_NEEDED = {"mem_fraction_static", "max_total_tokens", "tp_size", "pp_size", "speculative_algorithm"}
#: The largest page that SGLang takes by default, on an NPU; 1 on CUDA.
_LARGEST_PAGE = 128


def read_server_args(line: str) -> tuple[dict[str, Value], bool]:
    """Return the arguments in a line that may be cut, and whether their bracket is closed."""
    found: dict[str, Value] = {}
    opening = _OPENS.search(line)
    if opening is None:
        return found, True
    depth, begin = 0, opening.end()
    for match in _MARK.finditer(line, begin):
        mark = match[0]
        if mark in "([{":
            depth += 1
        elif mark in ")]}" and depth:
            depth -= 1
        elif mark in ")]}," and not depth:
            said = _ARGUMENT.match(line[begin : match.start()])
            if said is not None and said["name"] in _TYPES and said["name"] not in found:
                found[said["name"]] = typed(said["value"], _TYPES[said["name"]])
            begin = match.end()
            if mark != ",":
                return found, True
    return found, False


class Lines:
    """Puts a ``server_args=`` line together that a terminal or a mail program has wrapped."""

    opens = "server_args="

    def __init__(self) -> None:
        self._text = ""

    @property
    def is_open(self) -> bool:
        return bool(self._text)

    def feed(self, line: str) -> Mapping[str, Value]:
        """Return the arguments of a line, or of as much as there is; none where more may follow."""
        ended = False
        if self.opens in line:
            self._text = line
        elif not line.strip() or _RECORD.match(line) or len(self._text) > _MOST:
            ended = True
        else:
            self._text += _TORN + line
        found, closed = read_server_args(self._text)
        if not ended and not closed:
            return {}
        self._text = ""
        return found


def set_up(found: Mapping[str, Value], whole: bool) -> dict[str, object]:
    """Return the fields of ``logs.config.Config`` that arguments say.

    Args:
        found: by ``read_server_args``, or of a command.
        whole: what is not there was not given: a command says all that a person asked for, and a
            cut line does not.
    """
    device = found.get("device")
    said = {name: each for name, each in found.items() if each and "model" not in name}
    return {
        **{field: found[name] for name, field in _FIELDS.items() if found.get(name)},
        "engine": "sglang",
        "arguments": () if whole else tuple(words_of(said)),
        "given": Given(
            engine="sglang",
            draft_model=found.get("speculative_algorithm") is not None,
            device=None if device is None else str(device),
            arguments=found if whole or found.keys() >= _NEEDED else {},
        ),
    }


def complete(ranks: Sequence[PrintedRank], given: Given | None) -> None:
    """Add to each rank's figures what the equation takes; what is not known is left out.

    Args:
        ranks: those that agree on one KV cache.
        given: of their start; None where no line of its own tells it.
    """
    args = {} if given is None else given.arguments
    fraction = args.get("mem_fraction_static")
    for rank in ranks:
        _add_kv_cache(rank, args)
        if isinstance(fraction, float):
            rank.figures["mem_fraction_static"] = fraction
    if given is None or not args or given.draft_model or (args.get("pp_size") or 1) != 1:
        return  # pipeline stages hold other layers: the equation of one tells not the tokens of all
    places = sorted(rank.place or 0 for rank in ranks)
    if places != [*range(int(args.get("tp_size") or 1))]:
        return
    for name in ("free_before_load_bytes", "free_after_load_bytes"):
        sizes = [(rank.figures.get(name), rank.half_units.get(name, 0)) for rank in ranks]
        known = [(int(size), half) for size, half in sizes if size is not None]
        if len(known) == len(ranks):
            for rank in ranks:
                rank.figures[f"least_{name}"], rank.half_units[f"least_{name}"] = min(known)


def notes(drafts: bool, several: Set[str]) -> list[str]:
    """Return what lines that are printed twice mean for the figures."""
    found: list[str] = []
    if drafts:
        found.append(
            text(
                "speculative decoding: figures that the draft model prints again are left out, and "
                "the equation, which takes both models, is not recomputed"
            )
        )
    if several & {"k_pool_bytes", "v_pool_bytes", "kv_pool_bytes", "pool_tokens"}:
        found.append(text("a rank prints KV pools of several sizes: their sizes are left out"))
    return found


def _add_kv_cache(rank: PrintedRank, args: Mapping[str, Value]) -> None:
    """Add the KV cache of the served tokens, without the pool's page more, and half a page."""
    figures, half_units = rank.figures, rank.half_units
    page, limit = (int(args.get(name) or 0) for name in ("page_size", "max_total_tokens"))
    tokens = figures.get("pool_tokens") or 0
    if limit and page and tokens == limit // page * page:
        figures["limited_tokens"] = int(tokens)
    together = "kv_pool_bytes" in figures
    parts = ("kv_pool_bytes",) if together else ("k_pool_bytes", "v_pool_bytes")
    pool = sum(int(figures.get(part) or 0) for part in parts)
    half = sum(half_units.get(part, 0) for part in parts)
    if not tokens or pool <= half or any(figures.get(part) is None for part in parts):
        # else below the digits: its size is not known. What pools of DeepSeek-V4 take together is
        # printed, not rounded to pages; a limit of tokens makes them smaller: two sizes, and none
        budget = figures.get("pools_budget_bytes")
        if budget is not None and figures.get("pools_tokens"):
            figures["kv_cache_bytes"] = int(budget)
            half_units["kv_cache_bytes"] = half_units.get("pools_budget_bytes", 0)
            figures["half_page_bytes"] = 0
        return
    largest = pool + half
    if not page:  # anything up to the largest page
        least = (pool - half) * tokens / (tokens + _LARGEST_PAGE)
        size, half = round((least + largest) / 2), ceil((largest - least) / 2)
    else:
        size = round(pool * tokens / (tokens + page))
        in_page = ceil(largest * page / (tokens + page))
        figures["half_page_bytes"], half_units["half_page_bytes"] = in_page // 2, ceil(in_page / 2)
    figures["kv_cache_bytes"], half_units["kv_cache_bytes"] = size, half


LOG = read_log_lines(
    Path(__file__).parent, argument_lines=Lines, set_up=set_up, complete=complete, notes=notes
)
