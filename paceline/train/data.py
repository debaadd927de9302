"""Answers of a target as training data: read from the folders of `prepare`, split, ordered, and padded into batches.

    folders ── read ──> Answers ── split ──> training answers ── limited ──> n of them ── plan(seed, epoch) ──> batches
                                    └──────> held-out answers: of other prompts

Which answers are held out, and which n are taken, depends only on the texts of the prompts. So with more data no answer
changes sides, and a smaller limit takes a subset of a larger one.
"""

import hashlib
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, final

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ..attention.kv_cache import SlotCache
from ..attention.states import StateStore
from ..errors import ConfigError
from ..target import LoadedModel
from .config import TrainConfig
from .loop import Task
from .prepare import PreparedAnswer, read_answers
from .recipe import Batch, Losses, Recipe
from .run_folder import read_if_there

DATA = "data.json"
_SORTED = 256
"""Answers that are sorted by length together: a larger number gives less padding and less random batches."""
FEW_TOKENS = 100_000
"""Of answers: with fewer a head from scratch hardly learns, see docs/heads.md."""


def read_begun(folder: Path) -> dict[str, int] | None:
    """How many answers of which folders the run in this folder started with; None if it did not start.

    Raises `ConfigError` for a damaged data.json.
    """
    return read_if_there(dict[str, int], folder / DATA, f"remove {str(folder)!r} to train from the beginning")


@final
class Answers:
    """Some answers, in a fixed order."""

    def __init__(self, answers: Iterable[PreparedAnswer]):
        self.all = sorted(answers, key=lambda one: (one.place, one.temperature, one.index))

    @classmethod
    def read(cls, folders: Path | str | Iterable[Path | str], lines: Mapping[str, int] | None = None) -> "Answers":
        """The answers of one or several folders, also while they are being written.

        lines: the most lines to read of each folder, for a run that continues with its first data.
        Raises `ConfigError` for a folder without answers.
        """
        found = list[PreparedAnswer]()
        for folder in map(Path, [folders] if isinstance(folders, Path | str) else folders):
            answers = read_answers(folder)
            if not answers:
                raise ConfigError(
                    f"no answers in {str(folder)!r}", expected="a folder that `prepare` wrote",
                    fix="put it back, or name another out",
                )  # fmt: skip
            found += answers[: (lines or {}).get(str(folder))]
        return cls(found)

    def __len__(self) -> int:
        return len(self.all)

    @property
    def num_tokens(self) -> int:
        return sum(len(one.answer_ids) for one in self.all)

    @property
    def texts(self) -> list[tuple[int, ...]]:
        """Token ids of prompts and answers, for counting frequent tokens."""
        return [ids for one in self.all for ids in (one.prompt_ids, one.answer_ids)]

    @cached_property
    def has_images(self) -> bool:
        return any(one.messages is not None for one in self.all)

    @cached_property
    def has_states(self) -> bool:
        return all(one.states is not None for one in self.all)

    def hash(self) -> str:
        digest = hashlib.sha256()
        for one in self.all:
            digest.update(repr((one.prompt_ids, one.answer_ids, *one.images)).encode())
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
        first, last = (key(one.prompt_ids for one in self.all) for key in (min, max))
        return next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))

    def batch(self, indices: Sequence[int], layers: Sequence[int], max_tokens: int, prompts: bool = False) -> Batch:
        """A batch of these answers, cut to `max_tokens`; states in their stored dtype, none where none are stored.

        prompts: their tokens count as answer tokens, after the prefix that all prompts share.

        Raises `ConfigError` where some layer, or the states of some answer, are missing.
        """
        chosen = [self.all[i] for i in indices]
        texts = [torch.tensor((one.prompt_ids + one.answer_ids)[:max_tokens]) for one in chosen]
        token_ids = nn.utils.rnn.pad_sequence(texts, batch_first=True)
        columns = torch.arange(token_ids.shape[1])
        begins = [max(1, self._shared) if prompts else len(one.prompt_ids) for one in chosen]
        is_answer = [(begin <= columns) & (columns < len(ids)) for begin, ids in zip(begins, texts, strict=True)]
        chats = tuple(one.chat for one in chosen) if self.has_images else ()
        states = {layer: _side_by_side(chosen, layer, len(columns)) for layer in layers} if self.has_states else {}
        return Batch(token_ids, states, torch.stack(is_answer), chats)


def _side_by_side(answers: Sequence[PreparedAnswer], layer: int, width: int) -> Tensor:
    """Stored states of one layer, zero where an answer has none. [B, T, E]."""
    padded = nn.utils.rnn.pad_sequence([_stored(one, layer)[:width] for one in answers], batch_first=True)
    return nn.functional.pad(padded, (0, 0, 0, width - padded.shape[1]))


def _stored(answer: PreparedAnswer, layer: int) -> Tensor:
    file = answer.folder / str(answer.states)
    try:
        found: Tensor = _opened(file).get_tensor(f"{answer.index}.{layer}")
        if len(found) != answer.length - 1:
            raise ValueError(f"{len(found)} states of {answer.length} tokens")
    except Exception as error:  # safetensors raises a kind of its own
        raise ConfigError(
            f"the states of layer {layer} of an answer are not in {str(file)!r}", got=str(error),
            fix="prepare them with this layer, or without states (prepare.states=online)",
        ) from error  # fmt: skip
    return found


@lru_cache(maxsize=512)
def _opened(file: Path) -> Any:
    # Mapped, not read: a tensor's bytes are fetched when it is copied into a batch.
    return safe_open(file, "pt")


@final
class AnswerTask(Task[Batch]):
    """A recipe and the answers it learns from, for `loop.train`; items are (answers, indices of a batch).

    held_out: answers to evaluate on. target: computes states that are not stored; None: all are stored. plan: its
    `Plan.identity`.
    Raises `ConfigError` where there is nothing to train on, or the recipe cannot use the answers.
    """

    def __init__(
        self, recipe: Recipe, answers: Answers, held_out: Answers, config: TrainConfig,
        target: LoadedModel | None = None, plan: Mapping[str, Any] | None = None,
    ):  # fmt: skip
        self._answers, kept = answers.fitting(config.max_tokens), held_out.fitting(config.max_tokens)
        if not len(self._answers):
            raise ConfigError(
                "there is nothing to train on", got=f"{len(answers)} answers", expected="more, or shorter"
            )
        # Stored states include the images; otherwise placeholder tokens would be read as text.
        looked = recipe.reads_images or (recipe.states and answers.has_states and held_out.has_states)
        if (answers.has_images or held_out.has_images) and not looked:
            raise ConfigError(
                f"{type(recipe).__name__} does not read images", got="answers to prompts with images",
                fix="prepare them with prepare.states=store" if recipe.states else "leave these answers out",
            )  # fmt: skip
        self._recipe, self._config, self._target, self.module = recipe, config, target, recipe.module
        self._asked = plan or {}
        self._plans = [self._answers.plan(config.max_tokens, config.seed, epoch) for epoch in range(config.epochs)]
        self._cut = dict[int, list[tuple[list[list[int]], bool]]]()
        self.held_out = [(kept, batch) for batch in kept.plan(config.max_tokens)] if len(kept) else []
        self.data = {"answers": len(self._answers), "tokens": self._answers.num_tokens, "held_out": len(kept)}

    @cached_property
    def identity(self) -> dict[str, Any]:  # type: ignore[override]
        """The answers, the recipe with the settings it was given, and the tokens that its module can draft."""
        c = self._config
        ids: Any = getattr(self.module, "draft_ids", None)
        return {
            **{key: getattr(c, key) for key in ("epochs", "max_tokens", "accumulate", "prompts")},
            **self._asked,
            "answers": self._answers.hash(),
            "recipe": type(self._recipe).__name__,
            "draft_ids": "" if ids is None else hashlib.sha256(repr(ids.tolist()).encode()).hexdigest(),
        }

    def input_scales(self) -> Mapping[nn.Parameter, Tensor]:
        return self._recipe.input_scales

    def num_steps(self, devices: int) -> int:
        return len(self._steps(devices))

    def items(self, step: int, devices: int) -> Sequence[tuple[Answers, list[int]]]:
        """`accumulate` batches for each device; fewer at the end of an epoch."""
        return [(self._answers, batch) for batch in self._steps(devices)[step][0]]

    def is_epoch_end(self, step: int, devices: int) -> bool:
        return self._steps(devices)[step - 1][1]

    def _steps(self, devices: int) -> list[tuple[list[list[int]], bool]]:
        """For each step its batches, and whether it is the last of an epoch."""
        if devices not in self._cut:
            size = self._config.accumulate * devices
            self._cut[devices] = [
                (plan[begin : begin + size], begin + size >= len(plan))
                for plan in self._plans
                for begin in range(0, len(plan), size)
            ]
        return self._cut[devices]

    def load(self, item: tuple[Answers, list[int]]) -> Batch:
        answers, indices = item
        prompts = self._config.prompts and answers is self._answers  # held-out prompts never count
        return answers.batch(indices, self._recipe.states, self._config.max_tokens, prompts)

    def weight(self, batch: Batch) -> int:
        return int(batch.is_answer.sum())

    def loss(self, batch: Batch) -> Losses:
        if not batch.states and self._recipe.states:
            assert self._target is not None
            batch = online_states(self._target, batch, self._recipe.states)
        like = next(p for p in self.module.parameters() if p.requires_grad)
        states = {layer: state.to(like.device, like.dtype) for layer, state in batch.states.items()}
        ready = Batch(batch.token_ids.to(like.device), states, batch.is_answer.to(like.device), batch.chats)
        return self._recipe.loss(ready)


@torch.no_grad()
def online_states(target: LoadedModel, batch: Batch, layers: Sequence[int]) -> Batch:
    """The batch with these states of its texts, zero at and after each answer's last token, as stored ones are."""
    rows, width = batch.token_ids.shape
    cache, store = SlotCache(rows, width, target.num_layers), StateStore(rows)
    store.watch(layers)
    layout = target.begin(cache, [cache.allocate() for _ in range(rows)], width, head_rows=0)
    target.forward(batch.token_ids.to(target.device), layout, cache, store)
    last = (batch.is_answer * torch.arange(width)).amax(1)  # column of each answer's last token
    is_later = (torch.arange(width) >= last[:, None]).to(target.device)[..., None]
    held = store.all(width)
    return replace(batch, states={layer: states.masked_fill(is_later, 0) for layer, states in held.items()})
