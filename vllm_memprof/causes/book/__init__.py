"""The book: rows by origin. Of rows that match the same line the first in this order counts."""

from __future__ import annotations

from vllm_memprof.causes.book import (
    cann,
    communication,
    connectors,
    device_memory,
    engines,
    host,
    setup,
)
from vllm_memprof.causes.rows import Row

#: Origin -> its rows.
ORIGINS: dict[str, tuple[Row, ...]] = {
    "engines": engines.ROWS,
    "connectors": connectors.ROWS,
    "host": host.ROWS,
    "communication": communication.ROWS,
    "setup": setup.ROWS,
    "device memory": device_memory.ROWS,
    "cann": cann.ROWS,
}
BOOK = tuple(row for rows in ORIGINS.values() for row in rows)
