"""What KV connectors hold: the sizes in their settings, and their own tensors by attribute.

Runs in engine cores (settings, at the KV plan) and in workers. No tensor is kept: a reading walks
the attributes of a connector, adds up the storages that it finds, and lets go of them. Storages of
the KV cache, which connectors only register, are left out.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm_memprof.capture.attributes import NAMES, Fields
from vllm_memprof.capture.recorder import Recorder

#: Key of a connector's own settings.
EXTRA = "kv_connector_extra_config"
#: Objects that a reading looks at, at most.
_MOST_OBJECTS = 4000
#: A setting that is a size, a number or a switch: nothing else is recorded, keys least of all.
_SIZE = re.compile(r"\d+(?:\.\d+)?\s*(?:[kmgt]i?b?)?|\d+:\d+|true|false", re.IGNORECASE)
#: Such a setting in a file of JSON or YAML.
_LINE = re.compile(
    rf"""([A-Za-z_]\w*)["']?\s*:\s*["']?({_SIZE.pattern})["']?\s*(?:[,}}#\n]|$)""", re.I
)


def described(given: Mapping[str, Any]) -> list[Fields]:
    """Return the connectors of ``--kv-transfer-config``, those of a MultiConnector one by one.

    Args:
        given: the fields of a KVTransferConfig, or of an entry of ``connectors``.

    Returns:
        Rows with ``name``, ``role`` and ``arguments``: the sizes, numbers and switches of
        ``kv_connector_extra_config``, of variables and of files, by their names.
    """
    extra = given.get(EXTRA) or {}
    if inner := extra.get("connectors"):
        return [row for each in inner for row in described(each)]
    found = {name: os.environ.get(name) for name in NAMES["connector_variables"]}
    for variable in NAMES["connector_files"]:
        with suppress(OSError, LookupError, ValueError):
            found |= dict(_LINE.findall(Path(os.environ[variable]).read_text()))
    found |= dict(_flat(extra))
    words = {"kv_buffer_device": given.get("kv_buffer_device"), "backend": extra.get("backend")}
    sizes = {name: value for name, value in found.items() if _SIZE.fullmatch(str(value))}
    return [
        {
            "name": given.get("kv_connector"),
            "role": given.get("kv_role"),
            "arguments": words | sizes,
        }
    ]


def _flat(given: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in given.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}_")
        else:
            yield f"{before}{name}", value


def held_now(recorder: Recorder) -> Fields:
    """Return what the tensors of the connector hold, bytes on the device and on the host."""
    connector = recorder.connector()
    if connector is None:
        return {}
    rows = tensors_of(connector, recorder.kv_storages)
    return {
        f"connector_{place}_bytes": sum(row["bytes"] for row in rows if row["place"] == place)
        for place in ("device", "host")
    }


def tensors_of(connector: object, known: set[int]) -> list[Fields]:
    """Return the storages that the attributes of a connector lead to, by attribute.

    Args:
        connector: of a worker.
        known: addresses of storages that are another's.

    Returns:
        Rows with ``attribute`` (a path, without the keys of dicts and places in lists), ``place``
        (device | host), ``bytes``, ``count`` of storages, and ``pinned_bytes``: what torch's
        allocator of pinned memory takes for those that are pinned, each rounded up to a power of
        two. (torch 2.10 ``aten/src/ATen/core/CachingHostAllocator.h::allocate``)
    """
    found: dict[tuple[str, str], Fields] = {}
    seen = set(known)
    for path, at, tensor in storages_of(connector):
        if at in seen:
            continue
        seen.add(at)
        place = "host" if tensor.device.type == "cpu" else "device"
        size = tensor.untyped_storage().nbytes()
        row = found.setdefault((path, place), {"bytes": 0, "count": 0, "pinned_bytes": 0})
        row["bytes"] += size
        row["count"] += 1
        with suppress(Exception):  # asks the runtime
            if place == "host" and tensor.is_pinned():
                row["pinned_bytes"] += 1 << max(size - 1, 0).bit_length()
    return [{"attribute": path, "place": place, **row} for (path, place), row in found.items()]


def storages_of(begin: Any) -> Iterator[tuple[str, int, Any]]:
    """Yield the tensors below an object with the addresses of their storages.

    Objects of the connectors' packages are entered, and containers; configurations, which lead to
    the model, are not.
    """
    todo, met = deque([("", begin)]), set[int]()
    while todo and len(met) < _MOST_OBJECTS:
        path, each = todo.popleft()
        if id(each) in met:
            continue
        met.add(id(each))
        if hasattr(type(each), "untyped_storage"):
            yield path, each.untyped_storage().data_ptr(), each
        elif isinstance(each, Mapping):
            todo += [(path, value) for value in list(each.values())]
        elif isinstance(each, (list, tuple, set, deque)):
            todo += [(path, value) for value in list(each)]
        elif type(each).__module__.partition(".")[0] in NAMES["connector_packages"]:
            todo += [
                (f"{path}.{name}".lstrip("."), value)
                for name, value in list(getattr(each, "__dict__", {}).items())
                if not name.endswith(tuple(NAMES["connector_others"]))
                and not hasattr(type(value), "named_parameters")
            ]
