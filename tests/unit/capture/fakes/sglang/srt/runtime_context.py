"""The set-up that a process has published, in miniature."""

from types import SimpleNamespace
from typing import Any

PARALLEL = SimpleNamespace(tp_rank=1, tp_size=2, pp_rank=0, pp_size=1, moe_ep_size=1, dp_rank=None)
SCHEDULE = SimpleNamespace(mem_fraction_static=0.5, max_total_tokens=None, page_size=4)


def get_parallel() -> Any:
    return PARALLEL


def get_device() -> Any:
    return SimpleNamespace(gpu_id=0)


def get_schedule() -> Any:
    return SCHEDULE
