"""Executors of a plan: one rank, or some ranks, each alone and answering for those like it.

The engine core asks its executor twice before it plans the KV cache: what layers each worker has,
and what memory it found. Both answers are lists with one entry per rank; a rank that does not run
is answered for by the one that stands for it. Imports vLLM: for runs that end at the KV plan alone.
"""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import os
import subprocess
import traceback
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

from vllm.v1.executor import uniproc_executor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from vllm_memprof.engines.replaced import all_replaced, replaced
from vllm_memprof.engines.vllm.absent_peers import join_alone
from vllm_memprof.engines.vllm.compiled_pieces import alike_pieces_once
from vllm_memprof.engines.vllm.dynamo_caches import alike_questions_once
from vllm_memprof.engines.vllm.peer_contexts import hold_contexts, is_in_use, let_go
from vllm_memprof.engines.vllm.rank_choice import RankFailure, ReplicaRanks
from vllm_memprof.engines.vllm.skipped_compilation import needless_work

#: The calls that a plan makes, in their order.
_ASKED = ("get_kv_cache_specs", "determine_available_memory")


@contextlib.contextmanager
def _devices_for(ranks: int) -> Iterator[None]:
    """Inside, this process is told of a device for every rank of its replica.

    With data parallelism a worker compares both (vllm-ascend 0.13.0 to 0.23.0,
    ``NPUWorker._init_device``); the ranks that do not run may have theirs on other machines.
    """
    import torch

    count = torch.npu.device_count
    with replaced(torch.npu, "device_count", lambda: max(count(), ranks)):
        yield


class PlanExecutor(UniProcExecutor):  # type: ignore[misc]
    """One worker, in this process, for a plan."""

    def determine_available_memory(self) -> list[int]:
        with all_replaced(chain(alike_questions_once(), alike_pieces_once(), needless_work())):
            found: list[int] = super().determine_available_memory()
        return found


def make_executor(
    replica: ReplicaRanks, devices: int | None, on_crowd: Callable[[int], None]
) -> type:
    """An executor class for the ranks of a replica that are run.

    Args:
        replica: which ranks, and for whom they answer.
        devices: devices of the machine; a rank beyond them runs on the one that it has on its own
            machine.
        on_crowd: called with a device of another rank on which all workers leave a context before
            they choose theirs.
    """
    answers_from = {rank: run for run, ranks in replica.stands_for.items() for rank in ranks}
    on_one_machine = min(len(answers_from), devices or 1)

    class LoneWorker(uniproc_executor.WorkerWrapperBase):  # type: ignore[misc]
        """A worker whose device holds what its peers leave there."""

        peer_contexts: Sequence[subprocess.Popen[str]] = ()

        def init_device(self) -> Any:
            device = LoneRankExecutor.rank % on_one_machine
            if is_in_use(device):  # before this worker has chosen it: its peers have done the same
                self.peer_contexts = hold_contexts(device, on_one_machine - 1)
            for other in range(on_one_machine):
                if other != device and is_in_use(other):
                    on_crowd(other)
            with _devices_for(len(answers_from)):
                return super().init_device()

        def shutdown(self) -> None:
            super().shutdown()
            let_go(self.peer_contexts)

    class LoneRankExecutor(PlanExecutor):
        """One worker, in this process, as rank K of a world of N."""

        rank = next(iter(replica.stands_for))
        vllm_config: Any

        def _init_executor(self) -> None:
            join_alone()
            uniproc_executor.WorkerWrapperBase = LoneWorker
            of_engine_core = self.vllm_config
            self.vllm_config = copy.deepcopy(
                of_engine_core
            )  # among others, a worker changes its own alone
            super()._init_executor()
            self.vllm_config = of_engine_core

        def _distributed_args(self) -> tuple[str, int, int]:
            method, _, _ = super()._distributed_args()
            return method, self.rank, self.rank % devices if devices else self.rank

        def determine_available_memory(self) -> list[int]:
            [found] = super().determine_available_memory()
            return [found] * len(answers_from)

        def get_kv_cache_specs(self) -> list[Any]:
            [layers] = self.collective_rpc("get_kv_cache_spec")
            return [layers] * len(answers_from)

    class SomeRanksExecutor(LoneRankExecutor):
        """Several workers, one after the other, each in a process of its own."""

        def _init_executor(self) -> None:
            self.driver_worker: Any = None
            self.answers = {rank: self._run(rank) for rank in replica.stands_for}

        def _run(self, rank: int) -> dict[str, Any]:
            context = multiprocessing.get_context("fork")
            reader, writer = context.Pipe(duplex=False)
            child = context.Process(
                target=self._work, args=(rank, writer), name=multiprocessing.current_process().name
            )
            child.start()
            writer.close()
            try:
                error, answers = reader.recv()
            except EOFError:
                error, answers = "it ended without an answer", {}
            child.join()
            if error is not None:
                raise RankFailure(f"rank {rank} could not be planned: {error}")
            return dict(answers)

        def _work(self, rank: int, writer: Any) -> None:
            try:
                LoneRankExecutor.rank = rank
                LoneRankExecutor._init_executor(self)
                answers = {name: getattr(LoneRankExecutor, name)(self)[0] for name in _ASKED}
                writer.send((None, answers))
                self.driver_worker.shutdown()
            except BaseException as error:
                traceback.print_exc()
                writer.send((f"{type(error).__name__}: {error}", {}))
                os._exit(1)

        def determine_available_memory(self) -> list[int]:
            return self._of_all("determine_available_memory")

        def get_kv_cache_specs(self) -> list[Any]:
            return self._of_all("get_kv_cache_specs")

        def _of_all(self, name: str) -> list[Any]:
            return [self.answers[answers_from[rank]][name] for rank in sorted(answers_from)]

    return LoneRankExecutor if len(replica.stands_for) == 1 else SomeRanksExecutor
