"""Names of what reports speak of, from ``titles.toml``."""

from __future__ import annotations

from pathlib import Path

from vllm_memprof.files import read_table
from vllm_memprof.text import Text, titled

#: What it is of -> name in a report's data -> title.
TITLES: dict[str, dict[str, Text]] = {
    area: {name: titled(words) for name, words in rows.items()}
    for area, rows in read_table(Path(__file__).with_name("titles.toml")).items()
}
