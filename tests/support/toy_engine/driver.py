"""The toy engine without a server: ``python -m tests.support.toy_engine.driver offline ...``."""

from __future__ import annotations

import argparse
import sys

from tests.support.toy_engine.engine import Toy
from vllm_memprof.engines.driver import Options, run_driver
from vllm_memprof.engines.prompts import load_requests, run_all, tokens_said


def offline(options: Options, engine_args: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--toy-share", type=float, default=0.5)
    toy = Toy(parser.parse_args(engine_args).toy_share)
    run_all(
        lambda batch: [tokens_said(*toy.answer(each.row()["prompt"])) for each in batch],
        load_requests(options),
        options,
    )
    return 0


if __name__ == "__main__":
    sys.exit(run_driver({"offline": offline}))
