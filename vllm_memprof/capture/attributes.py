"""Attributes of the engine's objects, which differ between releases: read where they are there."""

from __future__ import annotations

from typing import Any

from vllm_memprof.files import read_own

#: Names and values of an event or a reading, as ``record.schema`` has them.
Fields = dict[str, Any]
#: What engines and torch call what is read of them, by what it is read for.
NAMES = read_own(__file__, "names.json")


def reach(subject: Any, path: str) -> Any:
    """Return what lies at a path of attributes, e.g. ``model_config.hf_config``; None: nothing.

    An empty path leads to the object itself.
    """
    for name in filter(None, path.split(".")):
        subject = getattr(subject, name, None)
    return subject
