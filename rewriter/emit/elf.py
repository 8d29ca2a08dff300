"""The little of the ELF format that reading a compiled GPU object needs: its sections and its notes.

Both vendors' objects (.hsaco, .cubin) are 64-bit little-endian ELF files.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_NOTE, _NO_BITS = 7, 8


@dataclass(frozen=True)
class Section:
    """One section; `data` is empty for one that takes memory but no bytes in the file (NOBITS)."""

    name: str
    kind: int
    size: int
    data: bytes


@dataclass(frozen=True)
class Note:
    owner: str
    kind: int
    data: bytes


def read_sections(content: bytes) -> tuple[Section, ...]:
    """The sections in file order. `ValueError`, `struct.error` or `IndexError` for what is not such a file."""
    if content[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    header = _HEADER.unpack_from(content)
    offset, count, names_index = header[6], header[12], header[13]
    segments_end = header[5] + header[9] * header[10]
    if max(offset + count * _SECTION.size, segments_end) > len(content):
        raise ValueError("the tables of the file are cut off")
    raw = [_SECTION.unpack_from(content, offset + i * _SECTION.size) for i in range(count)]
    names = _slice(content, raw[names_index])
    return tuple(
        Section(_text(names, entry[0]), entry[1], entry[5], b"" if entry[1] == _NO_BITS else _slice(content, entry))
        for entry in raw
    )


def read_notes(sections: tuple[Section, ...]) -> Iterator[Note]:
    """The entries of all note sections."""
    for section in sections:
        if section.kind != _NOTE:
            continue
        at = 0
        while at + 12 <= len(section.data):
            owner_size, data_size, kind = struct.unpack_from("<III", section.data, at)
            owner_at = at + 12
            data_at = owner_at + _aligned(owner_size)
            owner = section.data[owner_at : owner_at + owner_size].rstrip(b"\0").decode("ascii", "replace")
            yield Note(owner, kind, section.data[data_at : data_at + data_size])
            at = data_at + _aligned(data_size)


def symbol_names(sections: tuple[Section, ...]) -> tuple[str, ...]:
    """Names by index in the symbol table."""
    tables = {section.name: section.data for section in sections}
    symbols, names = tables.get(".symtab", b""), tables.get(".strtab", b"")
    count = len(symbols) // _SYMBOL.size
    return tuple(_text(names, _SYMBOL.unpack_from(symbols, i * _SYMBOL.size)[0]) for i in range(count))


def _slice(content: bytes, entry: tuple[int, ...]) -> bytes:
    start, size = entry[4], entry[5]
    if start + size > len(content):
        raise ValueError("a section is cut off")
    return content[start : start + size]


def _text(table: bytes, at: int) -> str:
    return table[at : table.find(b"\0", at)].decode("utf-8", "replace")


def _aligned(size: int) -> int:
    return (size + 3) // 4 * 4
