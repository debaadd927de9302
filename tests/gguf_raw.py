"""A GGUF file in its parts, which may be changed to contradict one another: gguf's own writer would refuse."""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGUFReader

INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 5, 6, 7, 8, 9, 10
_FORMS = {4: "I", INT32: "i", FLOAT32: "f", BOOL: "B", UINT64: "Q"}


@dataclass
class Tensor:
    """As a file describes it; shape: the fastest axis first."""

    name: str
    shape: list[int]
    kind: int
    offset: int


@dataclass
class RawGGUF:
    """entries: key, type and the bytes of the value. counts: of tensors and entries, by how much they are wrong."""

    entries: list[tuple[str, int, bytes]]
    tensors: list[Tensor]
    data: bytes
    counts: tuple[int, int] = (0, 0)

    @classmethod
    def read(cls, path: Path) -> "RawGGUF":
        reader = GGUFReader(path)
        fields = [field for name, field in reader.fields.items() if not name.startswith("GGUF.")]
        entries = [
            (field.name, int(field.parts[2][0]), b"".join(part.tobytes() for part in field.parts[3:]))
            for field in fields
        ]
        tensors = [
            Tensor(one.name, one.shape.tolist(), int(one.tensor_type), int(one.data_offset - reader.data_offset))
            for one in reader.tensors
        ]
        return cls(entries, tensors, path.read_bytes()[reader.data_offset :])

    def write(self, path: Path) -> Path:
        made = struct.pack(
            "<IIQQ", 0x46554747, 3, len(self.tensors) + self.counts[0], len(self.entries) + self.counts[1]
        )
        for key, kind, value in self.entries:
            made += text(key) + struct.pack("<I", kind) + value
        for one in self.tensors:
            shape = struct.pack(f"<I{len(one.shape)}Q", len(one.shape), *one.shape)
            made += text(one.name) + shape + struct.pack("<IQ", one.kind, one.offset)
        path.write_bytes(made + bytes(-len(made) % 32) + self.data)
        return path

    def place(self, key: str) -> int:
        return [name for name, *_ in self.entries].index(key)

    def put(self, key: str, kind: int, value: Any) -> None:
        """Add an entry, or replace it."""
        entry = key, kind, text(value) if kind == STRING else struct.pack("<" + _FORMS[kind], value)
        if key in (name for name, *_ in self.entries):
            self.entries[self.place(key)] = entry
        else:
            self.entries.append(entry)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()
