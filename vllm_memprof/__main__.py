"""``python -m vllm_memprof`` is the ``memprof`` command."""

import sys

from vllm_memprof.cli import main

if __name__ == "__main__":
    sys.exit(main())
