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


def title_in(area: str, name: Any) -> Any:
    """Return the title of a name; of what another release or a stranger wrote, the name itself."""
    return TITLES[area].get(name, name)


def how_title(row: Any) -> Any:
    """Return how a row's figure is known, in words."""
    return title_in("how", row.how)
