"""The parts of a 64-bit little-endian ELF file that a linker and a loader look at.

A path enters, names leave. Runs in the launcher's process, while a stack is set up. Layout: the
System V ABI; symbol versions as in the Linux Standard Base.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator
from pathlib import Path

from vllm_memprof.errors import SetupError

#: Section types: symbols of an object file, and of a library.
SYMTAB, DYNSYM = 2, 11
_SHT_DYNAMIC, _SHT_VERNEED, _SHT_VERSYM = 6, 0x6FFFFFFE, 0x6FFFFFFF
_DT_NULL, _DT_NEEDED = 0, 1
_STB_GLOBAL, _STB_WEAK, _STB_GNU_UNIQUE = 1, 2, 10
_STV_HIDDEN = 2
_MAGIC = b"\x7fELF\x02\x01"
#: Names that the interpreter itself defines, without a version.
INTERPRETER = re.compile(r"_?Py[A-Z_]")
_SYMBOL = struct.Struct("<IBBHQQ")  # name, binding and type, visibility, section, value, size


def is_elf(path: Path) -> bool:
    """Return whether `ElfFile` reads a file."""
    with path.open("rb") as stream:
        return stream.read(len(_MAGIC)) == _MAGIC


class ElfFile:
    """One library or object file.

    Raises:
        SetupError: it is something else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not is_elf(path):
            raise SetupError(f"not a 64-bit little-endian ELF file: {path}")
        with path.open("rb") as stream:
            self._data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        self.machine: int = struct.unpack_from("<H", self._data, 18)[0]
        (offset,) = struct.unpack_from("<Q", self._data, 40)
        entry_size, count, names_index = struct.unpack_from("<HHH", self._data, 58)
        # name, type, flags, address, offset, size, link, info, alignment, entry size
        self._sections = [
            struct.unpack_from("<IIQQQQIIQQ", self._data, offset + i * entry_size)
            for i in range(count)
        ]
        names = self._sections[names_index]
        self._section_names = [self._string(names[4] + section[0]) for section in self._sections]

    def symbols(self, table: int = DYNSYM) -> Iterator[tuple[str, bool, bool, bool]]:
        """Yield global symbols as (name, defined, weak, hidden)."""
        for _, name, defined, weak, hidden in self._symbols(table):
            yield name, defined, weak, hidden

    def undefined(self) -> Iterator[tuple[str, str, str]]:
        """Yield what the loader has to find: (name, soname of its library, symbol version).

        Soname and version are empty for a symbol without a version: it may come from any library.
        """
        versions = self._needed_versions()
        numbers: tuple[int, ...] = ()
        for section in self._of_type(_SHT_VERSYM):
            numbers = struct.unpack(f"<{section[5] // 2}H", self._content(section))
        for index, name, defined, weak, _ in self._symbols(DYNSYM):
            if not defined and not weak:
                number = numbers[index] & 0x7FFF if numbers else 0
                yield name, *versions.get(number, ("", ""))

    def needed(self) -> list[str]:
        """Return the sonames that the loader fetches with this file (DT_NEEDED)."""
        result = []
        for section in self._of_type(_SHT_DYNAMIC):
            strings = self._sections[section[6]][4]
            for tag, value in struct.iter_unpack("<qQ", self._content(section)):
                if tag == _DT_NULL:
                    break
                if tag == _DT_NEEDED:
                    result.append(self._string(strings + value))
        return result

    def read_only_data(self) -> bytes:
        """Return the bytes of .rodata*, where string constants live."""
        parts = [
            self._content(section)
            for name, section in zip(self._section_names, self._sections, strict=True)
            if name.startswith(".rodata")
        ]
        return b"\0" + b"\0".join(parts) + b"\0"

    def _symbols(self, table: int) -> Iterator[tuple[int, str, bool, bool, bool]]:
        for section in self._of_type(table):
            strings = self._sections[section[6]][4]
            entries = _SYMBOL.iter_unpack(self._content(section))
            for index, (name, info, other, defined_in, _, _) in enumerate(entries):
                if info >> 4 in (_STB_GLOBAL, _STB_WEAK, _STB_GNU_UNIQUE) and name:
                    weak, hidden = info >> 4 == _STB_WEAK, other & 3 == _STV_HIDDEN
                    yield index, self._string(strings + name), defined_in != 0, weak, hidden

    def _needed_versions(self) -> dict[int, tuple[str, str]]:
        """Return version number of a symbol -> (soname, version), from .gnu.version_r."""
        found = {}
        for section in self._of_type(_SHT_VERNEED):
            strings, offset = self._sections[section[6]][4], section[4]
            for _ in range(section[7]):
                _, count, file, first, following = struct.unpack_from("<HHIII", self._data, offset)
                entry = offset + first
                for _ in range(count):
                    _, _, number, name, step = struct.unpack_from("<IHHII", self._data, entry)
                    found[number] = (self._string(strings + file), self._string(strings + name))
                    entry += step
                offset += following
        return found

    def _of_type(self, wanted: int) -> Iterator[tuple[int, ...]]:
        return (section for section in self._sections if section[1] == wanted)

    def _content(self, section: tuple[int, ...]) -> bytes:
        return self._data[section[4] : section[4] + section[5]]

    def _string(self, offset: int) -> str:
        return self._data[offset : self._data.find(b"\0", offset)].decode("utf-8", "replace")
