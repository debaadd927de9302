"""SPACE's trained part: mask tokens appended to a text predict the next tokens, in the target's own pass.

SPACE (Yi et al. 2024, arXiv 2402.11809): mask j = 0, 1, ... below the node of x_t stands at position t+1+j and
predicts x_{t+2+j}, without the tokens between. The factors are *gated* (gated LoRA): they and the mask embeddings act
on the rows of mask tokens only, so every other row is the untouched target's.

A mask does not see the token before the one it predicts; drafting, it is known. With a transition, a hidden
vector made from that token shifts the mask's logits: logits_j + rows @ out(silu(in(embedding of the token before))).
"""

from typing import ClassVar, cast, final

import torch
from torch import Tensor, nn

from ...errors import ConfigError
from ...schema import checked
from ..heads.parts import Count, Linears, Rank, Shapes, Vocabulary, Width, last_part


@checked
class SpaceConfig:
    """Shape of a SPACE adapter.

    num_masks: k, the most mask tokens below a node. shared_mask: one embedding for all of them, as in the paper, else
    one each. rank: of the factors, 0: none. linears: where they act in each decoder layer, as transformers names it;
    shapes: (outputs, inputs) of each. transition_rank: 0 without a transition, as in the paper.
    """

    hidden_size: Width
    num_layers: Count
    vocab_size: Vocabulary
    num_masks: Count
    shared_mask: bool = False
    rank: Rank = 0
    linears: Linears = ()
    shapes: Shapes = ()
    transition_rank: Rank = 0
    method: ClassVar[str] = "space"

    def __post_init__(self) -> None:
        if len(self.linears) != len(self.shapes) or (self.rank > 0) != bool(self.linears):
            raise ConfigError(
                "the factors of a SPACE adapter are not given clearly",
                got=f"rank {self.rank}, {len(self.linears)} linears, {len(self.shapes)} shapes",
                expected="a shape for each linear, and a rank exactly where there are any",
            )
        if len({last_part(name) for name in self.linears}) != len(self.linears):
            raise ConfigError("two linears of a SPACE adapter have the same last part", got=", ".join(self.linears))


@final
class Factors(nn.Module):
    """A correction of low rank to one linear layer: x -> b (a x); any scale is part of b."""

    def __init__(self, outputs: int, inputs: int, rank: int):
        super().__init__()
        self.a = nn.Parameter(torch.empty(rank, inputs))
        self.b = nn.Parameter(torch.zeros(outputs, rank))
        nn.init.kaiming_uniform_(self.a, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(nn.functional.linear(x, self.a), self.b)


@final
class SpaceAdapter(nn.Module):
    """Mask embeddings, factors by layer and name, and the transition. A fresh one changes no logits of a plain token.

    masks: [k, E], or [1, E] where shared. layers[i][name]: `Factors`, name being the last part of the linear's.
    """

    Config = SpaceConfig

    def __init__(self, config: SpaceConfig):
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.masks = nn.Parameter(torch.randn(1 if config.shared_mask else config.num_masks, size) * 0.02)
        self.layers = nn.ModuleList()
        if config.rank:
            pairs = list(zip(config.linears, config.shapes, strict=True))
            for _ in range(config.num_layers):
                factors = {last_part(name): Factors(*shape, config.rank) for name, shape in pairs}
                self.layers.append(nn.ModuleDict(factors))
        self.transition_in: nn.Parameter | None = None
        self.transition_out: nn.Parameter | None = None
        if config.transition_rank:
            self.transition_in = nn.Parameter(torch.randn(config.transition_rank, size) * size**-0.5)
            self.transition_out = nn.Parameter(torch.zeros(size, config.transition_rank))

    @property
    def num_masks(self) -> int:
        return self.config.num_masks

    def embed(self, which: Tensor) -> Tensor:
        """Embeddings of mask tokens, counted from 0. [R] -> [R, E]."""
        return nn.functional.embedding(torch.zeros_like(which) if self.config.shared_mask else which, self.masks)

    def factors(self, layer: int, linear: str) -> Factors:
        """The factors of one of `config.linears`."""
        return cast("Factors", cast("nn.ModuleDict", self.layers[layer])[last_part(linear)])

    def shift(self, before: Tensor) -> Tensor | None:
        """Hidden vectors whose product with the output rows is added to a mask's logits; None without a transition.

        before: the target's embeddings of the tokens before the predicted ones. [R, E] -> [R, E].
        """
        if self.transition_in is None or self.transition_out is None:
            return None
        scale = before.pow(2).mean(-1, keepdim=True).clamp_min(1e-12).rsqrt()  # embeddings differ in length by model
        inner = nn.functional.silu(nn.functional.linear(before * scale, self.transition_in))
        return nn.functional.linear(inner, self.transition_out)
