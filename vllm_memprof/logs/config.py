"""Reads the set-up of a run from its log: engine, versions, model, arguments; no memory figure."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace

from vllm_memprof.engines import VLLM, row_of_run
from vllm_memprof.engines.line_format import Given, LogLines, SettingLine
from vllm_memprof.logs.formats import LOGS
from vllm_memprof.options import Value, read_options, typed, words_of
from vllm_memprof.redact import redact_command

_EXPORT = re.compile(
    r"(?:^\s*|\b(?:export|ENV)\s+)(?P<name>PYTORCH_(?:NPU_|CUDA_)?ALLOC_CONF)="
    r"(?P<value>\"[^\"]*\"|'[^']*'|[^\s\"']+)"
)
_SETTINGS = [row for log in LOGS.values() for row in log.settings]
#: Field of ``Config`` -> its type. A number counts only when something follows it: lines get cut.
_TYPES = {option.field: option.kind for option in VLLM.set_up}
#: Keys with another name than the field.
_FIELDS = {"max_seq_len": "max_model_len", "model_tag": "model"}
#: Keys that are no option of a plan: the model, which stands alone, and how weights are read.
_NO_OPTIONS = ("model", "model_tag", "served_model_name", "load_format")
#: Dimensions of a worker's place within an engine core, the outermost first -> fields of the sizes.
WITHIN_CORE = {
    "pp": "pipeline_parallel_size",
    "pcp": "prefill_context_parallel_size",
    "tp": "tensor_parallel_size",
}
MAX_COMMAND = 8192
MAX_EXPORTS = 16


@dataclass(frozen=True)
class Config:
    """The set-up of one run, as far as it is known; None is unknown."""

    model: str | None = None
    served_model_name: str | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    prefill_context_parallel_size: int | None = None
    data_parallel_size: int | None = None
    max_model_len: int | None = None  # tokens
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    block_size: int | None = None  # tokens
    num_gpu_blocks_override: int | None = None
    enforce_eager: bool | None = None
    command: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()  # of the line "non-default args", as a command has them
    vllm_version: str | None = None
    ascend_version: str | None = None
    engine: str | None = None  # as a report names it
    around: str | None = None  # engine named by the text around a start; lines of the start win
    heading: str | None = None
    given: Given | None = None  # of an engine whose log says it
    draft_model: bool | None = None  # True: vLLM loads a second model beside the one that serves

    def parallel_size(self, dimension: str) -> int | None:
        """Return the size of ``dp`` or of a dimension of ``WITHIN_CORE``."""
        size: int | None = getattr(self, WITHIN_CORE.get(dimension, "data_parallel_size"))
        return size

    @property
    def world_size(self) -> int:
        """Workers of one engine core; unknown sizes count as 1."""
        size = 1
        for dimension in WITHIN_CORE:
            size *= self.parallel_size(dimension) or 1
        return size

    def rank_of(self, dims: Mapping[str, int]) -> int | None:
        """Return the rank within an engine core, from the places that are known."""
        if "rank" in dims:
            return dims["rank"]
        rank = 0
        for name in WITHIN_CORE:
            place, size = dims.get(name), self.parallel_size(name)
            if place is None and (size or 1) > 1:
                return None  # its place is unknown
            if rank and size is None and place:
                return None  # the number of ranks before it is unknown
            rank = rank * (size or 1) + (place or 0)
        return rank if dims.keys() & WITHIN_CORE.keys() else None

    def merged(self, other: Config) -> Config:
        """Return this set-up with the values that the other has."""
        known = {name: value for name, value in vars(other).items() if value not in (None, ())}
        if self.engine not in (None, VLLM.name):
            known.pop("engine", None)  # they print what vLLM or torch prints, never the reverse
        return replace(self, **known)


@dataclass(frozen=True)
class ConfigLine:
    """A line about the set-up."""

    kind: str  # of ``SettingLine``, or command
    config: Config


class ConfigReader:
    """Reads lines one after the other; commands may go over several."""

    def __init__(self) -> None:
        self._command = ""  # the beginning of a command that goes on
        self._arguments = [
            (log, log.argument_lines()) for log in LOGS.values() if log.argument_lines
        ]
        #: Allocator settings of the whole text, in their order.
        self.exports: dict[str, list[str]] = {}

    def read(self, text: str) -> ConfigLine | None:
        """Return the set-up in one line; None where there is none or the line goes on."""
        command = f"{self._command} {text.strip()}" if self._command else None
        for log, lines in self._arguments:
            if command is None and (lines.is_open or lines.opens in text):
                found = lines.feed(text)
                return ConfigLine("args", _config_of(log, found, False)) if found else None
        matches = [
            (row, match)
            for row in _SETTINGS
            if command is None and row.anchor in text and (match := row.pattern.search(text))
        ]
        traces = [_said(row, match) for row, match in matches if row.kind == "trace"]
        config = Config()
        for each in reversed(traces):
            config = config.merged(each)
        for row, match in matches:
            if row.kind in ("init", "api", "args"):
                more = config if row.kind == "init" else Config()
                return ConfigLine(row.kind, more.merged(_said(row, match)))
        for log in LOGS.values():
            if command is None and log.command is not None and log.engine in text:
                match = log.command.search(text)
                command = match and (match["serve"] or f"python -m {match['module']}")
        if command is not None:
            self._command = ""
            if command.endswith("\\") and len(command) < MAX_COMMAND:
                self._command = command[:-1]
                return None
            command = command[:MAX_COMMAND]
            try:
                words = shlex.split(command, comments=True)
            except ValueError:
                words = command.split()
            redacted = tuple(redact_command(words))
            for log in LOGS.values():
                if log.set_up is not None and log.engine in command:
                    given = read_options(words, row_of_run(log.engine).set_up)
                    said = replace(_config_of(log, given, True), command=redacted)
                    return ConfigLine("command", said)
            values: dict[str, object] = dict(read_options(words, VLLM.set_up))
            if words[:2] == ["vllm", "serve"] and len(words) > 2 and not words[2].startswith("-"):
                values.setdefault("model", words[2])
            return ConfigLine("command", Config(**values, command=redacted))  # type: ignore[arg-type]
        if matches and matches[0][0].kind == "heading":
            return ConfigLine("heading", _said(*matches[0]))
        if "ALLOC_CONF" in text and (match := _EXPORT.search(text)):
            known = self.exports.setdefault(match["name"], [])
            setting = match["value"].strip("\"'")
            if setting not in known and len(known) < MAX_EXPORTS:
                known.append(setting)
        return ConfigLine("trace", config) if traces else None


def _said(row: SettingLine, match: re.Match[str]) -> Config:
    """Return what a line about the set-up says."""
    values: dict[str, object] = dict(row.said)
    for name, text in match.groupdict().items():
        if name != "rest" and text is not None:
            values[name] = typed(text, _TYPES.get(name, str))
    if row.pair is not None:
        for key, text in row.pair.findall(match["rest"] or ""):
            field = _FIELDS.get(key, key)
            value = typed(text, _TYPES[field]) if field in _TYPES else None
            if value is not None:
                values.setdefault(field, value)
    if row.kind == "args":
        values["arguments"] = arguments_of(match["rest"])
    return Config(**values)  # type: ignore[arg-type]  # typed returns the field's type


def arguments_of(text: str) -> tuple[str, ...]:
    """Return the options that a line "non-default args" says, secrets redacted.

    Args:
        text: from its ``{`` on. A line that is cut, or holds what is no plain value, gives none:
            half of a command is another command.
    """
    try:
        found = ast.literal_eval(text[: text.rfind("}") + 1])
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return ()
    if not isinstance(found, dict):
        return ()
    given = {
        key: value
        for key, value in found.items()
        if key not in _NO_OPTIONS and value not in (None, "", [], {})
    }
    if not all(isinstance(value, (dict, list, float, int, str)) for value in given.values()):
        return ()
    return tuple(redact_command(words_of(given)))


def _config_of(log: LogLines, found: Mapping[str, Value], whole: bool) -> Config:
    """Return the set-up that the arguments of an engine say, ``whole`` where they are all."""
    assert log.set_up is not None
    return Config(**log.set_up(found, whole))  # type: ignore[arg-type]  # of the field's type
