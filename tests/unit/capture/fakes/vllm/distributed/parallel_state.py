"""Parallel groups of one worker."""

from __future__ import annotations

import weakref
from typing import Any


class Coordinator:
    def __init__(self, name: str, ranks: list[int], rank: int, device_group: Any = None) -> None:
        self.unique_name = name
        self.ranks = ranks
        self.rank_in_group = rank
        self.device_group = device_group


_groups: dict[str, Any] = {}
_TP = Coordinator("tp:0", [0, 1], 1)
_groups["tp:0"] = weakref.ref(_TP)


def get_tp_group() -> Coordinator:
    return _TP


def get_pp_group() -> Coordinator:
    return Coordinator("pp:0", [1], 0)


def get_ep_group() -> Coordinator:
    raise AssertionError("expert parallel group is not initialized")
