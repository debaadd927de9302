"""Random EAGLE heads for tiny targets, and what such a head says when nothing is cached: the slow and obvious form."""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.heads.eagle import EagleConfig, EagleHead
from paceline.runner import LoadedModel


def random_head(
    target: LoadedModel, version: int, seed: int = 0, draft_vocab: int = 60, **options: object
) -> EagleHead:
    """A head with weights large enough to make its laws differ clearly. It can draft tokens 30 to 30 + draft_vocab."""
    width, layers = target.hidden_size, target.num_layers
    config = EagleConfig(
        version=version,
        hidden_size=width,
        target_hidden_size=width,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        states=(layers,) if version == 1 else (0, 1, layers),
        draft_vocab_size=draft_vocab,
        vocab_size=target.vocab_size,
        **options,  # type: ignore[arg-type]
    )
    torch.manual_seed(seed)
    head = EagleHead(config, torch.arange(draft_vocab) + target.vocab_size - draft_vocab - 3).to(target.dtype)
    for parameter in head.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.25)
    return head.eval()


@torch.inference_mode()
def states_of(model: PreTrainedModel, token_ids: Seq[int], layers: Seq[int]) -> Tensor:
    """The states of a text by plain transformers, [1, T, len(layers) E]."""
    out = model(torch.tensor([list(token_ids)]), output_hidden_states=True)
    return torch.cat([out.hidden_states[layer] for layer in layers], -1)


@torch.inference_mode()
def law_after(head: EagleHead, states: Tensor, token_ids: Seq[int], path: Seq[int]) -> Tensor:
    """Logits [Vd] of the token after `path`, itself drafted after `token_ids`: the whole head over all pairs.

    states: f_0 .. f_{T-2} or more, [1, T - 1, len(states) E]. `head` must be attached.
    """
    known = len(token_ids) - 1
    hidden = head.begin(states[:, :known])
    for step in range(len(path) + 1):
        tokens = torch.tensor([[*token_ids[1:], *path[:step]]])
        positions = torch.arange(known + step)[None]
        out = head(tokens, hidden, positions, causal)
        hidden = torch.cat([hidden, out[:, -1:]], 1)
    return head.logits(out[0, -1])


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention to what came before, written out."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, float("-inf")).softmax(-1) @ value
