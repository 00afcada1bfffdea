"""The page and the picture of ``scripts/accuracy.py``."""
from __future__ import annotations
from vllm_memprof.units import GIB
def line(run, result):
    out=[f"{run.id}: {result['status']} {result['seconds']} s"]
    if result.get('reason'): out.append(result['reason'])
    for name, fig in run.published.items():
        got=(result.get('figures') or {}).get(name)
        if got is not None:
            err=(got-fig.value)/fig.value*100 if fig.value else float('nan')
            d = GIB if name in('weights','peak_activation','non_torch','kv_cache','graphs') else 1
            out.append(f"{name} {got/d:.4f}/{fig.value/d:.4f} {err:+.2f}%")
    return "  ".join(out)
def write(runs, kept, check=False): return 0
