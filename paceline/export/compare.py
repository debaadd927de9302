"""Do two heads say the same? Logits over made-up tokens and states, at the target's ids."""

import copy

import torch
from torch import Tensor

from ..errors import NotExportable
from ..heads import Head
from ..modules import EagleHead
from ..modules.heads import MedusaHead
from ..modules.vocabulary import draft_index
from .layout import Facts

_BATCH, _LENGTH, _STEPS = 2, 6, 3


@torch.inference_mode()
def largest_difference(ours: Head, theirs: Head, facts: Facts) -> float:
    """Largest absolute difference of the logits of the tokens that `ours` can draft, in float32.

    Of an EAGLE head over several steps, since what one step hands to the next must agree as well.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tables = (facts.vocab_size, facts.hidden_size)
        embeddings = _table(facts.embeddings, tables)
        rows = _table(facts.lm_head, tables)
        states = torch.randn(_BATCH, _LENGTH, len(_states(ours)) * facts.hidden_size)
        tokens = torch.randint(facts.vocab_size, (_STEPS, _BATCH, _LENGTH))
    largest = 0.0
    pair = [_logits(head, embeddings, rows, states, tokens) for head in (ours, theirs)]
    places = draft_index(theirs.draft_ids.cpu(), facts.vocab_size)[ours.draft_ids.cpu()]  # type: ignore[union-attr, operator]
    if bool((places < 0).any()):
        raise NotExportable("the export cannot draft every token", got=f"{int((places < 0).sum())} tokens missing")
    for mine, other in zip(*pair, strict=True):
        largest = max(largest, float((mine - other[..., places]).abs().max()))
    return largest


def _states(head: Head) -> tuple[int, ...]:
    return head.config.states  # type: ignore[union-attr, return-value]


def _table(table: Tensor | None, shape: tuple[int, int]) -> Tensor:
    made = torch.randn(shape)
    return made if table is None else table.detach().cpu().float()


def _logits(head: Head, embeddings: Tensor, rows: Tensor, states: Tensor, tokens: Tensor) -> list[Tensor]:
    """Of every step (EAGLE) or of every head (Medusa). [B, T, Vd] each."""
    head = copy.deepcopy(head).cpu().float()
    if isinstance(head, MedusaHead):
        head.attach(embeddings, rows)
        return [head.logits(head.foresee(states, one), one) for one in range(head.config.num_heads)]
    assert isinstance(head, EagleHead)
    head.attach(embeddings, rows)
    positions = torch.arange(_LENGTH).expand(_BATCH, -1)
    hidden, found = head.begin(states), list[Tensor]()
    for step in tokens:
        hidden = head(step, hidden, positions, _causal)
        found.append(head.logits(hidden))
    return found


def _causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
