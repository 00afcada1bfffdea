"""The toy engine without a server: ``python -m tests.support.toy_engine.driver offline ...``."""

from __future__ import annotations

import argparse
import sys

from tests.support.toy_engine import engine
from vllm_memprof.engines.offline import add_arguments, run_all
from vllm_memprof.engines.vllm.prompts import load_requests


def main() -> int:
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(description=__doc__)
    modes = parser.add_subparsers(dest="mode", required=True)
    offline = modes.add_parser("offline")
    offline.add_argument("--model", required=True)
    add_arguments(offline)
    options = parser.parse_args(sys.argv[1:cut])
    own = argparse.ArgumentParser()
    own.add_argument("--toy-share", type=float, default=0.5)
    toy = engine.Toy(own.parse_args(sys.argv[cut + 1 :]).toy_share)
    requests = load_requests(options.prompts, options.prompt, options.images, skip=False)
    answered = lambda batch: [toy.answer(str(each.row()["prompt"])) for each in batch]  # noqa: E731
    run_all(answered, requests, options, skip=False)
    toy.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
