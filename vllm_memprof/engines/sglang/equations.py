"""The equations of SGLang: data. One arithmetic, four places."""

from __future__ import annotations

from dataclasses import replace

from vllm_memprof.engines.equation import HALF_A_PAGE, Equation, Term
from vllm_memprof.text import text

#: Half a page of the KV pool: what rounding down to whole pages takes on average.
PASSING_FIGURES = ("half_page_bytes",)
#: No profile run: the share is of what was free before the model, and what is not in it is for
#: everything else. Free memory is the least of all ranks; the KV cache goes down to whole pages.
_S1 = Equation(
    id="S1",
    engine="sglang",
    versions=">=0.5.16,<0.5.24",
    read_in="0.5.16, 0.5.18, 0.5.23",
    cite="sglang/srt/mem_cache/kv_cache_configurator.py"
    "::KVCacheConfigurator._profile_available_bytes; pool_configurator.py"
    "::DefaultPoolConfigurator.calculate_pool_sizes",
    base="least_free_before_load_bytes",
    base_title=text("free before the weights are loaded, least of all ranks"),
    share="mem_fraction_static",
    asked="free_before_load x mem_fraction_static",
    terms=(
        Term(
            "loaded",
            plus=("least_free_before_load_bytes",),
            minus=("least_free_after_load_bytes",),
        ),
        Term("mm_reserved", "mm_reserved_bytes", optional=True),
        Term(HALF_A_PAGE, "half_page_bytes"),
    ),
    override=None,
    pages="page_bytes",
    limited_by="limited_tokens",
    limit_option="max_total_tokens",
    not_subtracted=("request_pools", "runner_buffers", "graph", "graph_prefill", "first_steps"),
    checks_free=False,
)
EQUATIONS: tuple[Equation, ...] = (
    replace(
        _S1,
        versions=">=0.5.6,<0.5.10",
        read_in="0.5.6",
        cite="sglang/srt/model_executor/model_runner.py::ModelRunner.profile_max_num_token",
    ),
    replace(
        _S1,
        versions=">=0.5.10,<0.5.12",
        read_in="0.5.10.post1",
        cite="sglang/srt/model_executor/model_runner_kv_cache_mixin.py::profile_max_num_token",
    ),
    replace(
        _S1,
        versions=">=0.5.12,<0.5.16",
        read_in="0.5.12.post1, 0.5.14",
        cite="sglang/srt/model_executor/model_runner_kv_cache_mixin.py::_profile_available_bytes;"
        " pool_configurator.py",
    ),
    _S1,
)
