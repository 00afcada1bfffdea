"""Names of what reports speak of, from ``titles.toml``."""

from __future__ import annotations

from typing import Any

from vllm_memprof.files import read_own
from vllm_memprof.text import Text, titled

#: What it is of -> name in a report's data -> title.
TITLES: dict[str, dict[str, Text]] = {
    area: {name: titled(words) for name, words in rows.items()}
    for area, rows in read_own(__file__, "titles.toml").items()
}


def how_title(row: Any) -> Any:
    """Return how a row's figure is known, in words; of a report of others, the word as it is."""
    return TITLES["how"].get(row.how, row.how)
