"""The container of llama.cpp's GGUF files: metadata, and tensors in rows of blocks.

    GGUF | version | number of tensors | number of metadata entries
    metadata: key, type, value          tensors: name, dimensions, type, offset          the tensors' bytes

`gguf.GGUFReader` reads the same; it took 30 s for the 262,144 tokens of a Gemma 3, this takes one.
"""

import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite, prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from ...errors import ConfigError

SUFFIX = ".gguf"
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_ENTRY, _TENSOR, _TEXT = 13, 32, 8  # bytes, at least, of an entry, of what describes a tensor, of a text
_DIMENSIONS = 4  # at most
_WHOLE = "a whole GGUF file of version 2 or 3 that does not contradict itself"
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_NUMBER, _COUNT, _ALL = "split.no", "split.count", "split.tensors.count"
_PIECE = 1 << 24  # numbers made at once: the float32 copy of a whole embedding would be the peak of memory


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor: its shape as in torch, the format of its blocks, and where its bytes are in which file."""

    path: Path
    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    num_bytes: int


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF file whose tensors are read when they are asked for. path: of the first part of a split one."""

    path: Path
    metadata: dict[str, Any]
    tensors: tuple[GGUFTensor, ...]

    @property
    def architecture(self) -> str:
        """As llama.cpp calls it, for example "llama"; the prefix of the metadata that describes the layers."""
        return str(self.metadata.get("general.architecture"))

    @property
    def dtype(self) -> torch.dtype:
        """What matrices are made in: the file's own dtype, or bfloat16 where they are quantised."""
        kinds = {tensor.kind.name for tensor in self.tensors if len(tensor.shape) > 1}
        return _DTYPES[kinds.pop()] if len(kinds) == 1 and kinds <= _DTYPES.keys() else torch.bfloat16

    @property
    def formats(self) -> list[str]:
        """The formats of quantised tensors, for example Q4_K."""
        return sorted({tensor.kind.name for tensor in self.tensors} - _DTYPES.keys())

    def bytes_of(self, tensor: GGUFTensor) -> NDArray[np.uint8]:
        """The bytes of a tensor of the file, which are read when they are used: [rows, bytes of a row]."""
        data = np.memmap(tensor.path, np.uint8, "c", tensor.start, (tensor.num_bytes,))  # torch takes none to read
        return data.reshape(prod(tensor.shape[:-1]), -1)

    def values(self, tensor: GGUFTensor) -> Iterator[Tensor]:
        """The numbers of a tensor, float32 [rows, last dimension], some rows at a time."""
        count, step = prod(tensor.shape[:-1]), max(1, _PIECE // tensor.shape[-1])
        for some in (slice(first, first + step) for first in range(0, count, step)):
            yield torch.from_numpy(np.array(dequantize(self.bytes_of(tensor)[some], tensor.kind), np.float32))

    def whole(self, tensor: GGUFTensor) -> Tensor:
        """A tensor in its dtype, or in bfloat16 where it is quantised."""
        dtype = _DTYPES.get(tensor.kind.name, torch.bfloat16)
        return torch.cat([rows.to(dtype) for rows in self.values(tensor)]).view(tensor.shape)


def read_gguf(path: Path) -> GGUFFile:
    """The metadata of a file, and where its tensors are. Of a split file, any part names them all.

    Raises `ConfigError` for what is no whole GGUF file, and for one that contradicts itself.
    """
    file = _read_one(path)
    count = file.metadata.get(_COUNT, 0)  # 0 in a file that llama.cpp has joined
    if type(count) is not int or count < 0:
        raise _unfit(path, f"{_COUNT} {count!r}")
    return file if count < 2 else _joined(path, count)


def _joined(path: Path, count: int) -> GGUFFile:
    """All parts of the split file to which this one belongs, with the metadata of the first."""
    named = _PART.fullmatch(path.name)
    if named is None or int(named[3]) != count:
        raise _unfit(path, f"one of {count} parts, of this name", f"NAME-00001-of-{count:05}.gguf, as it was written")
    paths = [path.with_name(f"{named[1]}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    if absent := [part.name for part in paths if not part.exists()]:
        more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
        raise ConfigError(
            f"{str(path)!r} is one of {count} parts, and others are missing", got="no " + ", ".join(absent[:3]) + more,
            expected="all parts in one folder", fix="fetch the missing parts",
        )  # fmt: skip
    parts = [_read_one(part) for part in paths]
    tensors: dict[str, GGUFTensor] = {}
    for number, part in enumerate(parts):
        said = [part.metadata.get(key) for key in (_NUMBER, _COUNT, _ALL)]
        if said != [number, count, parts[0].metadata.get(_ALL)]:
            got = zip((_NUMBER, _COUNT, _ALL), said, strict=True)
            raise _unfit(part.path, ", ".join(f"{key} {value}" for key, value in got))
        for tensor in part.tensors:
            if tensor.name in tensors:
                raise _unfit(part.path, f"the tensor {tensor.name!r}, as in {tensors[tensor.name].path.name}")
            tensors[tensor.name] = tensor
    if parts[0].metadata.get(_ALL) not in (None, len(tensors)):
        raise _unfit(path, f"{len(tensors):,} tensors in all parts, and {_ALL} {parts[0].metadata[_ALL]:,}")
    return GGUFFile(paths[0], parts[0].metadata, tuple(tensors.values()))


def _unfit(path: Path, got: str, expected: str = "parts of one split file, with their own numbers") -> ConfigError:
    return ConfigError(
        f"{str(path)!r} does not fit the other parts of its file", got=got, expected=expected,
        fix="fetch all parts again, into a folder of their own",
    )  # fmt: skip


def _read_one(path: Path) -> GGUFFile:
    message, again = f"{str(path)!r} cannot be read", "fetch it again"
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content[:4] != b"GGUF":
                got = f"a file that begins with {content[:4]!r}"
                raise ConfigError(message, got=got, expected="a GGUF file", fix="name a GGUF file or a model folder")
            _check_version(path, content[4:8])
            reader = _Reader(path, content)
            metadata = reader.metadata()
            tensors = reader.tensors(metadata)
            missing = reader.end - len(content)
    except ConfigError:
        raise
    except (struct.error, ValueError) as error:
        raise ConfigError(message, got=error, expected=_WHOLE, fix=again) from error
    except OSError as error:
        raise ConfigError(message, got=error.strerror, expected="a GGUF file") from error
    if missing > 0:
        raise ConfigError(f"{str(path)!r} is cut off", got=f"{missing:,} bytes too few", fix=again)
    return GGUFFile(path, metadata, tensors)


def _check_version(path: Path, number: bytes) -> None:
    """Raise `ConfigError` for versions whose bytes mean something else."""
    little, big = (int.from_bytes(number, order) for order in ("little", "big"))
    if len(number) < 4 or little in (2, 3):
        return
    if big in (1, 2, 3):
        got, fix = f"version {big} in big-endian order", "gguf-convert-endian FILE.gguf little, of the package gguf"
    elif little == 1:
        got, fix = "version 1", "convert the original model again: llama.cpp reads version 1 no more, either"
    else:
        got, fix = f"version {little}", "fetch it again"
    raise ConfigError(f"{str(path)!r} cannot be read", got=got, expected="version 2 or 3, little-endian", fix=fix)


class _Reader:
    """Reads on from a place in the file. What cannot be read, or contradicts itself, raises errors of several kinds.

    end: behind the last tensor.
    """

    def __init__(self, path: Path, content: mmap.mmap):
        self._path, self._content, self._at, self.end = path, content, 4, 0

    def metadata(self) -> dict[str, Any]:
        _, self._num_tensors, entries = self._take("IQQ")
        self._check_room(entries, _ENTRY, "entries")
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self._text()
            if key in metadata:
                raise ValueError(f"the entry {key!r} twice")
            metadata[key] = value = self._value(*self._take("I"))
            numbers = value if isinstance(value, list) else [value]
            if not all(isfinite(number) for number in numbers if isinstance(number, float)):
                raise ValueError(f"a number in {key!r} that is not finite")
        return metadata

    def tensors(self, metadata: dict[str, Any]) -> tuple[GGUFTensor, ...]:
        self._check_room(self._num_tensors, _TENSOR, "tensors")
        listed: dict[str, tuple[tuple[int, ...], GGMLQuantizationType, int]] = {}
        for _ in range(self._num_tensors):
            name, (dimensions,) = self._text(), self._take("I")
            if name in listed:
                raise ValueError(f"two tensors of the name {name!r}")
            if not 1 <= dimensions <= _DIMENSIONS:
                raise ValueError(f"{name!r} of {dimensions:,} dimensions")
            shape = self._take(f"{dimensions}Q")[::-1]  # the file lists the fastest axis first
            kind, offset = self._take("IQ")
            listed[name] = shape, GGMLQuantizationType(kind), offset
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment {alignment!r}, which is no power of two")
        begin = _aligned(self._at, alignment)
        self.end = begin if listed else self._at
        tensors: list[GGUFTensor] = []
        for name, (shape, kind, offset) in listed.items():
            per_block, bytes_of = GGML_QUANT_SIZES[kind]
            if 0 in shape or shape[-1] % per_block:
                raise ValueError(f"{name!r} of shape {list(shape)} in blocks of {per_block}")
            start = _aligned(self.end, alignment)
            if offset != start - begin:  # into a neighbour, with a gap, or outside
                raise ValueError(f"{name!r} at offset {offset:,}, where the tensors before it end at {start - begin:,}")
            tensors.append(GGUFTensor(self._path, name, shape, kind, start, prod(shape) // per_block * bytes_of))
            self.end = start + tensors[-1].num_bytes
        if (more := len(self._content) - _aligned(self.end, alignment)) > 0:
            raise ValueError(f"{more:,} bytes behind the last tensor")
        return tuple(tensors)

    def _check_room(self, count: int, size: int, kind: str) -> None:
        """Refuse a count that the rest of the file cannot hold, before it takes memory."""
        if count * size > (left := len(self._content) - self._at):
            raise ValueError(f"{count:,} {kind} in {left:,} bytes")

    def _take(self, form: str) -> tuple[Any, ...]:
        taken = struct.unpack_from("<" + form, self._content, self._at)
        self._at += struct.calcsize("<" + form)
        return taken

    def _text(self) -> str:
        return self._texts(1)[0]

    def _texts(self, count: int) -> list[str]:
        content, at, texts = self._content, self._at, list[str]()
        for _ in range(count):
            start = at + _TEXT
            at = start + int.from_bytes(content[at:start], "little")
            if at > len(content):
                raise ValueError(f"{at - start:,} bytes of text in {max(0, len(content) - start):,} bytes")
            texts.append(content[start:at].decode("utf-8"))
        self._at = at
        return texts

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            return self._numbers(kind, 1)[0]
        inner, count = self._take("IQ")
        if inner != _STRING:
            return self._numbers(inner, count)
        self._check_room(count, _TEXT, "texts")
        return self._texts(count)

    def _numbers(self, kind: int, count: int) -> list[Any]:
        if kind not in _NUMBERS:
            raise ValueError("an array of arrays" if kind == _ARRAY else f"a value of type {kind}")
        self._check_room(count, struct.calcsize("<" + _NUMBERS[kind]), "numbers")
        numbers = list(self._take(f"{count}{_NUMBERS[kind]}"))
        if kind != _BOOL:
            return numbers
        if max(numbers, default=0) > 1:
            raise ValueError(f"a truth value of {max(numbers)}")
        return [number == 1 for number in numbers]


def _aligned(place: int, alignment: int) -> int:
    return -(-place // alignment) * alignment
