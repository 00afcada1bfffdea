"""A scheduler that serves one request at a time, in two steps, and a third without any."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class Scheduler:
    def __init__(self) -> None:
        self.waiting: list[Any] = []
        self.running: list[Any] = []
        self.finished: set[str] = set()
        pool = SimpleNamespace(num_gpu_blocks=11, get_num_free_blocks=lambda: 10 - self.used)
        self.kv_cache_manager = SimpleNamespace(block_pool=pool)

    @property
    def used(self) -> int:
        return 3 * len(self.running)

    def schedule(self) -> Any:
        new = []
        if not self.running and self.waiting:
            self.running.append(self.waiting.pop(0))
            new = [
                SimpleNamespace(
                    req_id=request.request_id,
                    prompt_token_ids=[0] * request.num_prompt_tokens,
                    mm_features=request.mm_features,
                    num_computed_tokens=0,
                )
                for request in self.running
            ]
        finished, self.finished = self.finished, set()
        scheduled = {each.request_id: each.num_prompt_tokens if new else 1 for each in self.running}
        cached = [] if new else list(scheduled)
        return SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=cached, num_computed_tokens=[20] * len(cached)
            ),
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_encoder_inputs={
                request.req_id: list(range(len(request.mm_features)))
                for request in new
                if request.mm_features
            },
            finished_req_ids=finished,
            free_encoder_mm_hashes=[],
        )

    def update(self) -> None:
        for request in list(self.running):
            request.num_output_tokens += 1
            if request.num_output_tokens == 2:
                request.status = SimpleNamespace(name="FINISHED_STOPPED")
                self._free_request(request)

    def _free_request(self, request: Any) -> None:
        self.running.remove(request)
        self.finished.add(request.request_id)


class AscendScheduler(Scheduler):
    def _free_request(self, request: Any) -> None:
        super()._free_request(request)
