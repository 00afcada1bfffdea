"""Entry points of engines: each calls its own in every process of it, maybe repeatedly.

vLLM's is ``register``, that of any other engine ``register_<name>``; ``ENGINES`` has the group of
each. Without MEMPROF_RUN_DIR they do nothing. With it, hooks are bound to what is loaded and to
what will be; no module of the engine is imported for that, no device is touched, and nothing is
raised: that would end the engine.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_memprof.capture.attributes import reach
from vllm_memprof.engines import ENGINES
from vllm_memprof.record.schema import ENV_RUN_DIR

if TYPE_CHECKING:
    from vllm_memprof.capture.recorder import Recorder

#: The recorder of this process; forked children inherit and reset it.
RECORDER: Recorder | None = None


def register() -> None:
    """Start recording this process of vLLM if the launcher asked for it."""
    main = reach(sys.modules.get("__main__"), "__spec__.name")
    if main != "vllm.model_executor.models.registry":  # in which vLLM inspects a model class
        _start("vllm")


def register_in_fork() -> None:
    """Start recording a fork of a process in which vLLM has loaded its plug-ins already."""
    _start("vllm")
    if RECORDER is not None:
        RECORDER.roles.add("api")


def emit(kind: str, **fields: object) -> None:
    """Write an event of this process, where it is recorded."""
    if RECORDER is not None:
        RECORDER.emit(kind, **fields)


def _start(engine: str) -> None:
    global RECORDER
    run_dir = os.environ.get(ENV_RUN_DIR)
    if not run_dir or RECORDER is not None:
        return
    try:
        from vllm_memprof.capture import ray_nodes
        from vllm_memprof.capture.observer import start

        place = ray_nodes.find_place(Path(run_dir))
        RECORDER = start(place.folder, engine)
        ray_nodes.send_back(RECORDER, place)
    except Exception as error:
        print(
            f"memprof: not recording process {os.getpid()}: {type(error).__name__}: {error}",
            file=sys.stderr,
        )


#: ``register_<engine>``: the entry point of each engine.
globals().update({f"register_{name.replace('-', '_')}": partial(_start, name) for name in ENGINES})
