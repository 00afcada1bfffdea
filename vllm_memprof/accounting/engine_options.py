"""What engines call the options that findings and remedies name: a row per engine.

The share of memory that an engine asks for belongs to its equation (``equations.Equation.share``);
this table has the rest. A third engine is a row.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from vllm_memprof.accounting.equations import form_of
from vllm_memprof.accounting.model import RankReport

SGLANG = "sglang"
#: Short names of engine arguments.
#: (vllm/engine/arg_utils.py::EngineArgs.add_cli_args, read in 0.23.0)
SHORT_NAMES = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpn": "--data-parallel-rank",
    "-dpl": "--data-parallel-size-local",
    "-dpr": "--data-parallel-start-rank",
    "-dpa": "--data-parallel-address",
    "-dpp": "--data-parallel-rpc-port",
    "-dpb": "--data-parallel-backend",
    "-pcp": "--prefill-context-parallel-size",
    "-n": "--nnodes",
    "-r": "--node-rank",
    "-dcp": "--decode-context-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-q": "--quantization",
    "-O": "--optimization-level",
    "-cc": "--compilation-config",
}
_NUMBER = re.compile(r"-\d")


@dataclass(frozen=True)
class Options:
    """Options of one engine, as its command takes them."""

    ranks: str = "--tensor-parallel-size"
    no_graphs: str = "--enforce-eager"
    #: Other words of a command that leave graphs out, each with its value.
    no_graphs_too: tuple[tuple[str, str], ...] = ()
    graph_sizes: str = "--cudagraph-capture-sizes"  # a list of batch sizes
    largest_graph: str | None = None  # the largest batch size, where that is the option
    #: What makes a step of requests smaller, where no profile run tells its size.
    steps: tuple[str, ...] = ()
    #: Ids of ``accounting.remedies.REMEDIES`` that do not apply to the engine.
    without: frozenset[str] = frozenset()


_VLLM = Options()
_SGLANG = Options(
    ranks="--tp-size",
    no_graphs="--disable-cuda-graph",
    no_graphs_too=(("--cuda-graph-backend-decode", "disabled"),),
    # 0.5.23 refuses the shorter name as ambiguous; older releases know that alone
    largest_graph="--cuda-graph-max-bs-decode / --cuda-graph-max-bs",
    steps=("--chunked-prefill-size", "--max-running-requests"),
    without=frozenset({"image_size", "images_per_prompt", "batched_tokens", "sequences"}),
)
_OF_ENGINE = {SGLANG: _SGLANG}


def options_of(engine: str | None) -> Options:
    """Return the options of an engine; those of vLLM, which vllm-ascend takes too, by default."""
    return _OF_ENGINE.get(engine or "", _VLLM)


def is_eager(command: Sequence[str], engine: str | None) -> bool:
    """Return whether a command leaves graphs out."""
    options = options_of(engine)
    words = [part for word in command for part in word.split("=", 1)]
    return options.no_graphs in command or any(
        (name, value) in options.no_graphs_too for name, value in pairwise(words)
    )


def is_cuda(engine: str | None, device: str | None) -> bool:
    """Return whether an engine runs on CUDA: by its name, or, of SGLang, by its ``device``."""
    return device == "cuda" if engine == SGLANG else engine == "vllm"


@dataclass(frozen=True)
class Share:
    """What an engine asks for: a share of a size."""

    option: str
    base_bytes: int | None
    value: float | None


def share_of(rank: RankReport, engine: str | None = None) -> Share:
    """Return the share that a rank's equation takes, with the size that it is a share of.

    Args:
        rank: with its budget.
        engine: counts where no equation is known.
    """
    row = form_of(rank.budget.equation)
    if row is None or row.base == "device_total_bytes":
        if engine == SGLANG:
            return Share("--mem-fraction-static", None, None)
        utilization = rank.budget.gpu_memory_utilization
        return Share("--gpu-memory-utilization", rank.device_total_bytes, utilization)
    base = rank.figures.get(row.base)
    option = f"--{row.share.replace('_', '-')}"
    return Share(option, None if base is None else int(base), rank.figures.get(row.share))


def given_options(command: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the options of a command line by their long names: (name, value), "given" for a flag.

    Options of memprof are among them. One that was given again comes again.
    """
    index = 0
    while index < len(command):
        token, index = command[index], index + 1
        if not token.startswith("-") or token in ("-", "--") or _NUMBER.match(token):
            continue  # the program, its command, the model: named elsewhere
        name, equals, value = token.partition("=")
        if not equals:
            values = []
            while index < len(command) and (
                not command[index].startswith("-") or _NUMBER.match(command[index])
            ):
                values.append(command[index])
                index += 1
            value = " ".join(values) or "given"
        if (name, value) == ("-q", "given"):  # with a value it is the engine's quantization
            name = "--quiet"
        option, dot, key = name.partition(".")  # of a dotted one the keys are the engine's own
        if option.startswith("--"):
            option = option.replace("_", "-")
        yield SHORT_NAMES.get(option, option) + dot + key, value
