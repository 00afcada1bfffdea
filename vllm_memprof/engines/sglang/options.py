"""The options of SGLang that memprof reads or names: data. (sglang/srt/server_args.py, 0.5.23)"""

from __future__ import annotations

from vllm_memprof.engines.base import Arguments
from vllm_memprof.options import DeviceFactor, Option
from vllm_memprof.text import text

#: What the set-up of a run is read from; no other value of its line leaves the reader.
SET_UP = (
    Option("model-path", also=("model",)),
    Option("served-model-name"),
    Option("device"),
    Option("tp-size", int, ("tp", "tensor-parallel-size")),
    Option("pp-size", int, ("pp", "pipeline-parallel-size")),
    Option("dp-size", int, ("dp", "data-parallel-size")),
    Option("enable-dp-attention", bool),
    Option("mem-fraction-static", float),
    Option("max-total-tokens", int),
    Option("page-size", int),
    Option("context-length", int),
    Option("disable-cuda-graph", bool),
    Option("disable-decode-cuda-graph", bool),
    Option("cuda-graph-backend-decode"),
    Option("speculative-algorithm"),
)
#: (compute_world_size; the parser takes any beginning of a name)
DEVICES = (
    DeviceFactor(("--tp-size", "--tp", "--tensor-parallel-size")),
    DeviceFactor(("--pp-size", "--pp", "--pipeline-parallel-size")),
    DeviceFactor(("--dp-size", "--dp", "--data-parallel-size"), "--enable-dp-attention"),
)
ARGUMENTS = Arguments(
    share="--mem-fraction-static",
    share_grounds=text(
        "free before loading x the difference: the KV cache is smaller by this much"
    ),
    ranks="--tp-size",
    no_graphs="--disable-cuda-graph",
    no_graphs_too=(("--cuda-graph-backend-decode", "disabled"),),
    graph_sizes="--cudagraph-capture-sizes",
    # 0.5.23 refuses the shorter name as ambiguous; older releases know that alone
    largest_graph="--cuda-graph-max-bs-decode / --cuda-graph-max-bs",
    steps=("--chunked-prefill-size", "--max-running-requests"),
    without=frozenset({"image_size", "images_per_prompt", "batched_tokens", "sequences"}),
    share_of_total=False,
    negatable=False,
)
