"""Training of MTP modules: every step as drafting will run it, the tokens before fed as they truly were.

    column            t          t+1         t+2        t+3
    token             x_t        x_{t+1}     x_{t+2}    x_{t+3}
    state             f_t        f_{t+1}     f_{t+2}
    step 0 at t       reads f_t and x_{t+1}             label: x_{t+2}, or its law: output rows on f_{t+1}
    step 1 at t       reads h^1_t and x_{t+2}           label: x_{t+3}
    step s at t       reads h^s_t and x_{t+1+s}         label: x_{t+2+s}

While s < K, step s is module s + 1, causal over its own rows. Beyond, the last module goes on, at t + s - K + 1: it
sees its own rows up to t, and on top of them the rows of these further steps at t.
"""

from typing import final

import torch
from torch import Tensor, nn

from ...errors import ConfigError
from ...heads import MtpHead
from ...heads.parts import draft_index
from ..losses import Loss
from ..recipe import Batch, Losses, Recipe
from .heads import Lessons
from .shared import Unrolled, shifted


@final
class MtpRecipe(Recipe):
    """Train MTP modules that are attached to their target.

    lm_head: the target's output rows for the draft vocabulary [Vd, E]. loss: between the target's law and a step's, see
    `losses`; None: cross entropy with the token that followed. steps: drafting steps unrolled, None: one a module; more
    let the last module go on (FastMTP, arXiv 2509.18362). decay: step s weighs decay^s (FastMTP: 0.6; DeepSeek-V3: 1,
    the mean). Raises `ConfigError`.
    """

    def __init__(
        self, module: MtpHead, lm_head: Tensor, loss: Loss | None = None, steps: int | None = None, decay: float = 0.6
    ):
        least = module.config.num_modules
        if steps is not None and steps < least:
            raise ConfigError("too few steps", got=steps, expected=f"at least {least}, one a module")
        if not 0 < decay <= 1:
            raise ConfigError("decay is out of range", got=decay, expected="above 0 and at most 1")
        self.module = self._head = module
        self.states = module.config.states
        self.steps, self.decay = steps or least, decay
        self._rows, self._loss = lm_head, loss
        self._index = draft_index(module.draft_ids.to(lm_head.device), module.config.vocab_size)

    def loss(self, batch: Batch) -> Losses:
        """Mean of the steps' losses, weighted."""
        head, hidden = self._head, batch.states[self.states[0]]
        lessons = Lessons(batch, hidden, self._rows, self._index, self._loss)
        length, last = batch.token_ids.shape[1], head.config.num_modules - 1
        columns_of_text = torch.arange(length, device=hidden.device).expand_as(batch.token_ids)
        unrolled = Unrolled(length, hidden.device)
        total, parts, agreement = hidden.new_zeros(()), dict[str, Tensor](), list[Tensor]()
        for step in range(self.steps):
            tokens = shifted(batch.token_ids, 1 + step)
            positions = columns_of_text + max(0, step - last)
            hidden = head(step, tokens, hidden, positions, _causal if step < last else unrolled)
            columns = lessons.columns(2 + step)
            logits = head.logits(hidden[columns], step)  # [M, Vd]
            value = lessons.loss(logits, columns, 2 + step)
            total = total + self.decay**step * value
            parts[f"law{step}"] = value.detach()
            agreement.append(lessons.agreement(logits, columns, 2 + step).to(hidden.dtype))
        weight = sum(self.decay**step for step in range(self.steps))
        return Losses(total / weight, parts, torch.stack(agreement))


def warm_start(head: MtpHead, layer: nn.Module, norm: Tensor) -> None:
    """Begin every module with one of the target's decoder layers, its final norm, and the state passed through.

    layer: a transformers layer of the Llama form and of the modules' shape. norm: weight of the final norm [E]. What
    the embeddings add begins near zero and is learnt. Raises `ConfigError` where a weight is missing or misshapen.
    """
    theirs, size = layer.state_dict(), head.config.hidden_size
    with torch.no_grad():
        for module in head.layers:
            for name, weight in module.state_dict().items():
                if not name.startswith(("self_attn.", "mlp.", "input_layernorm.", "post_attention_layernorm.")):
                    continue
                source = theirs.get(name)
                if source is None or source.shape != weight.shape:
                    got = None if source is None else list(source.shape)
                    raise ConfigError(f"the layer has no {name} of this shape", got=got, expected=list(weight.shape))
                weight.copy_(source)
            tensors = module.state_dict(keep_vars=True)
            tensors["norm.weight"].copy_(norm)
            tensors["eh_proj.weight"][:, :size] *= 0.1
            tensors["eh_proj.weight"][:, size:] = torch.eye(size)


def _causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
