"""A third engine, in one folder: what one costs, and a proof that the rest asks its row.

It loads "weights", sizes a KV cache and answers requests on a device of a few integers; the
standard library is all that it needs. The line below registers it.
"""

from pathlib import Path

from vllm_memprof.engines import ENGINES
from vllm_memprof.engines.base import read_row

ENGINES["toy"] = read_row(Path(__file__).parent)
