"""Images of one colour, written without a library."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path


def write_png(
    path: Path, width: int, height: int, colour: tuple[int, int, int] = (9, 9, 9)
) -> None:
    """Write a PNG of one colour; 8 bits a channel, RGB."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    row = b"\x00" + bytes(colour) * width
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(row * height, 1))
        + chunk(b"IEND", b"")
    )
