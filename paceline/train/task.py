"""What the loop trains: a recipe, and the answers it learns from."""

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, final

from torch import Tensor, nn

from ..errors import ConfigError
from ..target import LoadedModel
from .config import TrainConfig
from .data import Answers, Batch, online_states
from .loop import Task
from .recipe import Losses, Recipe


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
