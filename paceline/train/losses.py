"""Losses between the target's distribution p and the draft's q, averaged over the supervised tokens.

    cross entropy   - sum p log q                                gradient q - p: the default
    KL              sum p log (p / q)                            the same gradient, zero when learned
    TV              1/2 sum |p - q|  =  1 - sum min(p, q)        the rejection rate of sampled drafts
    LK              - log sum min(p, q)                          log of the acceptance rate (arXiv 2602.23881)
    LK hybrid       l KL + (1 - l) TV, l = exp(-3 a) at each     KL where the draft is far off, TV where it is near
                    place, a = sum min(p, q) there
    coupled         - log softmax(log q + g)[y] with Gumbel      softmax(log q + g) - 1[y], on average
                    noise g and y = argmax(log p + g)            E softmax(log q + g) - p

The coupled loss is the negative log-likelihood of the token that the target samples, given the noise that an exact
verifier shares with its drafters. softmax(log q + g) is the confidence by which they rank tokens (`heads.top_tokens`),
so at its minimum these are right on average, E softmax(log q + g) = p, and q itself is sharper than p.

p and q are over the Vd tokens that the head can draft; p is restricted to them and renormalised.
"""

from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

_Logits: TypeAlias = Float[Tensor, "T Vd"]
Loss: TypeAlias = Callable[[_Logits, _Logits], Float[Tensor, ""]]
"""(target's logits, head's logits) -> scalar."""


def _cross_entropy(target: _Logits, head: _Logits) -> Tensor:
    return nn.functional.cross_entropy(head, target.softmax(-1))


def _kl(target: _Logits, head: _Logits) -> Tensor:
    return nn.functional.kl_div(head.log_softmax(-1), target.log_softmax(-1), log_target=True, reduction="batchmean")


def _tv(target: _Logits, head: _Logits) -> Tensor:
    return (target.softmax(-1) - head.softmax(-1)).abs().sum(-1).mean() / 2


def _lk(target: _Logits, head: _Logits) -> Tensor:
    return -torch.minimum(target.softmax(-1), head.softmax(-1)).sum(-1).clamp_min(1e-8).log().mean()


def _lk_hybrid(target: _Logits, head: _Logits) -> Tensor:
    log_p, log_q = target.log_softmax(-1), head.log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    apart = (p * (log_p - log_q)).sum(-1)
    accepted = torch.minimum(p, q).sum(-1)
    weight = (-3 * accepted.detach()).exp()  # no gradient goes through it
    return (weight * apart + (1 - weight) * (1 - accepted)).mean()


def _coupled(target: _Logits, head: _Logits) -> Tensor:
    noise = -torch.empty_like(head, dtype=torch.float32).exponential_().log()  # not in 16 bits, which tie
    return nn.functional.cross_entropy(head + noise, (target + noise).argmax(-1))


LossName = Literal["ce", "kl", "tv", "lk", "lk_hybrid", "coupled"]
LOSSES: Mapping[str, Loss] = {
    "ce": _cross_entropy, "kl": _kl, "tv": _tv, "lk": _lk, "lk_hybrid": _lk_hybrid, "coupled": _coupled,
}  # fmt: skip


@torch.no_grad()
def compared(target: _Logits, head: _Logits) -> tuple[Tensor, Tensor]:
    """The acceptance rate of samples, 1 - TV, and whether the most likely tokens agree. [T] each."""
    accepted = torch.minimum(target.softmax(-1), head.softmax(-1)).sum(-1)
    return accepted, target.max(-1).indices == head.max(-1).indices  # argmax is four times slower in bfloat16
