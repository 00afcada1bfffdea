"""The engine's look at a model's class, before anything is configured.

vLLM asks a second interpreter for it, so that importing the model's module leaves no trace in the
first, and keeps the answer in its cache. That interpreter imports the engine once more: ten seconds
or more, for each architecture that is new to the cache. A plan asks a fork instead, which has the
engine imported already and leaves no trace either.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

from vllm_memprof.engines.replaced import replaced

#: The function of ``vllm.model_executor.models.registry`` that runs another in a process of its own
#: (0.11 to 0.23).
_ASKS = "_run_in_subprocess"


@contextmanager
def in_a_fork() -> Iterator[None]:
    """Inside, vLLM looks at model classes in a fork of this process.

    It must not have opened a device yet.
    """
    from vllm.model_executor.models import registry

    ask = getattr(registry, _ASKS, None)
    if ask is None:
        yield
        return
    with replaced(registry, _ASKS, _asking_a_fork(ask)):
        yield


def _asking_a_fork(ask: Callable[[Callable[[], Any]], Any]) -> Callable[[Callable[[], Any]], Any]:
    """Return what is asked instead of ``ask``.

    Where the fork has no answer it asks ``ask``: errors are the engine's.
    """
    context = multiprocessing.get_context("fork")

    def answer(function: Callable[[], Any], send: Connection) -> None:
        with suppress(Exception):
            send.send(function())

    def run(function: Callable[[], Any]) -> Any:
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=answer, args=(function, send), daemon=True)
        process.start()
        send.close()
        try:
            return receive.recv()
        except EOFError:
            return ask(function)
        finally:
            receive.close()
            process.join()

    return run
