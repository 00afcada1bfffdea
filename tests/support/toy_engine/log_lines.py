"""The log lines of the toy engine."""

from __future__ import annotations

import re

from vllm_memprof.engines.line_format import ENGINE, GRANT, LOAD, PLAN, LogLines, row

FIGURES = {
    "toy_free_bytes": "free before the weights are loaded",
    "toy_share": "share of it for weights and KV cache",
}
LOG = LogLines(
    engine="toy",
    formats=(
        row(LOAD, "Toy: weights take", "Toy: weights take {weights_bytes GiB}", engine="toy"),
        row(GRANT, "Toy: free before", "loading {toy_free_bytes GiB} , share {toy_share} of it",
            engine="toy", equation="TOY"),
        row(GRANT, "Toy: KV cache", "Toy: KV cache {kv_cache_bytes GiB} ,", engine="toy"),
        row(PLAN, "Toy: KV cache", r"GiB , {tokens} tokens", engine="toy", scope=ENGINE),
    ),
    figures=FIGURES,
    needles=(b"Toy",),
    ready="Toy is ready",
    speaks=re.compile(r"\btoy engine\b"),
    broken=("Toy failed",),
    phase_of={"load_weights": "weight_load"},
)  # fmt: skip
