"""Files of a host that is not this one: what the kernel says of its memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write_host(root: Path, files: Mapping[str, str]) -> Path:
    """Write the files of a host below ``root``: path -> text."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text.strip()}\n")
    return root
