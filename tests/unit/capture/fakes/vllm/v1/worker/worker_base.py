from __future__ import annotations

from typing import Any


class WorkerBase:
    def shutdown(self) -> None:
        return


class WorkerWrapperBase:
    def init_worker(self, all_kwargs: Any) -> None:
        from vllm_ascend.worker.worker import NPUWorker

        self.worker = NPUWorker()

    def init_device(self) -> None:
        self.worker.init_device()
