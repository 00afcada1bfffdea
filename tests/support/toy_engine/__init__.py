"""A third engine, in one folder: what one costs, and a proof that the rest asks its row.

It loads "weights", sizes a KV cache and answers requests on a device of a few integers; the
standard library is all that it needs. The line below registers it.
"""

from tests.support.toy_engine.row import ROW
from vllm_memprof.engines import ENGINES

ENGINES[ROW.name] = ROW
