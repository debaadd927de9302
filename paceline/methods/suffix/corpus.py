"""A corpus and its suffix array in a folder, to find by binary search what followed a few tokens.

Manber and Myers 1990; He et al. 2023 (REST, arXiv 2311.08252) draft from it. `paceline index` writes the folder:

    index.json     sizes, and the hash of the tokenizer
    tokens.bin     the tokens of all documents, big-endian uint32, `SEPARATOR` after each document: in this form the
                   order of the bytes is that of the tokens
    suffixes.bin   where each of them is, in the order of what begins there, little-endian uint32

Both files are mapped into memory and never read whole: opening takes milliseconds, whatever the size of the corpus.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError, IncompatibleModels
from ...hf.fingerprint import hash_vocabulary
from ...schema import checked, validate
from ...system.files import exists, new_folder, read_json, to_json, write_text
from ...target.loaded import LoadedModel
from ...target.prompts import tokenizer_of
from .automaton import MAX_CONTEXT, NO_CONTEXT, TOP_K, Context

SEPARATOR = 2**32 - 1
"""No token: nothing is drafted beyond the end of a document."""
_MAX_OCCURRENCES = 1024
"""How many occurrences of a context are counted; of more, evenly spaced ones."""
_CHECKED = 256
"""How many suffixes are checked to be in order when an index is opened."""
_ABOUT, _TOKENS, _SUFFIXES = "index.json", "tokens.bin", "suffixes.bin"
_MAKE = "`paceline index FILES --out FOLDER --model MODEL` makes one"
Ids = NDArray[Any]


@checked
class IndexInfo:
    """The content of index.json. num_tokens: separators included."""

    num_tokens: int
    num_documents: int
    tokenizer: str
    kind: Literal["paceline corpus index"] = "paceline corpus index"
    version: Literal[1] = 1


@final
class CorpusIndex:
    """The continuations of a corpus (`automaton.Continuations`). A context's state is the places after it.

    Raises `ConfigError` for a folder that is not an index, or is damaged; its methods raise OSError once a file has
    changed.
    """

    def __init__(self, folder: str | PathLike[str]):
        self.folder, self._files = Path(folder), dict[Path, tuple[int, ...]]()  # as they were when they were opened
        about = self.folder / _ABOUT
        if not exists(about):
            raise ConfigError(f"no corpus index at {str(folder)!r}", expected=f"a folder with {_ABOUT}", fix=_MAKE)
        self.about = validate(IndexInfo, read_json(about, "the corpus index"), f"the corpus index {str(about)!r}")
        suffixes = self._mapped(_SUFFIXES, self.about.num_tokens - self.about.num_documents)
        self._tokens, self._suffixes = self._mapped(_TOKENS, self.about.num_tokens).view(">u4"), suffixes
        self._bytes = self._tokens.view(np.uint8).data
        sample = suffixes[:: max(1, len(suffixes) // _CHECKED)]
        beginnings = [self._beginning(place, 4 * MAX_CONTEXT) for place in sample]
        if int(sample.max()) >= self.about.num_tokens or beginnings != sorted(beginnings):
            raise self._damaged(f"{_SUFFIXES} that does not fit {_TOKENS}", "the places in order")

    def check_tokenizer(self, target: LoadedModel) -> None:
        """Raise `IncompatibleModels` unless the corpus was encoded with the target's tokenizer."""
        if (vocabulary := hash_vocabulary(tokenizer_of(target))) != self.about.tokenizer:
            raise IncompatibleModels(
                f"the corpus index {str(self.folder)!r} was made with another tokenizer than that of {target.name}",
                got=f"tokenizer {self.about.tokenizer[:12]}",
                expected=f"tokenizer {vocabulary[:12]}",
                fix=_MAKE,
            )

    def context(self, tokens: Sequence[int], at_least: int = 1) -> Context:
        """The longest suffix of these tokens that occurs in the corpus, of `at_least` to `MAX_CONTEXT` tokens.

        A suffix occurs only if all shorter ones do, so its length is found by binary search too.
        """
        self._check()
        whole = np.array(tokens[-MAX_CONTEXT:], ">u4").tobytes()
        low, high = at_least - 1, min(MAX_CONTEXT, len(tokens))
        middle = at_least
        while low < high:
            if len(self._places(whole[-4 * middle :], at_most=1)):
                low = middle
            else:
                high = middle - 1
            middle = (low + high + 1) // 2
        places = self._places(whole[-4 * low :], _MAX_OCCURRENCES) + low if low >= at_least else None
        if places is None or (self._tokens[places] == SEPARATOR).all():
            return NO_CONTEXT
        return Context(places, low)

    def following(self, context: Context) -> tuple[int, list[tuple[int, int]]]:
        """See `Continuations`; of more than 1024 occurrences evenly spaced ones are counted."""
        self._check()
        tokens, counts = np.unique(self._tokens[context.state], return_counts=True)
        count_of = {token: count for token, count in zip(tokens.tolist(), counts.tolist(), strict=True)}
        count_of.pop(SEPARATOR, None)
        return sum(count_of.values()), sorted(count_of.items(), key=lambda item: -item[1])[:TOP_K]

    def step(self, context: Context, token: int) -> Context:
        self._check()
        return Context(context.state[self._tokens[context.state] == token] + 1, context.length + 1)

    def _places(self, wanted: bytes, at_most: int) -> NDArray[np.int64]:
        def beginning(place: int) -> bytes:
            return self._beginning(place, len(wanted))

        suffixes: Any = self._suffixes
        low = bisect_left(suffixes, wanted, key=beginning)
        high = bisect_right(suffixes, wanted, low, min(low + 1, len(suffixes)) if at_most == 1 else None, key=beginning)
        every = -(-(high - low) // at_most) or 1
        return suffixes[low:high:every].astype(np.int64)

    def _beginning(self, place: int, length: int) -> bytes:
        return bytes(self._bytes[4 * int(place) : 4 * int(place) + length])

    def _check(self) -> None:
        """Raise OSError if a file has changed since: what is mapped then is no index, and may end the process."""
        if any(_state(path) != then for path, then in self._files.items()):
            raise OSError(f"the corpus index {str(self.folder)!r} was changed while it was in use")

    def _damaged(self, got: str, expected: str) -> ConfigError:
        fix = f"remove the folder; {_MAKE}"
        return ConfigError(f"the corpus index {str(self.folder)!r} is not whole", got=got, expected=expected, fix=fix)

    def _mapped(self, name: str, count: int) -> Ids:
        path = (self.folder / name).absolute()
        size = path.stat().st_size if exists(path) else 0
        if count < 1 or size != 4 * count:
            raise self._damaged(f"{name} of {size:,} bytes", f"{4 * count:,} bytes")
        self._files[path] = _state(path)
        return np.asarray(np.memmap(path, dtype="<u4", mode="r"))


def _state(path: Path) -> tuple[int, ...]:
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def write_index(
    folder: Path, documents: Iterable[Sequence[int] | Ids], vocabulary: str, progress: Callable[[str, int, int], None]
) -> IndexInfo:
    """Write the index of these documents, whole or not at all; about 50 bytes of memory a token.

    vocabulary: `hash_vocabulary` of their tokenizer. Raises `ConfigError` for an existing folder, and for no tokens.
    """
    parts = [np.array(document, np.uint32) for document in documents if len(document)]
    if not parts:
        raise ConfigError("the corpus is empty", got="no tokens", expected="text in the files")
    tokens = np.concatenate([part for document in parts for part in (document, np.array([SEPARATOR], np.uint32))])
    if len(tokens) >= SEPARATOR:
        raise ConfigError("the corpus is too large", got=f"{len(tokens):,} tokens", expected=f"below {SEPARATOR:,}")
    order = suffix_array(tokens, progress)
    about = IndexInfo(num_tokens=len(tokens), num_documents=len(parts), tokenizer=vocabulary)
    with new_folder(folder) as written:
        tokens.astype(">u4").tofile(written / _TOKENS)
        order[tokens[order] != SEPARATOR].astype("<u4").tofile(written / _SUFFIXES)
        write_text(written / _ABOUT, to_json(vars(about), indent=2))
    return about


def suffix_array(tokens: Ids, progress: Callable[[str, int, int], None]) -> NDArray[np.int64]:
    """All places, in the order of the `MAX_CONTEXT` tokens that begin there, by prefix doubling.

    The rank of the first 2n tokens is that of the pair (rank of the first n, rank of the next n).
    """
    rank = np.unique(tokens, return_inverse=True)[1].astype(np.int64)
    order, length = np.argsort(rank, kind="stable"), 1
    while length < MAX_CONTEXT and rank.max() < len(rank) - 1:
        progress("sorting", length, MAX_CONTEXT)
        pairs = rank * (len(rank) + 1)
        pairs[:-length] += rank[length:] + 1
        order = np.argsort(pairs, kind="stable")
        rank[order] = np.concatenate([[0], np.cumsum(np.diff(pairs[order]) != 0)])
        length *= 2
    progress("sorting", MAX_CONTEXT, MAX_CONTEXT)
    return order
