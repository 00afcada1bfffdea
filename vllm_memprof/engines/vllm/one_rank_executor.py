"""Executors of a plan: one rank, or some ranks, each alone and answering for those like it.

The engine core asks its executor twice before it plans the KV cache: what layers each worker has,
and what memory it found. Both answers are lists with one entry per rank; a rank that does not run
is answered for by the one that stands for it. Imports vLLM: for runs that end at the KV plan alone.
"""

from __future__ import annotations

import copy
import multiprocessing
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from vllm.v1.executor.abstract import UniProcExecutor

from vllm_memprof.engines.vllm.absent_peers import join_alone
from vllm_memprof.engines.vllm.forks import Fork
from vllm_memprof.engines.vllm.peer_contexts import hold_contexts, is_in_use, let_go
from vllm_memprof.engines.vllm.rank_choice import RankFailure, StandsFor
from vllm_memprof.engines.vllm.shortcuts import all_replaced, of_a_compilation, replaced

#: Of the executor; in 0.11 elsewhere.
uniproc_executor: Any = sys.modules[UniProcExecutor._init_executor.__module__]


class PlanExecutor(UniProcExecutor):  # type: ignore[misc]
    """One worker, in this process, for a plan."""

    def determine_available_memory(self) -> list[int]:
        with all_replaced(of_a_compilation()):
            return list(super().determine_available_memory())


def make_executor(
    stands_for: StandsFor, devices: int | None, on_crowd: Callable[[int], None]
) -> type:
    """An executor class for the ranks of a replica that are run.

    Args:
        stands_for: which ranks, and for whom they answer.
        devices: devices of the machine; a rank beyond them runs on the one that it has on its own
            machine.
        on_crowd: called with a device of another rank on which all workers leave a context before
            they choose theirs.
    """
    answers_from = {rank: run for run, ranks in stands_for.items() for rank in ranks}
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
            # With data parallelism a worker compares its ranks with the devices; those that do not
            # run may have theirs elsewhere. (vllm-ascend 0.13.0 to 0.23.0, NPUWorker._init_device)
            count = max(torch.npu.device_count(), len(answers_from))
            with replaced(torch.npu, "device_count", lambda: count):
                return super().init_device()

        def shutdown(self) -> None:
            super().shutdown()
            let_go(self.peer_contexts)

    class LoneRankExecutor(PlanExecutor):
        """One worker, in this process, as rank K of a world of N."""

        rank = next(iter(stands_for))
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
            return super().determine_available_memory() * len(answers_from)

        def get_kv_cache_specs(self) -> list[Any]:
            return list(self.collective_rpc("get_kv_cache_spec")) * len(answers_from)

    class SomeRanksExecutor(LoneRankExecutor):
        """Several workers, one after the other, each in a process of its own."""

        def _init_executor(self) -> None:
            self.driver_worker: Any = None
            self.layers, self.memory = {}, {}
            for rank in stands_for:
                fork = Fork(partial(self._plan, rank), multiprocessing.current_process().name)
                answers = fork.answer() or "it ended without an answer"
                if isinstance(answers, str):
                    raise RankFailure(f"rank {rank} could not be planned: {answers}")
                self.layers[rank], self.memory[rank] = answers

        def _plan(self, rank: int) -> tuple[Any, int] | str:
            """Return both answers of a rank, or its error, from a process of its own."""
            LoneRankExecutor.rank = rank
            try:
                LoneRankExecutor._init_executor(self)
                layers = LoneRankExecutor.get_kv_cache_specs(self)[0]
                memory = LoneRankExecutor.determine_available_memory(self)[0]
                self.driver_worker.shutdown()
            except BaseException as error:
                traceback.print_exc()
                return f"{type(error).__name__}: {error}"
            return layers, memory

        def determine_available_memory(self) -> list[int]:
            return [self.memory[answers_from[rank]] for rank in sorted(answers_from)]

        def get_kv_cache_specs(self) -> list[Any]:
            return [self.layers[answers_from[rank]] for rank in sorted(answers_from)]

    return LoneRankExecutor if len(stands_for) == 1 else SomeRanksExecutor
