"""Random heads for tiny targets, the slow form of what they compute, and a verifier that accepts as asked."""

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline.core.interfaces import DraftBudget, Drafter, DraftPolicy, Verifier
from paceline.core.request import SamplingParams, TokenSequence
from paceline.core.rng import Purpose, gumbel
from paceline.core.walk import Walk
from paceline.engine.loop import SpeculativeDecoder
from paceline.methods.dflash.head import DFlashHead
from paceline.methods.dspark.head import DSparkHead
from paceline.methods.eagle.head import EagleConfig, EagleHead
from paceline.methods.heads.context_ngrams import WEIGHT
from paceline.methods.parallel.head import BlockwiseConfig, BlockwiseHead, MedusaConfig, MedusaHead
from paceline.policy import Fixed
from paceline.target import LoadedModel, ModelRunner
from paceline.verify import Coupled
from tests.helpers import NO_EOS, admit, loaded, prompt, reading_apart, sequence
from tests.tiny import tiny_model

SOME = torch.arange(0, 97, 2)  # a draft vocabulary: the even tokens


def random_weights(head: nn.Module, std: float = 0.3, seed: int = 0) -> nn.Module:
    chance = torch.Generator().manual_seed(seed)
    for parameter in head.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=std, generator=chance)
    return head


def medusa(target: LoadedModel, heads: int = 3, ids: Tensor | None = None, **options: object) -> MedusaHead:
    ids = torch.arange(target.vocab_size) if ids is None else ids
    config = MedusaConfig(target.hidden_size, (target.num_layers,), len(ids), target.vocab_size, heads, **options)
    return random_weights(MedusaHead(config, ids)).to(target.dtype)


def blockwise(target: LoadedModel, heads: int = 3, ids: Tensor | None = None) -> BlockwiseHead:
    ids = torch.arange(target.vocab_size) if ids is None else ids
    config = BlockwiseConfig(target.hidden_size, (target.num_layers,), len(ids), target.vocab_size, heads, 40)
    return random_weights(BlockwiseHead(config, ids)).to(target.dtype)


def attached(head, target: LoadedModel):
    model = target.model
    return head.attach(model.get_input_embeddings().weight, model.get_output_embeddings().weight)


@cache
def _plain(dtype: torch.dtype) -> PreTrainedModel:
    return tiny_model("llama", dtype)


def last_states(target: LoadedModel, token_ids: list[int]) -> Tensor:
    """f_0 .. f_{T-1} of the default tiny target, from plain transformers. [T, E]."""
    return _last_states(target.dtype, tuple(token_ids))


@cache
def _last_states(dtype: torch.dtype, token_ids: tuple[int, ...]) -> Tensor:
    with torch.no_grad():
        return _plain(dtype)(torch.tensor([token_ids]), output_hidden_states=True).hidden_states[-1][0]


class Accepts(Verifier):
    """Takes the first so many nodes of each draft, whatever they are, then a made-up token."""

    name: ClassVar[str] = "accepts"
    lossless: ClassVar[bool] = False
    exact: ClassVar[bool] = True

    def __init__(self, counts: Iterable[int]):
        self._counts = itertools.cycle(counts)

    def verify(self, draft, target, seeds, positions):
        count = next(self._counts)
        drafted = [row.count(False) - 1 for row in draft.tree.lists.is_probe]
        return [
            Walk([*range(1, 1 + min(count, most))], (position * 7 + 3) % 90 + 3, most <= count)
            for most, position in zip(drafted, positions, strict=True)
        ]


def watched(
    drafter: Drafter,
    target: LoadedModel,
    prompts: list[list[int]],
    check,
    policy: DraftPolicy | None = None,
    counts: Iterable[int] = (0, 2, 1, 4, 3),
    rounds: int = 10,
    depth: int = 4,
    temperature: float = 0.0,
) -> None:
    """Decode with `Accepts`, calling check(seqs, budgets, draft) on every draft."""
    real = drafter.propose

    def propose(seqs, budgets):
        made = real(seqs, budgets)
        check(seqs, budgets, made)
        return made

    drafter.propose = propose
    decoder = SpeculativeDecoder(
        reading_apart(ModelRunner(target, 3)), drafter, Accepts(counts), policy or Fixed(depth, 12)
    )
    params = SamplingParams(temperature=temperature, max_tokens=200, ignore_eos=True)
    seqs = [TokenSequence(list(ids), params, 5 + n, NO_EOS, 250) for n, ids in enumerate(prompts)]
    for seq in seqs:
        admit(decoder, seq)
    for _ in range(rounds):
        decoder.step(seqs)
    for seq in seqs:
        decoder.release(seq)
    drafter.propose = real


BLOCKS = {
    "dflash": (DFlashHead, {}),
    "dspark": (DSparkHead, {"markov_rank": 32}),
    "jetspec": (DFlashHead, {"causal": True}),
}


def random_head(
    target: LoadedModel, version: int | str, seed: int = 0, draft_vocab: int = 60, **options: object
) -> EagleHead:
    """A head with large weights, so that its distributions differ clearly. It drafts some of the last tokens."""
    width, layers = target.hidden_size, target.num_layers
    torch.manual_seed(seed)
    ids = torch.arange(draft_vocab) + max(0, target.vocab_size - draft_vocab - 3)
    if version in BLOCKS:
        options = {"qk_norm": True, "num_hidden_layers": 2, **BLOCKS[version][1], **options}
        kind = BLOCKS[version][0]
        shape = kind.Config(
            width, options.pop("states", (1, 2)), draft_vocab, target.vocab_size, 48, 4, 2, 8, 7, 5, **options
        )
        head = kind(shape, ids).to(target.dtype)
    else:
        states = (0, 1, layers) if version == 3 else (layers,)
        config = EagleConfig(width, states, draft_vocab, target.vocab_size, 48, 4, 2, 8, version, width, **options)
        head = EagleHead(config, ids).to(target.dtype)
    for parameter in head.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.25)
    return head.eval()


def modules(target: LoadedModel, count: int) -> EagleHead:
    """Several MTP modules, as a checkpoint may bring them."""
    first, *later = (random_head(target, "mtp", seed, norm_output=True) for seed in range(count))
    first.later.extend(later)
    return first


@torch.inference_mode()
def states_of(model: PreTrainedModel, token_ids: Sequence[int], layers: Sequence[int]) -> Tensor:
    """The states of a text by plain transformers, [1, T, len(layers) E]."""
    out = model(torch.tensor([list(token_ids)]), output_hidden_states=True)
    return torch.cat([out.hidden_states[layer] for layer in layers], -1)


@torch.inference_mode()
def law_after(head: EagleHead, states: Tensor, token_ids: Sequence[int], path: Sequence[int]) -> Tensor:
    """Logits [Vd] of the token after `path`, itself drafted after `token_ids`: the whole head over all pairs.

    states: f_0 .. f_{T-2} or more, [1, T - 1, len(states) E]. `head` must be attached.
    """
    if isinstance(head, DSparkHead):
        return told(head, block_states(head, states, token_ids), [token_ids[-1], *path])
    if isinstance(head, DFlashHead):
        known = path if head.config.causal else ()
        return head.output(block_states(head, states, token_ids, known)[len(path)])
    known, mask = len(token_ids) - 1, head.config.mask_token_id
    hidden = head.begin(states[:, :known])
    if mask is not None:  # P-EAGLE: what was drafted is not read
        path = [mask] * len(path)
    for step in range(len(path) + 1):
        tokens = torch.tensor([[*token_ids[1:], *path[:step]]])
        positions = torch.arange(known + step)[None]
        out = head(tokens, hidden, positions, causal)
        made = out[:, -1:] if mask is None else head.begin(head.mask_hidden)[None]
        hidden = torch.cat([hidden, made], 1)
    return head.logits(out[0, -1])


def with_copies(
    law: dict[int, float], token_ids: Sequence[int], path: Sequence[int], weight: float
) -> dict[int, float]:
    """A law of the next token beside what followed the last two tokens of a path in the whole text."""
    context, law, total = [*token_ids, *path][-2:], dict(law), 1.0
    for place in range(2, len(token_ids) if weight > 0 else 0):
        if list(token_ids[place - 2 : place]) == context:
            law[token_ids[place]] = law.get(token_ids[place], 0.0) + weight
            total += weight
    return {token: prob / total for token, prob in law.items()}


def told(head: DSparkHead, hidden: Tensor, tokens: Sequence[int]) -> Tensor:
    """Logits [Vd] of the row after these tokens, each of which stands before one row: DSpark's equations."""
    markov, rank, state = head.markov_head, head.config.markov_rank, torch.zeros(head.config.markov_rank)
    state = state.to(hidden)
    for row, token in zip(hidden, tokens, strict=False):
        weight = markov.markov_w1.weight
        e = weight[token] if head.config.own_tables else weight @ head._embeddings[token]
        if markov.kind == "vanilla":
            z = e
        elif markov.kind == "gated":
            z = torch.sigmoid(markov.gate_proj.weight @ torch.cat([row, e]) + markov.gate_proj.bias) * e
        else:
            made = markov.joint_proj.weight @ torch.cat([state, e, row]) + markov.joint_proj.bias
            kept, z = torch.sigmoid(made[:rank]), torch.tanh(made[2 * rank :])
            state = kept * state + (1 - kept) * torch.tanh(made[rank : 2 * rank])
    bias = markov.markov_w2.weight @ z
    if len(tokens) == 1 and not head.config.tells_first:
        return head.output(row)
    return head.output(row) + bias if head.config.own_tables else head.output(row + bias)


def block_of(head: DFlashHead, states: Tensor, token_ids: Sequence[int], path: Sequence[int] = ()) -> Tensor:
    """Logits [B - 1, Vd] after each row of a block but the last, see `block_states`."""
    return head.output(block_states(head, states, token_ids, path))


def block_states(head: DFlashHead, states: Tensor, token_ids: Sequence[int], path: Sequence[int] = ()) -> Tensor:
    """The normed states of the rows of a block that draft [D, E]: layer by layer, each query beside all that it sees.

    path: what is known of the block, in the place of its first masks.
    """
    known, c = len(token_ids) - 1, head.config
    tokens = torch.tensor([token_ids[-1], *path, *[c.mask_token_id] * (c.block_size - 1 - len(path))])
    order = torch.arange(known + c.block_size)
    unseen = (order > order[known:, None]) & c.causal
    hidden = head._embeddings[tokens].to(states.dtype)
    read = head.hidden_norm(head.fc(states[0, :known]))
    cos, sin = (part[0, 0] for part in head.rotation(torch.arange(known + c.block_size)[None]))

    def turned(x: Tensor, begin: int) -> Tensor:  # [N, H, d]
        a, b = x.chunk(2, -1)
        rows = slice(begin, begin + len(x))
        return x * cos[rows, None] + torch.cat([-b, a], -1) * sin[rows, None]

    for layer in head.layers:
        attention, x = layer.self_attn, layer.input_layernorm(hidden)
        rows = torch.cat([read, x])
        query, key, value = (
            project(y).unflatten(-1, (-1, c.head_dim))
            for project, y in ((attention.q_proj, x), (attention.k_proj, rows), (attention.v_proj, rows))
        )
        query, key = turned(attention.q_norm(query), known), turned(attention.k_norm(key), 0)
        groups = c.num_attention_heads // c.num_key_value_heads
        scores = [
            (query[:, h] @ key[:, h // groups].T * c.head_dim**-0.5).masked_fill(unseen, -torch.inf)
            for h in range(c.num_attention_heads)
        ]
        out = torch.stack([torch.softmax(one, -1) @ value[:, h // groups] for h, one in enumerate(scores)], 1)
        hidden = hidden + attention.o_proj(out.flatten(1))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return head.norm(hidden[-c.num_speculative_tokens :])


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention to what came before, written out."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, float("-inf")).softmax(-1) @ value


# The confidences of EAGLE and DFlash

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
MASKS = {"mask_token_id": 7, "num_speculative_tokens": 4}
WIDE = DraftBudget(depth=4, nodes=14)


def target(dtype=torch.float64):
    """In float64 heads run in torch, as on CUDA; in float32 in the native library."""
    return loaded("llama", dtype)


def differing(
    drafter, head, lengths=(9, 2), temperature=0.0, budget=WIDE, rounds=4, verifier=None, pause=1
) -> list[str]:
    """The nodes of some rounds, with rejections in between, whose confidence is not that of the slow form.

    The second sequence joins late and now and then sits out a round; between any two nothing is drafted for `pause`
    steps.
    """
    dtype = head.fc.weight.dtype
    model, on = tiny_model("llama", dtype), target(dtype)
    drafting = Fixed(budget.depth, budget.nodes)
    decoder = SpeculativeDecoder(reading_apart(ModelRunner(on, 3)), drafter, verifier or Coupled(), drafting)
    assert drafter.layer.is_native == (dtype is torch.float32)
    exact = {"rel_tol": 1e-4, "abs_tol": 1e-7} if dtype is torch.float64 else {"rel_tol": 5e-3, "abs_tol": 1e-5}
    head.attach(model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    params = SamplingParams(temperature=temperature, max_tokens=60)
    texts = [[(60, 61, 95)[token % 3] for token in prompt(length, length)] for length in lengths]  # the head lacks 95
    seqs = [sequence(on, ids, params, seed=len(ids)) for ids in texts]
    for seq in seqs:
        admit(decoder, seq)
    wrong, spans = list[str](), {seq.seed: (0, 0) for seq in seqs}  # the first pair that each cache holds, and its end
    shared = (verifier or Coupled()).exact
    for count in range(rounds):
        for policy in (drafting, *[Fixed(0)] * pause) if count else ():
            decoder.policy = policy
            decoder.step(batch)
        batch = seqs if count % 3 else seqs[:1]
        with torch.inference_mode():
            draft = drafter.propose(batch, [budget] * len(batch))
        for row, seq in enumerate(batch):
            (begin, end), pairs = spans[seq.seed], len(seq.token_ids) - 1
            begin = pairs - head.config.window if pairs - end > (head.config.window or pairs) else begin
            spans[seq.seed] = begin, pairs
            known = seq.token_ids[begin:]
            states = states_of(model, seq.token_ids, head.config.states)[:, begin:]
            for node in range(1, draft.tree.num_nodes):
                if bool(draft.tree.is_probe[row, node]):
                    continue
                *path, token = draft.tree.token_ids[row, draft.tree.rows[row].path_to(node)].tolist()
                logits = law_after(head, states, known, path)
                if shared:
                    place = torch.tensor([[len(seq.token_ids) + len(path)]])
                    noise = gumbel(torch.tensor([seq.seed]), place, Purpose.TARGET, on.vocab_size)[0, 0]
                    logits = logits + temperature * noise[head.draft_ids]
                else:
                    logits = logits / max(1.0, temperature)
                best = logits.softmax(-1).topk(min(drafter.top_k, len(logits)))
                law = dict(zip(head.draft_ids[best.indices].tolist(), best.values.tolist(), strict=True))
                law = with_copies(law, seq.token_ids, path, WEIGHT * (1 - temperature))
                want, got = law.get(token, 0.0), float(draft.confidence[row, node])
                is_best = path or drafter.tree != "chain" or want == max(law.values())
                if not is_best or not math.isclose(want, got, **exact):
                    wrong.append(f"round {count} row {row} node {node} {[*path, token]}: {got}, not {want}; {is_best=}")
    for seq in seqs:
        decoder.release(seq)
    return wrong
