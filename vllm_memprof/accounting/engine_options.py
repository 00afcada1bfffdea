"""What engines call the options that findings and remedies name: a row per engine.

The share of memory that an engine asks for belongs to its equation (``equations.Equation.share``);
this table has the rest. A third engine is a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vllm_memprof.accounting.equations import form_of
from vllm_memprof.accounting.model import RankReport
from vllm_memprof.text import Text, text

SGLANG = "sglang"


@dataclass(frozen=True)
class Options:
    """Options of one engine, as its command takes them."""

    no_graphs: str
    no_graphs_said: Text
    #: Phase -> what makes it need less, for those before the KV cache is sized: its size is no
    #: cause.
    before_kv: Mapping[str, Text]
    before_kv_else: Text  # where the phase is not known
    lower_share: Text
    #: Phase -> what makes it need less beside the KV cache, where there is such an option.
    beside_kv: Mapping[str, Text]
    #: Ids of ``accounting.remedies.REMEDIES`` that name options of this engine; None: all.
    remedies: frozenset[str] | None = None


_VLLM = Options(
    no_graphs="--enforce-eager",
    no_graphs_said=text("--enforce-eager (captures no graphs)"),
    before_kv={
        "weight_load": text(
            "more ranks (--tensor-parallel-size), or weights of fewer bits (--quantization)"
        ),
        "mm_profile": text(
            "a lower --max-num-batched-tokens, or fewer images per prompt (--limit-mm-per-prompt)"
        ),
        "profile_run": text("a lower --max-num-batched-tokens or --max-num-seqs"),
    },
    before_kv_else=text(
        "before it: more ranks (--tensor-parallel-size), or a lower --max-num-batched-tokens "
        "(by how much is not known)"
    ),
    lower_share=text("a lower --gpu-memory-utilization (by how much is not known)"),
    beside_kv={},
)
_GRAPHS = text("a lower --cuda-graph-max-bs (by how much is not known)")
_STEPS = text(
    "a lower --chunked-prefill-size (prefill) or --max-running-requests (decode), by how much is "
    "not known"
)
_SGLANG = Options(
    no_graphs="--disable-cuda-graph",
    no_graphs_said=text("--disable-cuda-graph (captures no graphs)"),
    before_kv={
        "weight_load": text("more ranks (--tp-size), or weights of fewer bits (--quantization)")
    },
    before_kv_else=text("before it: more ranks (--tp-size), by how much is not known"),
    lower_share=text("a lower --mem-fraction-static (by how much is not known)"),
    beside_kv={"graph_capture": _GRAPHS, "request": _STEPS},
    remedies=frozenset({"expandable_segments", "utilization", "other_processes"}),
)
_OF_ENGINE = {SGLANG: _SGLANG}


def options_of(engine: str | None) -> Options:
    """Return the options of an engine; those of vLLM, which vllm-ascend takes too, by default."""
    return _OF_ENGINE.get(engine or "", _VLLM)


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
