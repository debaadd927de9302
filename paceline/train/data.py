"""Answers of a target as lessons: read from the folders of `prepare`, split, put in order, and padded into batches.

    folders ── read ──> Answers ── split ──> training answers ── limited ──> n of them ── plan(seed, epoch) ──> batches
                                    └──────> held-out answers: of other prompts

Which answers are held out, and which n are taken, depends on the texts of the prompts alone, so more data moves no
answer across, and the smaller of two limits takes a part of the larger.
"""

import hashlib
import json
import random
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, final

import torch
from safetensors import safe_open
from torch import Tensor

from ..errors import ConfigError
from ..schema import validate
from ..system.files import read_json, write_text
from .pictures import PicturedChat
from .prepare import written
from .recipe import Batch
from .run_folder import understood

_DATA = "data.json"
_POOL = 256
"""Answers sorted by length together: the larger, the less padding, and the less mixed a batch is."""


@dataclass(frozen=True)
class Answer:
    """One answer: where its states are, and its text. file: None where no states were kept. chat: with pictures."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    source: str
    temperature: float
    index: int
    file: Path | None
    chat: PicturedChat | None = None

    @property
    def length(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.prompt_ids) + len(self.answer_ids)

    @property
    def images(self) -> tuple[str, ...]:
        """What is in each picture of the prompt."""
        return () if self.chat is None else self.chat.images

    @cached_property
    def place(self) -> int:
        """A number from 0 to 2^64 - 1 that depends on the prompt and its pictures alone."""
        text = ",".join([*map(str, self.prompt_ids), *self.images]).encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:8], "big")


def read_lines(folder: Path) -> dict[str, int] | None:
    """How many answers of which folders the run in this folder began with; None where it did not begin.

    Raises `ConfigError` for a damaged data.json.
    """
    path = folder / _DATA
    if not path.exists():
        return None
    what = f"the record {str(path)!r}"
    with understood(what, f"remove {str(folder)!r} to train from the beginning"):
        return validate(dict[str, int], read_json(path, "the record"), what)


def write_lines(folder: Path, lines: Mapping[str, int]) -> None:
    """Note them."""
    write_text(folder / _DATA, json.dumps(lines) + "\n")


@final
class Answers:
    """Some answers, in a fixed order."""

    def __init__(self, answers: Iterable[Answer]):
        self.all = sorted(answers, key=lambda one: (one.place, one.temperature, one.index))

    @classmethod
    def read(cls, folders: Path | str | Iterable[Path | str], lines: Mapping[str, int] | None = None) -> "Answers":
        """The answers of one or several folders, also while they are being written.

        lines: of each folder, how many lines to read at most, for a run that goes on with the data it began with.
        Raises `ConfigError` for a folder without answers.
        """
        found: list[Answer] = []
        for folder in map(Path, [folders] if isinstance(folders, Path | str) else folders):
            told: list[Any] = written(folder)
            if not told:
                raise ConfigError(
                    f"no answers in {str(folder)!r}", expected="a folder that `prepare` wrote",
                    fix="put it back, or name another out",
                )  # fmt: skip
            for line in told[: (lines or {}).get(str(folder))]:
                shard = line["states"]
                found.append(
                    Answer(
                        tuple(line["prompt_ids"]),
                        tuple(line["answer_ids"]),
                        str(line["source"]),
                        float(line["temperature"]),
                        int(line["index"]),
                        None if shard is None else folder / str(shard),
                        PicturedChat(json.dumps(line["messages"]), tuple(line["images"])) if "images" in line else None,
                    )
                )
        return cls(found)

    def __len__(self) -> int:
        return len(self.all)

    @property
    def num_tokens(self) -> int:
        """Answer tokens."""
        return sum(len(one.answer_ids) for one in self.all)

    @property
    def texts(self) -> list[tuple[int, ...]]:
        """Token ids of prompts and answers, for counting what is frequent."""
        return [ids for one in self.all for ids in (one.prompt_ids, one.answer_ids)]

    def hash(self) -> str:
        """SHA-256 over every token."""
        digest = hashlib.sha256()
        for one in self.all:
            digest.update(repr((one.prompt_ids, one.answer_ids, *one.images)).encode())
        return digest.hexdigest()

    def split(self, held_out: float) -> "tuple[Answers, Answers]":
        """Training answers, and about this share of all as held-out ones; answers to one prompt stay together."""
        border = int(held_out * 2**64)
        return Answers(a for a in self.all if a.place >= border), Answers(a for a in self.all if a.place < border)

    def limited(self, limit: int | None) -> "Answers":
        """At most `limit` answers, a part of what any larger limit takes."""
        return self if limit is None else Answers(self.all[:limit])

    def fitting(self, max_tokens: int) -> "Answers":
        """Those whose answer begins within the first `max_tokens` tokens."""
        return Answers(one for one in self.all if len(one.prompt_ids) < max_tokens)

    def plan(self, max_tokens: int, seed: int = 0, epoch: int | None = None) -> list[list[int]]:
        """Batches of indices: rows of like length, rows x longest row <= max_tokens; the same for the same arguments.

        epoch: None keeps the order, for evaluation.
        """
        chance = random.Random(f"{seed} {epoch}")
        order = list(range(len(self.all)))
        if epoch is not None:
            chance.shuffle(order)
        batches: list[list[int]] = []
        for begin in range(0, len(order), _POOL):
            batch: list[int] = []
            for index in sorted(order[begin : begin + _POOL], key=lambda i: self.all[i].length):
                if batch and (len(batch) + 1) * min(self.all[index].length, max_tokens) > max_tokens:
                    batches.append(batch)
                    batch = []
                batch.append(index)
            batches.append(batch)
        if epoch is not None:
            chance.shuffle(batches)
        return batches

    def lessons(self, indices: Seq[int], max_tokens: int) -> int:
        """Answer tokens of a batch of these answers, cut as `batch` cuts them."""
        cut = ((len(self.all[i].prompt_ids), min(self.all[i].length, max_tokens)) for i in indices)
        return sum(end - begin for begin, end in cut)

    def batch(self, indices: Seq[int], layers: Seq[int], max_tokens: int) -> Batch:
        """These answers side by side, cut to `max_tokens`; states in their stored dtype, none where none are stored.

        Raises `ConfigError` where some layer, or the states of some answer, are missing.
        """
        chosen = [self.all[i] for i in indices]
        width = min(max(one.length for one in chosen), max_tokens)
        token_ids = torch.zeros(len(chosen), width, dtype=torch.long)
        is_answer = torch.zeros(len(chosen), width, dtype=torch.bool)
        for row, one in enumerate(chosen):
            ids = torch.tensor((one.prompt_ids + one.answer_ids)[:width])
            token_ids[row, : len(ids)] = ids
            is_answer[row, len(one.prompt_ids) : len(ids)] = True
        chats = tuple(one.chat for one in chosen) if self.has_pictures else ()
        if not self.has_states:
            return Batch(token_ids, {}, is_answer, chats)
        states = {layer: _side_by_side(chosen, layer, width) for layer in layers}
        return Batch(token_ids, states, is_answer, chats)

    @cached_property
    def has_pictures(self) -> bool:
        """True where some prompt has pictures."""
        return any(one.chat is not None for one in self.all)

    @cached_property
    def has_states(self) -> bool:
        """True where every answer has stored states."""
        return all(one.file is not None for one in self.all)


def _side_by_side(answers: Seq[Answer], layer: int, width: int) -> Tensor:
    """Stored states of one layer, zero where an answer has none. [B, T, E]."""
    rows = [_stored(one, layer)[:width] for one in answers]
    padded = rows[0].new_zeros(len(rows), width, rows[0].shape[-1])
    for row, states in enumerate(rows):
        padded[row, : len(states)] = states
    return padded


def _stored(answer: Answer, layer: int) -> Tensor:
    assert answer.file is not None
    try:
        found: Tensor = _opened(answer.file).get_tensor(f"{answer.index}.{layer}")
        if len(found) != answer.length - 1:
            raise ValueError(f"{len(found)} states of {answer.length} tokens")
    except Exception as error:  # safetensors raises a kind of its own
        raise ConfigError(
            f"the states of layer {layer} of an answer are not in {str(answer.file)!r}",
            got=str(error),
            fix="prepare them with this layer, or without states (prepare.states=online)",
        ) from error
    return found


@lru_cache(maxsize=512)
def _opened(file: Path) -> Any:
    # Mapped, not read: a tensor's bytes are fetched when it is copied into a batch.
    return safe_open(file, "pt")
