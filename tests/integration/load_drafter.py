"""Run in an engine's environment: load a model and its drafter, and stop before profiling.

Argument: the folder of a model without weights. Prints ``RESULT {}``.
"""

from __future__ import annotations

import sys


class Loaded(Exception):
    """Both are loaded."""


def main(model: str) -> None:
    from vllm import LLM
    from vllm_ascend.worker.worker import NPUWorker

    def stop(worker: NPUWorker) -> int:
        raise Loaded

    NPUWorker.determine_available_memory = stop
    try:
        LLM(
            model,
            load_format="dummy",
            enforce_eager=True,
            max_model_len=512,
            max_num_batched_tokens=512,
            speculative_config={"method": "mtp", "num_speculative_tokens": 1},
        )
    except Loaded:
        print("RESULT {}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
