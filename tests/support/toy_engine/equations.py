"""The equation of the toy engine."""

from __future__ import annotations

from vllm_memprof.engines.equation import Equation, Term
from vllm_memprof.text import text

EQUATIONS = (
    Equation(
        id="TOY",
        engine="toy",
        versions=">=1,<2",
        read_in="1.0",
        cite="tests/support/toy_engine/engine.py::Toy.allocate_kv_cache",
        terms=(Term("weights", "weights_bytes"),),
        base="toy_free_bytes",
        share="toy_share",
        base_title=text("free before Toy loads its weights"),
        asked="free before loading x share",
        override=None,
        checks_free=False,
    ),
)
