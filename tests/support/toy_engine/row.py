"""The row of the toy engine in ``ENGINES``."""

from __future__ import annotations

from vllm_memprof.engines.base import Arguments, EngineRow
from vllm_memprof.options import DeviceFactor, Option
from vllm_memprof.text import text

_FOLDER = "tests.support.toy_engine"
ROW = EngineRow(
    name="toy",
    title="Toy",
    package=_FOLDER,
    server=("-m", f"{_FOLDER}.driver", "serve", "--model"),
    driver=f"{_FOLDER}.driver",
    modes=("offline",),
    plugins="TOY_PLUGINS",
    group="toy_engine.plugins",
    known_as=(("toy_engine", "toy"),),
    ready_line=b"Toy is ready",
    fatal_lines=(b"Toy failed",),
    lost_lines=(),
    hooks=f"{_FOLDER}.hooks",
    equations=f"{_FOLDER}.equations",
    log_lines=f"{_FOLDER}.log_lines",
    logger="toy.memprof",
    roles={(f"{_FOLDER}.engine", None): "worker"},
    arguments=Arguments(
        share="--toy-share",
        share_grounds=text("free before loading x the difference"),
        ranks="--toy-ranks",
        no_graphs="--toy-eager",
        graph_sizes="--toy-graphs",
        share_of_total=False,
    ),
    devices=(DeviceFactor(("--toy-ranks",)),),
    set_up=(Option("model"), Option("toy-share", float)),
    phases=("device_init", "weight_load", "kv_cache_alloc", "request"),
    profiles=False,
    without=("--sleep-cycles",),
)
