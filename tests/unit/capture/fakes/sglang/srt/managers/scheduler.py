"""A scheduler of sglang 0.5.23 in miniature."""

from types import SimpleNamespace
from typing import Any

from sglang.srt.distributed import bootstrap
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.model_runner import ModelRunner


def run_scheduler_process() -> "Scheduler":
    from vllm_memprof.capture.plugin import register_sglang

    register_sglang()
    return Scheduler()


class Scheduler:
    drafts = False
    makes_pools = "init_memory_pools"

    def __init__(self) -> None:
        bootstrap.init_parallel_runtime()
        self.model_runner = ModelRunner()
        getattr(self, self.makes_pools)()
        self.model_runner.init_cuda_graphs()
        self.tp_worker = TpModelWorker()
        self.running_batch = SimpleNamespace(reqs=[])

    def init_memory_pools(self) -> None:
        self.make_pools()

    def make_pools(self) -> None:
        self.model_runner.alloc_memory_pool()
        if self.drafts:
            self.model_runner.alloc_memory_pool(draft=True)

    def run_batch(self, batch: Any) -> None:
        self.tp_worker.forward_batch_generation()

    def process_batch_result(self, batch: Any, result: Any) -> None:
        for request in batch.reqs:
            request.output_ids.append(1)

    def flush_cache(self, empty_cache: bool = True) -> bool:
        return False

    def pause_generation(self, recv_req: Any) -> None:
        pass

    def run_event_loop(self, batch: Any = None) -> None:
        raise RuntimeError("NPU out of memory. Tried to allocate 2.00 GiB")
