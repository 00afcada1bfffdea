"""What a log says about the run itself: engine, versions, model, arguments. No memory figure is read here."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field, replace
from typing import Any

_ENGINE_INIT = re.compile(
    r"Initializing an? (?:V[01] )?LLM engine(?: \(v?(?P<version>[^)\s]+)\))?(?: with config: ?(?P<rest>.*))?"
)
_API_VERSION = re.compile(r"vLLM API server version v?(?P<version>\d[\w.+]*)")
_ASCEND_VERSION = re.compile(
    r"vllm[-_]ascend(?: version)?[ :=v]+(?P<version>\d+\.\d+\.\d+\w*)", re.IGNORECASE
)
_NON_DEFAULT = re.compile(r"non-default args: ?(?P<rest>\{.*)")
_COMMAND = re.compile(
    r"(?:(?:^|[\s$#;&|])(?P<serve>vllm\s+serve\s+\S.*)|\bpython3?\s+-m\s+(?P<module>vllm\.entrypoints\.\S+\s+-.*))$"
)
#: vllm_ascend/utils.py::refresh_block_size
_BLOCK_SIZE = re.compile(r"Block size is set to (?P<value>\d+) if ")
_IN_CODE = re.compile(r"(?<![\w-])gpu_memory_utilization\s*=\s*(?P<value>0?\.\d+|1\.0+)\s*[,)]")
#: A person's own heading over the figures that follow, such as "gpu_xxx = 0.95".
_UTIL_HEADING = re.compile(r"^[^\w(]{0,6}gpu_\w+ ?= ?(?P<value>0?\.\d+|1\.0+)(?![\w.])")
_EXPORT = re.compile(
    r"(?:^\s*|\b(?:export|ENV)\s+)(?P<name>PYTORCH_(?:NPU_|CUDA_)?ALLOC_CONF)=(?P<value>\"[^\"]*\"|'[^']*'|[^\s\"']+)"
)
_HEADING = re.compile(r"^\s{0,3}#{2,6}\s+\S")
#: Traces of one engine; none is a proof, all are printed by one of them only.
_ASCEND_TRACE = re.compile(
    r"vllm[-_]ascend|\bnpu-smi\b|\bHCCL|NPU out of memory|plugin ascend|model_runner_v1\.py|worker_v1\.py"
    r"|worker_310p\.py|PYTORCH_NPU|NPUWorker"
)
_CUDA_TRACE = re.compile(
    r"CUDA out of memory|nvidia-smi|\bNCCL\b|PYTORCH_CUDA|\[gpu_worker\.py|plugin cuda|platform cuda"
)

#: Key in "with config:" -> what the value is. A number counts only when something follows it: lines get cut.
_INIT_KEYS = {
    "model": ("model", str),
    "served_model_name": ("served_model_name", str),
    "tensor_parallel_size": ("tensor_parallel_size", int),
    "pipeline_parallel_size": ("pipeline_parallel_size", int),
    "data_parallel_size": ("data_parallel_size", int),
    "max_seq_len": ("max_model_len", int),
    "enforce_eager": ("enforce_eager", bool),
}
_ARG_KEYS = {
    "model": ("model", str),
    "model_tag": ("model", str),
    "tensor_parallel_size": ("tensor_parallel_size", int),
    "pipeline_parallel_size": ("pipeline_parallel_size", int),
    "data_parallel_size": ("data_parallel_size", int),
    "prefill_context_parallel_size": ("prefill_context_parallel_size", int),
    "max_model_len": ("max_model_len", int),
    "gpu_memory_utilization": ("gpu_memory_utilization", float),
    "kv_cache_memory_bytes": ("kv_cache_memory_bytes", int),
    "block_size": ("block_size", int),
    "num_gpu_blocks_override": ("num_gpu_blocks_override", int),
    "enforce_eager": ("enforce_eager", bool),
}
_OPTIONS = {
    "--model": ("model", str),
    "--served-model-name": ("served_model_name", str),
    "--tensor-parallel-size": ("tensor_parallel_size", int),
    "-tp": ("tensor_parallel_size", int),
    "--pipeline-parallel-size": ("pipeline_parallel_size", int),
    "-pp": ("pipeline_parallel_size", int),
    "--prefill-context-parallel-size": ("prefill_context_parallel_size", int),
    "-pcp": ("prefill_context_parallel_size", int),
    "--data-parallel-size": ("data_parallel_size", int),
    "-dp": ("data_parallel_size", int),
    "--max-model-len": ("max_model_len", int),
    "--gpu-memory-utilization": ("gpu_memory_utilization", float),
    "--kv-cache-memory": ("kv_cache_memory_bytes", int),
    "--kv-cache-memory-bytes": ("kv_cache_memory_bytes", int),
    "--block-size": ("block_size", int),
    "--num-gpu-blocks-override": ("num_gpu_blocks_override", int),
}
MAX_COMMAND = 8192
MAX_EXPORTS = 16


@dataclass(frozen=True)
class Config:
    """Everything known of one run's set-up; an absent value is None."""

    values: dict[str, Any] = field(
        default_factory=dict
    )  # model, tensor_parallel_size, ...; see the tables above
    command: tuple[str, ...] = ()
    vllm_version: str | None = None
    ascend_version: str | None = None
    engine: str | None = None  # vllm | vllm-ascend
    around: str | None = (
        None  # the engine that the text around a start speaks of: what the start says comes first
    )
    heading: str | None = None

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def merged(self, other: Config) -> Config:
        """This one, and what the other adds or says anew."""
        return Config(
            values={**self.values, **other.values},
            command=other.command or self.command,
            vllm_version=other.vllm_version or self.vllm_version,
            ascend_version=other.ascend_version or self.ascend_version,
            # vllm-ascend prints lines of vLLM as well, never the other way round
            engine="vllm-ascend"
            if "vllm-ascend" in (self.engine, other.engine)
            else other.engine or self.engine,
            around=other.around or self.around,
            heading=other.heading or self.heading,
        )


@dataclass(frozen=True)
class Marker:
    """A line about the set-up."""

    kind: str  # init | api | args | command: a start of the engine; heading: of a section; trace: neither
    config: Config


class ConfigReader:
    """Reads lines one after the other; commands may go over several."""

    def __init__(self) -> None:
        self._command: str | None = None
        self.exports: dict[
            str, list[str]
        ] = {}  # allocator settings of the whole text, in their order

    def read(self, text: str) -> Marker | None:
        if self._command is not None:
            return self._continue(text)
        if not text:
            return None
        if "LLM engine" in text and (match := _ENGINE_INIT.search(text)):
            values = _pairs(
                match["rest"] or "", _INIT_KEYS, r"(?<![\w.]){key}=(?P<v>'[^']*'|[^,'()]+)(?=,)"
            )
            return Marker(
                "init", Config(values, vllm_version=match["version"], engine=_engine_of(text))
            )
        if "server version" in text and (match := _API_VERSION.search(text)):
            return Marker("api", Config(vllm_version=match["version"]))
        if "non-default args" in text and (match := _NON_DEFAULT.search(text)):
            values = _pairs(
                match["rest"], _ARG_KEYS, r"'{key}': ?(?P<v>'[^']*'|[^,'{{}}]+)(?=[,}}])"
            )
            return Marker("args", Config(values))
        if "vllm" in text and (match := _COMMAND.search(text)):
            return self._start(match["serve"] or f"python -m {match['module']}")
        if "gpu_" in text and len(text) < 60 and (match := _UTIL_HEADING.match(text)):
            value = float(match["value"])
            return Marker(
                "heading", Config({"gpu_memory_utilization": value}, heading=text.strip("*# :"))
            )
        if text.lstrip().startswith("##") and _HEADING.match(text):
            return Marker("heading", Config(heading=text.strip("# ")))
        if "ALLOC_CONF" in text and (match := _EXPORT.search(text)):
            known = self.exports.setdefault(match["name"], [])
            setting = match["value"].strip("\"'")
            if setting not in known and len(known) < MAX_EXPORTS:
                known.append(setting)
        found = Config(engine=_engine_of(text))
        if "ascend" in text and (match := _ASCEND_VERSION.search(text)):
            found = replace(found, ascend_version=match["version"], engine="vllm-ascend")
        if "gpu_memory_utilization" in text and (match := _IN_CODE.search(text)):
            found = replace(found, values={"gpu_memory_utilization": float(match["value"])})
        if "Block size is" in text and (match := _BLOCK_SIZE.search(text)):
            found = replace(found, values={"block_size": int(match["value"])})
        return Marker("trace", found) if found.engine or found.values else None

    def _start(self, text: str) -> Marker | None:
        if text.endswith("\\"):
            self._command = text[:-1]
            return None
        return _command_marker(text)

    def _continue(self, text: str) -> Marker | None:
        assert self._command is not None
        whole = f"{self._command} {text.strip()}"
        if text.strip().endswith("\\") and len(whole) < MAX_COMMAND:
            self._command = whole.rstrip()[:-1]
            return None
        self._command = None
        return _command_marker(whole[:MAX_COMMAND])


def _engine_of(text: str) -> str | None:
    if _ASCEND_TRACE.search(text):
        return "vllm-ascend"
    return "vllm" if _CUDA_TRACE.search(text) else None


def _pairs(text: str, keys: dict[str, tuple[str, type]], pattern: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, (name, kind) in keys.items():
        match = re.search(pattern.format(key=key), text)
        value = None if match is None else _value(match["v"], kind)
        if value is not None:
            values[name] = value
    return values


def _value(text: str, kind: type) -> Any:
    text = text.strip().strip("'\"")
    if kind is bool:
        return {"True": True, "False": False}.get(text)
    if kind is str:
        return text or None
    try:
        return kind(text)
    except ValueError:
        return None


def _command_marker(text: str) -> Marker:
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        words = text.split()
    values: dict[str, Any] = {}
    if words[:2] == ["vllm", "serve"] and len(words) > 2 and not words[2].startswith("-"):
        values["model"] = words[2]
    if "--enforce-eager" in words:
        values["enforce_eager"] = True
    for index, word in enumerate(words):
        option, _, value = word.partition("=")
        option = option.replace("_", "-")
        if option in _OPTIONS:
            name, kind = _OPTIONS[option]
            found = _value(value or (words[index + 1] if index + 1 < len(words) else ""), kind)
            if found is not None:
                values[name] = found
    return Marker("command", Config(values, command=tuple(words), engine=None))
