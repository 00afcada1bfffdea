"""The options of vLLM, and of vllm-ascend with it, that memprof reads or names: data."""

from __future__ import annotations

from vllm_memprof.engines.base import Arguments
from vllm_memprof.options import DeviceFactor, Option
from vllm_memprof.text import text

#: What the set-up of a run is read from. (vllm/engine/arg_utils.py::EngineArgs)
SET_UP = (
    Option("model", also=("model-tag",)),
    Option("served-model-name"),
    Option("tensor-parallel-size", int),
    Option("pipeline-parallel-size", int),
    Option("prefill-context-parallel-size", int),
    Option("data-parallel-size", int),
    Option("max-model-len", int),
    Option("gpu-memory-utilization", float),
    Option("kv-cache-memory-bytes", int, ("kv-cache-memory",)),
    Option("block-size", int),
    Option("num-gpu-blocks-override", int),
    Option("enforce-eager", bool),
)
#: What says which part of a deployment a host is.
#: (vllm/engine/arg_utils.py::EngineArgs.create_engine_config, 0.13.0 and 0.23.0)
PART = (
    Option("headless", bool),
    Option("data-parallel-size", int),
    Option("data-parallel-size-local", int),
    Option("data-parallel-start-rank", int),
    Option("data-parallel-rank", int),
    Option("data-parallel-address"),
    Option("data-parallel-rpc-port", int),
    Option("data-parallel-backend"),
    Option("nnodes", int),
    Option("node-rank", int),
    Option("master-addr"),
    Option("master-port", int),
    Option("tensor-parallel-size", int),
    Option("pipeline-parallel-size", int),
    Option("prefill-context-parallel-size", int),
)
#: (vllm/config/parallel.py::ParallelConfig, 0.23.0: world_size = pp x tp x pcp, times dp)
DEVICES = (
    DeviceFactor(("--tensor-parallel-size",)),
    DeviceFactor(("--pipeline-parallel-size",)),
    DeviceFactor(("--prefill-context-parallel-size",)),
    DeviceFactor(("--data-parallel-size",)),
)
ARGUMENTS = Arguments(
    share="--gpu-memory-utilization",
    share_grounds=text("device total x the difference: the KV cache is smaller by this much"),
    ranks="--tensor-parallel-size",
    no_graphs="--enforce-eager",
    graph_sizes="--cudagraph-capture-sizes",
)
