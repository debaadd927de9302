"""Answers of a target as training data: read from the folders of `prepare`, split, ordered, and padded into batches.

    folders ── read ──> Answers ── split ──> training answers ── limited ──> n of them ── plan(seed, epoch) ──> batches
                                    └──────> held-out answers: of other prompts

Which answers are held out, and which n are taken, depends only on the texts of the prompts. So with more data no answer
changes sides, and a smaller limit takes a subset of a larger one.
"""

import hashlib
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from safetensors import safe_open
from torch import Tensor, nn

from ..attention.states import StateStore
from ..errors import ConfigError
from ..target import LoadedModel
from .prepare import ImageChat, PreparedAnswer, read_answers
from .run_folder import read_if_there

DATA = "data.json"
_SORTED = 256
"""Answers that are sorted by length together: a larger number gives less padding and less random batches."""
FEW_TOKENS = 100_000
"""Of answers: with fewer a head from scratch hardly learns, see docs/heads.md."""


@dataclass(frozen=True)
class Batch:
    """A batch of answers, each from the first token of its prompt, padded at the end.

    token_ids: 0 where padded. states: the target's hidden states by layer; the state of column t was computed from
    tokens 0 to t, and is zero where padded and at each answer's last token, which the target never read. is_answer:
    True where the target wrote the token, or where `train.prompts` counts it so: losses are for these tokens only.
    chats: one for each answer whose prompt has images, else None; empty where no prompt has any.
    """

    token_ids: Int[Tensor, "B T"]
    states: Mapping[int, Float[Tensor, "B T E"]]
    is_answer: Bool[Tensor, "B T"]
    chats: tuple[ImageChat | None, ...] = ()


def read_begun(folder: Path) -> dict[str, int] | None:
    """How many answers of which folders the run in this folder started with; None if it did not start.

    Raises `ConfigError` for a damaged data.json.
    """
    return read_if_there(dict[str, int], folder / DATA, f"remove {str(folder)!r} to train from the beginning")


@final
class Answers:
    """Some answers, in a fixed order."""

    def __init__(self, answers: Iterable[PreparedAnswer]):
        self.all = sorted(answers, key=lambda answer: (answer.place, answer.temperature, answer.index))

    @classmethod
    def read(cls, folders: Path | str | Iterable[Path | str], lines: Mapping[str, int] | None = None) -> "Answers":
        """The answers of one or several folders, also while they are being written.

        lines: the most lines to read of each folder, for a run that continues with its first data.
        Raises `ConfigError` for a folder without answers.
        """
        chosen = list[PreparedAnswer]()
        for folder in map(Path, [folders] if isinstance(folders, Path | str) else folders):
            answers = read_answers(folder)
            if not answers:
                raise ConfigError(
                    f"no answers in {str(folder)!r}", expected="a folder that `prepare` wrote",
                    fix="put it back, or name another out",
                )  # fmt: skip
            chosen += answers[: (lines or {}).get(str(folder))]
        return cls(chosen)

    def __len__(self) -> int:
        return len(self.all)

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.answer_ids) for answer in self.all)

    @property
    def texts(self) -> list[tuple[int, ...]]:
        """Token ids of prompts and answers, for counting frequent tokens."""
        return [ids for answer in self.all for ids in (answer.prompt_ids, answer.answer_ids)]

    @cached_property
    def has_images(self) -> bool:
        return any(answer.messages is not None for answer in self.all)

    @cached_property
    def has_states(self) -> bool:
        return all(answer.states is not None for answer in self.all)

    def hash(self) -> str:
        digest = hashlib.sha256()
        for answer in self.all:
            digest.update(repr((answer.prompt_ids, answer.answer_ids, *answer.images)).encode())
        return digest.hexdigest()

    def split(self, held_out: float) -> "tuple[Answers, Answers]":
        """Training answers, and about this share of held-out answers; answers to one prompt stay together."""
        border = int(held_out * 2**64)
        return Answers(a for a in self.all if a.place >= border), Answers(a for a in self.all if a.place < border)

    def limited(self, limit: int | None) -> "Answers":
        """At most `limit` answers, a subset of those of any larger limit."""
        return self if limit is None else Answers(self.all[:limit])

    def fitting(self, max_tokens: int) -> "Answers":
        """The answers that begin within the first `max_tokens` tokens."""
        return Answers(answer for answer in self.all if len(answer.prompt_ids) < max_tokens)

    def plan(self, max_tokens: int, seed: int = 0, epoch: int | None = None) -> list[list[int]]:
        """Batches of indices: rows of like length, rows x longest row <= max_tokens; the same for the same arguments.

        epoch: None keeps the order, for evaluation.
        """
        chance = random.Random(f"{seed} {epoch}")
        order = list(range(len(self.all)))
        if epoch is not None:
            chance.shuffle(order)
        batches: list[list[int]] = []
        for begin in range(0, len(order), _SORTED):
            batch: list[int] = []
            for index in sorted(order[begin : begin + _SORTED], key=lambda i: self.all[i].length):
                if batch and (len(batch) + 1) * min(self.all[index].length, max_tokens) > max_tokens:
                    batches.append(batch)
                    batch = []
                batch.append(index)
            batches.append(batch)
        if epoch is not None:
            chance.shuffle(batches)
        return batches

    @cached_property
    def _shared(self) -> int:
        """Length of the prefix that all prompts share: of the template and a system prompt."""
        first, last = (key(answer.prompt_ids for answer in self.all) for key in (min, max))
        return next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))

    def batch(self, indices: Sequence[int], layers: Sequence[int], max_tokens: int, prompts: bool = False) -> Batch:
        """A batch of these answers, cut to `max_tokens`; states in their stored dtype, none where none are stored.

        prompts: their tokens count as answer tokens, after the prefix that all prompts share.

        Raises `ConfigError` where some layer, or the states of some answer, are missing.
        """
        chosen = [self.all[i] for i in indices]
        texts = [torch.tensor((answer.prompt_ids + answer.answer_ids)[:max_tokens]) for answer in chosen]
        token_ids = nn.utils.rnn.pad_sequence(texts, batch_first=True)
        columns = torch.arange(token_ids.shape[1])
        begins = [max(1, self._shared) if prompts else len(answer.prompt_ids) for answer in chosen]
        is_answer = [(begin <= columns) & (columns < len(ids)) for begin, ids in zip(begins, texts, strict=True)]
        chats = tuple(answer.chat for answer in chosen) if self.has_images else ()
        states = {layer: _side_by_side(chosen, layer, len(columns)) for layer in layers} if self.has_states else {}
        return Batch(token_ids, states, torch.stack(is_answer), chats)


def _side_by_side(answers: Sequence[PreparedAnswer], layer: int, width: int) -> Tensor:
    """Stored states of one layer, zero where an answer has none. [B, T, E]."""
    padded = nn.utils.rnn.pad_sequence([_stored(answer, layer)[:width] for answer in answers], batch_first=True)
    return nn.functional.pad(padded, (0, 0, 0, width - padded.shape[1]))


def _stored(answer: PreparedAnswer, layer: int) -> Tensor:
    file = answer.folder / str(answer.states)
    try:
        states: Tensor = _opened(file).get_tensor(f"{answer.index}.{layer}")
        if len(states) != answer.length - 1:
            raise ValueError(f"{len(states)} states of {answer.length} tokens")
    except Exception as error:  # safetensors raises a kind of its own
        raise ConfigError(
            f"the states of layer {layer} of an answer are not in {str(file)!r}", got=str(error),
            fix="prepare them with this layer, or without states (prepare.states=online)",
        ) from error  # fmt: skip
    return states


@lru_cache(maxsize=512)
def _opened(file: Path) -> Any:
    # Mapped, not read: a tensor's bytes are fetched when it is copied into a batch.
    return safe_open(file, "pt")


def close_states() -> None:
    """Close the files of states that were read, so that removed ones leave the disk."""
    _opened.cache_clear()


@torch.no_grad()
def online_states(target: LoadedModel, batch: Batch, layers: Sequence[int]) -> Batch:
    """The batch with these states of its texts, zero at and after each answer's last token, as stored ones are."""
    rows, width = batch.token_ids.shape
    cache, store = target.new_cache(rows, width), StateStore(rows)
    store.watch(layers)
    layout = target.begin(cache, [cache.allocate() for _ in range(rows)], width, head_rows=0)
    target.forward(batch.token_ids.to(target.device), layout, cache, store)
    last = (batch.is_answer * torch.arange(width)).amax(1)  # column of each answer's last token
    is_later = (torch.arange(width) >= last[:, None]).to(target.device)[..., None]
    held = store.all(width)
    return replace(batch, states={layer: states.masked_fill(is_later, 0) for layer, states in held.items()})
