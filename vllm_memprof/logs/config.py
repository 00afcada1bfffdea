"""Reads the set-up of a run from its log: engine, versions, model, arguments; no memory figure."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from vllm_memprof.engines import VLLM, row_of_run
from vllm_memprof.engines.line_format import Given, LogLines
from vllm_memprof.logs.formats import OF_ENGINES
from vllm_memprof.options import Value, read_options, typed, words_of
from vllm_memprof.redact import redact_command

_ENGINE_INIT = re.compile(
    r"Initializing an? (?:V[01] )?LLM engine(?: \(v?(?P<version>[^)\s]+)\))?"
    r"(?: with config: ?(?P<rest>.*))?"
)
_API_VERSION = re.compile(r"vLLM API server version v?(?P<version>\d[\w.+]*)")
_ASCEND_VERSION = re.compile(
    r"vllm[-_]ascend(?: version)?[ :=v]+(?P<version>\d+\.\d+\.\d+\w*)", re.IGNORECASE
)
_NON_DEFAULT = re.compile(r"non-default args: ?(?P<rest>\{.*)")
_COMMAND = re.compile(
    r"(?:(?:^|[\s$#;&|])(?P<serve>vllm\s+serve\s+\S.*)"
    r"|\bpython3?\s+-m\s+(?P<module>vllm\.entrypoints\.\S+\s+-.*))$"
)
_COMMANDS = (
    ("vllm", _COMMAND),
    *((log.engine, log.command) for log in OF_ENGINES if log.command is not None),
)
#: vllm_ascend/utils.py::refresh_block_size
_BLOCK_SIZE = re.compile(r"Block size is set to (?P<value>\d+) if ")
_IN_CODE = re.compile(r"(?<![\w-])gpu_memory_utilization\s*=\s*(?P<value>0?\.\d+|1\.0+)\s*[,)]")
#: A person's own heading over the figures that follow, such as "gpu_xxx = 0.95".
_UTIL_HEADING = re.compile(r"^[^\w(]{0,6}gpu_\w+ ?= ?(?P<value>0?\.\d+|1\.0+)(?![\w.])")
_EXPORT = re.compile(
    r"(?:^\s*|\b(?:export|ENV)\s+)(?P<name>PYTORCH_(?:NPU_|CUDA_)?ALLOC_CONF)="
    r"(?P<value>\"[^\"]*\"|'[^']*'|[^\s\"']+)"
)
#: vLLM names a draft model; n-grams of the prompt are none.
_DRAFT = re.compile(
    r"SpeculativeConfig\((?!(?:method|draft_model|model)='\[?ngram)"
    r"|Configuring SpecDecodeWorker with proposer=(?!.*NGramWorker)|Loading drafter model\.\.\."
)
_HEADING = re.compile(r"^\s{0,3}#{2,6}\s+\S")
#: Texts of one platform; by whatever engine, where vLLM has no line of its own beside them.
_ASCEND_TRACE = re.compile(
    r"vllm[-_]ascend|\bnpu-smi\b|\bHCCL|NPU out of memory|plugin ascend|model_runner_v1\.py"
    r"|worker_v1\.py|worker_310p\.py|PYTORCH_NPU|NPUWorker"
)
_CUDA_TRACE = re.compile(
    r"CUDA out of memory|nvidia-smi|\bNCCL\b|PYTORCH_CUDA|\[gpu_worker\.py|plugin cuda"
    r"|platform cuda|Free memory on device cuda:\d"
)
#: What serves, or what is below it, as cures name it -> what it alone prints.
OWN_WORDS: dict[str, re.Pattern[str]] = {
    **{log.engine: log.speaks for log in OF_ENGINES},
    "vllm": re.compile(
        r"vllm|EngineCore|VllmWorker|\bWorker_[DPT]P\d|\bLLM engine\b"
        r"|(?:gpu_worker|model_runner_v1|worker_v1|worker_310p)\.py|gpu[-_]memory[-_]utilization"
    ),
    "torch_npu": re.compile(
        r"(?<![A-Za-z])(?:NPU|npu(?![a-z]))|[Aa]scend|\bacl[rn]|\bE[ILZEHJ]\d{4}\b|HCCL|Hccl|CANN"
    ),
    "torch": re.compile(r"CUDA|cuda[A-Z:]|NCCL|cuBLAS|CUBLAS|nvidia|NVIDIA|Triton"),
}
#: Words of the lines that begin a start.
BEGINS = (
    *("Initializing a V", "Initializing an LLM engine", "vLLM API server version"),
    *(lines().opens for log in OF_ENGINES if (lines := log.argument_lines) is not None),
)

#: Field of ``Config`` -> its type. A number counts only when something follows it: lines get cut.
_TYPES = {option.field: option.kind for option in VLLM.set_up}
#: Keys with another name than the field.
_FIELDS = {"max_seq_len": "max_model_len", "model_tag": "model"}
_INIT_KEYS = (
    "model",
    "served_model_name",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "max_seq_len",
    "enforce_eager",
)
_ARG_KEYS = (
    "model",
    "model_tag",
    *(name for name in _TYPES if name not in ("model", "served_model_name")),
)
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
        if dimension == "dp":
            return self.data_parallel_size
        size: int | None = getattr(self, WITHIN_CORE[dimension])
        return size

    @property
    def world_size(self) -> int:
        """Workers of one engine core; unknown sizes count as 1."""
        size = 1
        for dimension in WITHIN_CORE:
            size *= self.parallel_size(dimension) or 1
        return size

    def merged(self, other: Config) -> Config:
        """Return this set-up with the values that the other has."""
        known = {name: value for name, value in vars(other).items() if value not in (None, ())}
        if self.engine not in (None, "vllm"):
            known.pop("engine", None)  # they print what vLLM or torch prints, never the reverse
        return replace(self, **known)


@dataclass(frozen=True)
class ConfigLine:
    """A line about the set-up."""

    kind: (
        str  # init | api | args | command: an engine starts; heading: of a section; trace: neither
    )
    config: Config


class ConfigReader:
    """Reads lines one after the other; commands may go over several."""

    def __init__(self) -> None:
        self._command: str | None = None  # the beginning of a command that goes on
        self._arguments = [(log, log.argument_lines()) for log in OF_ENGINES if log.argument_lines]
        #: Allocator settings of the whole text, in their order.
        self.exports: dict[str, list[str]] = {}

    def read(self, text: str) -> ConfigLine | None:
        """Return the set-up in one line; None where there is none or the line goes on."""
        if self._command is not None:
            whole = f"{self._command} {text.strip()}"
            if text.strip().endswith("\\") and len(whole) < MAX_COMMAND:
                self._command = whole.rstrip()[:-1]
                return None
            self._command = None
            return ConfigLine("command", _command_config(whole[:MAX_COMMAND]))
        for log, lines in self._arguments:
            if lines.is_open or lines.opens in text:
                found = lines.feed(text)
                return ConfigLine("args", _config_of(log, found, False)) if found else None
        if not text:
            return None
        if "LLM engine" in text and (match := _ENGINE_INIT.search(text)):
            pattern = r"(?<![\w.]){key}=(?P<v>'[^']*'|[^,'()]+)(?=,)"
            keys = _pairs(match["rest"] or "", _INIT_KEYS, pattern)
            named = replace(keys, vllm_version=match["version"], engine=_engine_of(text))
            drafts = True if _DRAFT.search(text) else None
            return ConfigLine("init", replace(named, draft_model=drafts))
        if "server version" in text and (match := _API_VERSION.search(text)):
            return ConfigLine("api", Config(vllm_version=match["version"]))
        if "non-default args" in text and (match := _NON_DEFAULT.search(text)):
            pattern = r"'{key}': ?(?P<v>'[^']*'|[^,'{{}}]+)(?=[,}}])"
            pairs = _pairs(match["rest"], _ARG_KEYS, pattern)
            return ConfigLine("args", replace(pairs, arguments=arguments_of(match["rest"])))
        for needle, starts in _COMMANDS:
            if needle in text and (match := starts.search(text)):
                command = match["serve"] or f"python -m {match['module']}"
                if command.endswith("\\"):
                    self._command = command[:-1]
                    return None
                return ConfigLine("command", _command_config(command))
        if "gpu_" in text and len(text) < 60 and (match := _UTIL_HEADING.match(text)):
            utilization, heading = float(match["value"]), text.strip("*# :")
            said = Config(gpu_memory_utilization=utilization, heading=heading)
            return ConfigLine("heading", said)
        if text.lstrip().startswith("##") and _HEADING.match(text):
            return ConfigLine("heading", Config(heading=text.strip("# ")))
        if "ALLOC_CONF" in text and (match := _EXPORT.search(text)):
            known = self.exports.setdefault(match["name"], [])
            setting = match["value"].strip("\"'")
            if setting not in known and len(known) < MAX_EXPORTS:
                known.append(setting)
        config = Config(engine=_engine_of(text))
        if "ascend" in text and (match := _ASCEND_VERSION.search(text)):
            config = replace(config, ascend_version=match["version"], engine="vllm-ascend")
        if ("draft" in text or "SpecDecode" in text) and _DRAFT.search(text):
            config = replace(config, draft_model=True)
        if "gpu_memory_utilization" in text and (match := _IN_CODE.search(text)):
            config = replace(config, gpu_memory_utilization=float(match["value"]))
        if "Block size is" in text and (match := _BLOCK_SIZE.search(text)):
            config = replace(config, block_size=int(match["value"]))
        return ConfigLine("trace", config) if config != Config() else None


def _engine_of(text: str) -> str | None:
    if _ASCEND_TRACE.search(text):
        return "vllm-ascend"
    return "vllm" if _CUDA_TRACE.search(text) else None


def _pairs(text: str, keys: Iterable[str], pattern: str) -> Config:
    """Return the values of keys, each found by ``pattern`` with the key filled in."""
    values: dict[str, object] = {}
    for key in keys:
        field = _FIELDS.get(key, key)
        match = re.search(pattern.format(key=key), text)
        value = None if match is None else typed(match["v"], _TYPES[field])
        if value is not None:
            values[field] = value
    return Config(**values)  # type: ignore[arg-type]  # typed returns the field's type


#: Keys that are no option of a plan: the model, which stands alone, and how weights are read.
_NO_OPTIONS = ("model", "model_tag", "served_model_name", "load_format")


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
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        return ()
    given = {
        key: value
        for key, value in found.items()
        if key not in _NO_OPTIONS and value not in (None, "", [], {})
    }
    if not all(isinstance(value, (dict, list, float, int, str)) for value in given.values()):
        return ()
    return tuple(redact_command(words_of(given)))


def _command_config(text: str) -> Config:
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        words = text.split()
    for log in OF_ENGINES:
        if log.set_up is not None and log.engine in text:
            found = read_options(words, row_of_run(log.engine).set_up)
            return replace(_config_of(log, found, True), command=tuple(redact_command(words)))
    values: dict[str, object] = dict(read_options(words, VLLM.set_up))
    if words[:2] == ["vllm", "serve"] and len(words) > 2 and not words[2].startswith("-"):
        values.setdefault("model", words[2])
    return Config(**values, command=tuple(redact_command(words)))  # type: ignore[arg-type]


def _config_of(log: LogLines, found: Mapping[str, Value], whole: bool) -> Config:
    """Return the set-up that the arguments of an engine say, ``whole`` where they are all."""
    assert log.set_up is not None
    return Config(**log.set_up(found, whole))  # type: ignore[arg-type]  # of the field's type
