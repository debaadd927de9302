"""What heads share: sizes, the target's tables, draft vocabularies."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar

import torch
from pydantic import AfterValidator, Field
from torch import Tensor, nn

from ...errors import ConfigError, IncompatibleModels
from ...schema import Many, checked

_M = TypeVar("_M", bound=nn.Module)


def _ascending(states: tuple[int, ...]) -> tuple[int, ...]:
    if any(first >= second for first, second in pairwise(states)):
        raise ValueError("each once, in ascending order, as engines gather them layer by layer")
    return states


# What a head's configuration may hold: sizes no larger than any model's, since each claims time or memory.
Width = Annotated[int, Field(ge=1, le=1 << 20)]  # of a vector
Count = Annotated[int, Field(ge=1, le=512)]  # modules in a row
Vocabulary = Annotated[int, Field(ge=1, le=1 << 24)]  # tokens
Rank = Annotated[int, Field(ge=0, le=1 << 16)]  # of low-rank factors; 0: there are none
Linears = Annotated[Many[str], Field(max_length=64)]  # linear layers of a decoder layer, as transformers names them
Shapes = Many[tuple[Width, Width]]  # (outputs, inputs) of each
States = Annotated[Many[Annotated[int, Field(ge=0, le=512)]], Field(min_length=1), AfterValidator(_ascending)]


@checked
class HeadConfig:
    """What the configuration of every head over the target's hidden states holds.

    states: hidden states of the target that it reads, counted as transformers does. draft_vocab_size: Vd, the tokens
    that it can draft.
    """

    hidden_size: Width
    states: States
    draft_vocab_size: Vocabulary
    vocab_size: Vocabulary

    def __post_init__(self) -> None:
        if self.draft_vocab_size > self.vocab_size:
            raise ConfigError(
                "draft_vocab_size is larger than the vocabulary", got=self.draft_vocab_size,
                expected=f"at most {self.vocab_size}",
            )  # fmt: skip


class Output(nn.Module):
    """The product with the target's output rows: they are attached later, and are no part of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.empty(0)

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.rows)


class DraftHead(nn.Module):
    """A head that uses the target's embeddings and output rows (see `attach`)."""

    runs_in_torch: ClassVar[bool] = False
    """Whether no native kernels know its layers."""
    draft_ids: Tensor
    """The draft vocabulary: the target's id of each draft token, ascending. [Vd]."""

    def __init__(self, config: HeadConfig, draft_ids: Tensor | None = None):
        super().__init__()
        self.register_buffer("draft_ids", torch.arange(config.draft_vocab_size) if draft_ids is None else draft_ids)
        self._embeddings, self.output = torch.empty(0), Output()
        self.owns_rows = getattr(config, "own_lm_head", False)

    @property
    def embeddings(self) -> Tensor:
        """The table of the target it is attached to. [V, E]."""
        return self._embeddings

    def normed(self, states: Tensor) -> Tensor:
        """What the head's first linear layer reads of the target's states. [..., len(states) E] -> the same."""
        return states

    def all_logits(self, states: Tensor, tokens: Tensor) -> list[Tensor]:
        """All kinds of logits that an export must reproduce; it is attached. [B, T, Vd] each, or fewer rows.

        states: of texts [B, T, len(states) E]. tokens: to read in several drafting steps, [steps, B, T].
        """
        raise NotImplementedError

    def attach(self, embeddings: Tensor, lm_head: Tensor) -> Self:
        """Use the target's embeddings [V, E] and, where it has none of its own, its output rows [V, E]."""
        self._embeddings = embeddings.detach()
        if not self.owns_rows:
            rows = lm_head.detach()  # without a copy where the draft vocabulary is whole
            self.output.rows = rows if len(self.draft_ids) == len(rows) else rows[self.draft_ids.to(rows.device)]
        return self

    def folded(self) -> Self:
        """An attached head as a drafter runs it."""
        return self


def check_sizes(message: str, head: Mapping[str, object], target: Mapping[str, object], fix: str) -> None:
    """Raise `IncompatibleModels` where sizes of a head, by name, are not those of the target."""
    wrong = [name for name in head if head[name] != target[name]]
    if wrong:
        got, expected = (", ".join(f"{name.replace('_', ' ')} {of[name]}" for name in wrong) for of in (head, target))
        raise IncompatibleModels(message, got=got, expected=expected, fix=fix)


def filled(make: Callable[[Any], _M], config: object, tensors: Mapping[str, Tensor], folder: Path) -> _M:
    """A module of this configuration that holds these very tensors. No memory is claimed before they are known to fit.

    folder: theirs, for errors. Raises `ConfigError` that lists every tensor that is missing, left over or misshapen, or
    for one that holds other than finite numbers of its kind.
    """
    with torch.device("meta"):  # shapes only
        module = make(config)
    for name, like in module.state_dict().items():
        tensor, floats = tensors.get(name), like.is_floating_point()
        if tensor is not None and (tensor.is_floating_point() != floats or not bool(tensor.isfinite().all())):
            raise ConfigError(f"the tensor {name} in {str(folder)!r} holds other than finite numbers of its kind")
    try:
        module.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        raise ConfigError(
            f"the tensors in {str(folder)!r} do not fit its configuration", got=" ".join(str(error).split())
        ) from error
    return module.eval().requires_grad_(False)


def last_part(linear: str) -> str:
    """The last part of a linear layer's name: "self_attn.q_proj" -> "q_proj"."""
    return linear.rpartition(".")[2]


# Draft vocabularies. A head drafts the most frequent tokens only, since at a small target its output layer is most of
# its cost. Other tokens are never drafted, only emitted by the target; verification is the same.

_PRIOR = 3000.0
"""Weight of the rank by id: on answers of SmolLM2-135M it covered 92.8% of new tokens where counts alone did 91.8%."""


def frequent_ids(texts: Iterable[Sequence[int]], size: int, vocab_size: int) -> Tensor:
    """The `size` tokens most frequent in some texts, as ascending ids. [Vd].

    A text is small beside a vocabulary, so tokens it does not hold are ranked by id: tokenizers number common tokens
    first.
    """
    tokens = [token for text in texts for token in text if token < vocab_size]
    counts = torch.tensor(tokens, dtype=torch.long).bincount(minlength=vocab_size).double()
    scores = counts + _PRIOR / (torch.arange(vocab_size) + 300.0)
    return scores.topk(min(size, vocab_size)).indices.sort().values


def draft_index(draft_ids: Tensor, vocab_size: int) -> Tensor:
    """Place of each target token in the draft vocabulary, -1 where it has none. [Vd] -> [V]."""
    index = torch.full((vocab_size,), -1, dtype=torch.long, device=draft_ids.device)
    index[draft_ids] = torch.arange(len(draft_ids), device=draft_ids.device)
    return index
