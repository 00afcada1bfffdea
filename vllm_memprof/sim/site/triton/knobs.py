"""Settings that vLLM's monitor of kernel compilations writes. Nothing is compiled here, so nothing
reads them."""

from types import SimpleNamespace

autotuning = SimpleNamespace(print=False, cache=False)
runtime = SimpleNamespace(jit_post_compile_hook=None, jit_cache_hook=None)
compilation = SimpleNamespace(use_ir_loc=None, always_compile=False)
