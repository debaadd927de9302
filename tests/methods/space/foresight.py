"""Masks that know the future: by decree (`Decreed`), by training (`overfitted`), or through the transition alone."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from paceline import SamplingParams
from paceline.core.interfaces import Drafter, DraftPolicy
from paceline.core.tree import TokenTree
from paceline.methods.space.adapter import SpaceAdapter, SpaceConfig
from paceline.target import LoadedModel, ModelRunner
from tests.helpers import REPEATING, VOCAB, loaded, oracle, run, sequence
from tests.methods.space.common import adapter, decoder_layers
from tests.tiny import tiny_model

Says = Callable[[tuple[int, ...], int], list[int]]
"""(prompt, position) -> the tokens that masks say for this position, most probable first."""


class Decreed(ModelRunner):
    """A runner whose mask rows say what `says` tells for the position after their own; all else is the target's."""

    says: Says
    prompts: dict[int, tuple[int, ...]]

    def admit(self, token_ids, vision=None, is_used=None):
        slot = super().admit(token_ids, vision, is_used)
        self.prompts[slot] = tuple(token_ids)
        return slot

    def forward(self, slots, tree: TokenTree, *rest, **options) -> Tensor:
        logits = super().forward(slots, tree, *rest, **options).clone()
        for row, node in (tree.token_ids >= self.vocab_size).nonzero().tolist():
            place = self.cache.lengths[slots[row]] + int(tree.depth[row, node])
            logits[row, node] = 0
            for rank, token in enumerate(self.says(self.prompts[slots[row]], place + 1)):
                logits[row, node, token] = 1000.0 - 30 * rank  # no noise changes the order much, all are believed in
        return logits


def decreed(target: LoadedModel, says: Says, slots: int = 3, **options) -> Decreed:
    made = Decreed(target, slots, **options)
    made.says, made.prompts = says, {}
    return made


SAMPLED = SamplingParams(temperature=1.0, max_tokens=40)


@cache
def future(ids: tuple[int, ...] = tuple(REPEATING), params: SamplingParams = SAMPLED) -> list[int]:
    """A text that does not repeat itself, so that a place read wrongly is a token read wrongly. Prompt included."""
    return oracle(loaded(), list(ids), params).token_ids


def knows(ids: tuple[int, ...], place: int) -> list[int]:
    """Always right, as far as `future` goes."""
    text = future(ids)
    return [text[place] if place < len(text) else 5]


def errs(ids: tuple[int, ...], place: int) -> list[int]:
    """Right but for some places, where the right token comes second."""
    (token,) = knows(ids, place)
    return [token, (token + 1) % VOCAB] if place % 11 not in (1, 2, 6) else [(token + 1) % VOCAB, token]


def accepted(
    on: ModelRunner, drafter: Drafter, policy: DraftPolicy, params: SamplingParams = SAMPLED, ids: list[int] = REPEATING
) -> list[int]:
    """Accepted tokens of each round that drafted, the last ones left out, where less may be drafted."""
    (seq,) = run(on, drafter, [sequence(on.loaded, ids, params)], policy=policy)
    assert seq.token_ids == oracle(on.loaded, ids, params).token_ids
    return [r.num_accepted for r in seq.rounds[2:-2]]  # the first came with the prompt, the second hung masks


KNOWN, SHORT = REPEATING[:4], SamplingParams(temperature=1.0, max_tokens=26)
"""The text that `overfitted` knows."""


@cache
def overfitted(num_masks: int = 3, steps: int = 40) -> SpaceAdapter:
    """An adapter that knows a text by heart, trained over plain transformers: masks appended to every prefix.

    x_0 .. x_t m_0 m_1 m_2      labels of the masks' rows: x_{t+2} x_{t+3} x_{t+4}
    """
    with torch.inference_mode(False), torch.enable_grad():
        model, made = tiny_model("llama").requires_grad_(False), adapter(num_masks=num_masks, rank=8, strength=0.1)
        made.requires_grad_(True)
        text, first = future(tuple(KNOWN), SHORT), len(KNOWN) - 1
        lasts = range(first, len(text) - num_masks - 1)
        width = lasts[-1] + 1 + num_masks
        ids = torch.zeros(len(lasts), width, dtype=torch.long)
        which = torch.full((len(lasts), width), -1)
        labels = torch.tensor([text[last + 2 : last + 2 + num_masks] for last in lasts])
        for row, last in enumerate(lasts):  # what follows the masks is padding: attention is causal
            ids[row, : last + 1] = torch.tensor(text[: last + 1])
            which[row, last + 1 : last + 1 + num_masks] = torch.arange(num_masks)
        is_mask = which >= 0
        _gate(model, made, is_mask)
        best = torch.optim.Adam(made.parameters(), lr=0.02)
        for _ in range(steps):
            inputs = model.get_input_embeddings()(ids).masked_scatter(is_mask[..., None], made.embed(which[is_mask]))
            logits = model(inputs_embeds=inputs).logits[is_mask]
            loss = torch.nn.functional.cross_entropy(logits, labels.flatten())
            best.zero_grad()
            loss.backward()
            best.step()
        assert bool((logits.argmax(-1) == labels.flatten()).all())
        return made.eval().requires_grad_(False)


def _gate(model: torch.nn.Module, made: SpaceAdapter, is_mask: Tensor) -> None:
    """Hooks that correct the mask rows of every linear layer the adapter names."""
    for index, layer in enumerate(decoder_layers(model)):
        for name in made.config.linears:
            factors = made.factors(index, name)
            layer.get_submodule(name).register_forward_hook(
                lambda _, args, out, factors=factors: out + is_mask[..., None] * factors(args[0])
            )


def knowing_transition(num_masks: int = 4) -> SpaceAdapter:
    """Masks that say nothing (embeddings of zero), a transition that is the target's own distribution.

    silu(x) - silu(-x) = x, so that out(silu(in(e))) = e with in = [1; -1] and out = [1, -1].
    """
    made = SpaceAdapter(SpaceConfig(32, 2, VOCAB, num_masks, transition_rank=64)).double()
    unit = torch.eye(32, dtype=torch.float64)
    with torch.no_grad():
        made.masks.zero_()
        made.transition_in.copy_(torch.cat([unit, -unit]))
        made.transition_out.copy_(torch.cat([unit, -unit], 1))
    return made.requires_grad_(False)
