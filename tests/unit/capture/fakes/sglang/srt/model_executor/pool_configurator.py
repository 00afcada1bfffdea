"""Bytes into tokens, in miniature."""

from types import SimpleNamespace
from typing import Any


class DefaultPoolConfigurator:
    _cell_size = 2

    def calculate_pool_sizes(self, available_bytes: int, page_size: int) -> Any:
        tokens = available_bytes // self._cell_size // page_size * page_size
        return SimpleNamespace(max_total_num_tokens=tokens)


class HybridSWAPoolConfigurator:
    """A token takes more in some pools than in others: the sizes of all are solved for."""

    _cell_size = 2.5

    def calculate_pool_sizes(self, available_bytes: int, page_size: int) -> Any:
        tokens = available_bytes // 3 // page_size * page_size
        return SimpleNamespace(max_total_num_tokens=tokens)
