"""Putting an adapter on: over quantised layers, beside drafts of the same target, refused where it does not fit."""

import copy
from functools import cache

import pytest
import torch
from torch import nn

from paceline import Coupled, SelfQuantized
from paceline.core.draft import Draft
from paceline.core.interfaces import DraftBudget
from paceline.core.request import SamplingParams
from paceline.core.tree import TokenTree
from paceline.engine.contract import check_contract
from paceline.errors import ConfigError, DraftError, IncompatibleModels
from paceline.kernels import library
from paceline.methods.space.adapter import SpaceAdapter, SpaceConfig
from paceline.target import LoadedModel, ModelRunner, wrap_model
from paceline.target.adapters import share_copy
from paceline.target.corrections import AdaptedLinear, Corrections
from paceline.target.load import with_weights
from tests.helpers import VOCAB, changed, on_torch, prompt, sequence
from tests.methods.space.common import LLAMA, adapter, hung_chain
from tests.methods.space.test_runner import read
from tests.tiny import tiny_model

K = 3
TEXT = prompt(11)
SIZES = {"intermediate_size": 64}  # all inputs divisible by 32, for INT4


@cache
def target(weights: str | None = None) -> LoadedModel:
    model = tiny_model("llama", **SIZES)
    if weights == "torch":
        return on_torch(model)
    loaded = wrap_model(model)
    return with_weights(loaded, weights)[0] if weights else loaded


@cache
def on() -> SpaceAdapter:
    return adapter("llama", K, **SIZES)


class Everywhere(nn.Module):
    """A layer with W + b a for all rows."""

    def __init__(self, base: nn.Module, layer: int, name: str):
        super().__init__()
        self.base, factors = base, on().factors(layer, name)
        self.delta = factors.b @ factors.a

    def forward(self, x):
        return self.base(x) + x @ self.delta.T


def masks_alone(weights: str | None, text: list[int]) -> torch.Tensor:
    """The text in the cache of the plain target, then a pass of masks over a model with corrections everywhere."""
    plain = ModelRunner(target(weights), 1)

    def change(model):
        model.set_input_embeddings(nn.Embedding.from_pretrained(on().masks))
        for index, layer in enumerate(model.base_model.layers):
            for name in LLAMA:
                layer.set_submodule(name, Everywhere(layer.get_submodule(name), index, name))

    other = plain.sharing_cache(change)
    slot = read(plain, text)[0]
    return other.forward([slot], TokenTree.chain([list(range(K))]))[0]


@pytest.mark.parametrize("weights", [None, "torch", "int8", "int4"])
def test_packed_and_quantised_targets(weights):
    runner, without = ModelRunner(target(weights), 1), ModelRunner(target(weights), 1)
    runner.attach_adapter(on())
    tree = hung_chain([[5, 9]], [K])
    logits = runner.forward(read(runner, TEXT), tree)[0]
    for node in range(2):
        expected = masks_alone(weights, [*TEXT, *[5, 9][: node + 1]])
        error = (logits[2 + node * K : 2 + (node + 1) * K] - expected).abs().max() / expected.std()
        assert error < (0.02 if weights == "int4" else 1e-3)  # INT4 products read bfloat16, where a hair is a step
    plain = changed(tree, token_ids=tree.token_ids.where(~tree.is_probe, 0).tolist())
    assert torch.equal(without.forward(read(without, TEXT), plain)[0, :2], logits[:2])


def gated_in(model: nn.Module) -> int:
    return sum(isinstance(module, AdaptedLinear) for module in model.modules())


@pytest.mark.parametrize("first", ["attach", "draft"])
def test_a_self_draft_of_the_same_target(first):
    """In both orders of binding: the draft drafts as without an adapter, the target's masks are as without a draft."""
    alone, beside, free = (ModelRunner(target(), 1) for _ in range(3))
    alone.attach_adapter(on())
    draft, lone = SelfQuantized(lm_head="shared"), SelfQuantized(lm_head="shared")
    lone.bind(free, Coupled())
    if first == "attach":
        beside.attach_adapter(on())
    draft.bind(beside, Coupled())
    beside.attach_adapter(on())
    tree, chain = hung_chain([[5, 9]], [K]), TokenTree.chain([[5, 9, 31]])
    slots = [read(runner, TEXT) for runner in (alone, beside, free)]
    own, theirs = draft._runner, lone._runner
    assert gated_in(own.loaded.model) == own.num_masks == 0
    for _ in range(2):  # one after another on one cache
        assert torch.equal(beside.forward(slots[1], tree), alone.forward(slots[0], tree))
        assert torch.equal(own.forward(slots[1], chain), theirs.forward(slots[2], chain))


def test_copies_have_a_gate_of_their_own():
    runner = ModelRunner(target("torch"), 1)
    runner.attach_adapter(on())
    assert gated_in(runner.loaded.model) == 2 * len(LLAMA)
    assert gated_in(target().model) == 0  # another runner's model is not touched
    assert gated_in(share_copy(runner.loaded.model)) == 0
    copied = copy.deepcopy(runner.loaded.model)
    corrected = {id(module.corrected) for module in copied.modules() if isinstance(module, AdaptedLinear)}
    assert len(corrected) == 1
    assert id(runner.loaded.decoder.corrected) not in corrected
    assert runner.loaded.with_model(copied).attached is None
    again = ModelRunner(runner.loaded, 1)  # a runner of a model with an adapter has it too
    assert again.num_masks == K
    before = {name: p.clone() for name, p in on().named_parameters()}
    slot, tree = read(runner, TEXT)[0], hung_chain([[5]], [K])
    logits = runner.forward([slot], tree)
    changed = adapter("llama", K, **SIZES)
    other = ModelRunner(target("torch"), 1)
    other.attach_adapter(changed)
    changed.masks.add_(1)  # as training would: what is attached is a copy
    assert torch.equal(other.forward(read(other, TEXT), tree), logits)
    assert all(torch.equal(p, before[name]) for name, p in on().named_parameters())


def test_one_adapter_at_a_time():
    runner = ModelRunner(target("torch"), 1)
    assert runner.num_masks == 0
    runner.attach_adapter(on())
    runner.attach_adapter(on())
    assert runner.num_masks == K
    runner.attach_adapter(adapter("llama", K, **SIZES))  # the same weights, read again
    with pytest.raises(ConfigError, match=r"another SPACE adapter[\s\S]*make another LLM"):
        runner.attach_adapter(adapter("llama", K, seed=1, **SIZES))
    assert gated_in(runner.loaded.model) == 2 * len(LLAMA)


@pytest.mark.parametrize("weights", ["masks", "factors"])
def test_an_adapter_that_changed_is_noticed(weights):
    """Nothing is drafted from weights of yesterday without a word."""
    runner, given = ModelRunner(target(), 1), adapter("llama", K, **SIZES)
    runner.attach_adapter(given)
    changed = given.masks if weights == "masks" else given.factors(1, "mlp.down_proj").b
    before = changed.clone()
    changed[0, 0] += 1
    with pytest.raises(ConfigError, match=r"attached SPACE adapter was changed[\s\S]*make another LLM"):
        runner.attach_adapter(given)
    changed.copy_(before)
    runner.attach_adapter(given)
    changed[0, 0] = float("nan")
    other = ModelRunner(target(), 1)
    for _ in range(2):
        other.attach_adapter(given)  # what is broken is the same again too


def test_what_raises_leaves_the_runner_as_it_was():
    runner = ModelRunner(target(), 1)

    def wears_and_fails() -> None:
        with runner.restored_on_error():
            runner.attach_adapter(on())
            raise KeyError

    with pytest.raises(KeyError):
        wears_and_fails()
    assert runner.num_masks == gated_in(runner.loaded.model) == 0
    with runner.restored_on_error():
        runner.attach_adapter(on())
    assert runner.num_masks == K


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (lambda: adapter("gpt_neox", K), "attention.query_key_value"),
        (lambda: adapter("llama", K, hidden_size=64), "hidden size"),
        (lambda: adapter("llama", K, num_hidden_layers=1), "number of layers"),
        (lambda: adapter("llama", K, intermediate_size=96), "mlp.gate_proj"),
    ],
)
def test_what_does_not_fit_is_named(given, named):
    runner = ModelRunner(target(), 1)
    with pytest.raises(IncompatibleModels, match=named):
        runner.attach_adapter(given())
    assert runner.num_masks == gated_in(runner.loaded.model) == 0


def test_linears_that_are_not_linear_layers_are_named():
    runner = ModelRunner(wrap_model(tiny_model("gpt2")), 1)
    with pytest.raises(IncompatibleModels, match=r"attn\.c_attn"):
        runner.attach_adapter(adapter("gpt2", K, linears=("attn.c_attn",)))


def test_an_error_in_a_pass_leaves_the_gate_closed(monkeypatch):
    runner = ModelRunner(target(), 1)
    runner.attach_adapter(on())
    slot, chain = read(runner, TEXT)[0], TokenTree.chain([[5, 9]])
    before = runner.forward([slot], chain)
    with monkeypatch.context() as patch:
        patch.setattr(library, "run", lambda *_: (_ for _ in ()).throw(RuntimeError("in the middle")))
        with pytest.raises(RuntimeError, match="in the middle"):
            runner.forward([slot], hung_chain([[5]], [K]))
    assert runner.loaded.attached.rows is None
    assert torch.equal(runner.forward([slot], chain), before)


def test_factors_that_see_other_rows_than_the_pass_are_refused():
    runner = ModelRunner(target("torch"), 1)
    runner.attach_adapter(on())
    layer = runner.loaded.model.base_model.layers[0].self_attn.o_proj
    takes = (hung_chain([[5]], [K]).token_ids >= VOCAB).int()
    with (
        runner.loaded.decoder.corrected.by(Corrections(takes, [runner.loaded.attached.low_rank])),
        pytest.raises(IncompatibleModels, match="row"),
    ):
        layer(torch.zeros(2, 32))


Row = list[tuple[int, int, bool]]
GOOD: Row = [(7, 0, False), (VOCAB, 0, True), (VOCAB + 1, 2, True), (VOCAB, 1, True)]
BAD: dict[str, Row] = {
    "drafted a mask token": [(VOCAB, 0, False)],
    "outside the vocabulary": [(VOCAB, 0, True), (VOCAB + 1, 1, True), (VOCAB + 2, 2, True)],
    "misplaced mask 1": [(VOCAB + 1, 0, True)],
    "misplaced mask 0": [(VOCAB, 0, True), (VOCAB, 1, True)],
    "a candidate follows": [(VOCAB, 0, True), (7, 0, False)],
    "too many tokens": [(5, 0, False), (VOCAB, 0, True), (VOCAB + 1, 2, True), (VOCAB, 1, True), (VOCAB + 1, 4, True)],
}


def check(row: Row, num_masks: int) -> None:
    tokens, parents = [3, *[n[0] for n in row]], [-1, *[n[1] for n in row]]
    tree = TokenTree.from_lists([tokens], [parents], probes=[[False, *[n[2] for n in row]]])
    seq = sequence(target(), [4, 3], SamplingParams())
    check_contract(Draft(tree, source="tested"), [seq], [DraftBudget(4, 4)], VOCAB, num_masks)


def test_the_contract_takes_masks_where_they_belong():
    check(GOOD, 2)
    with pytest.raises(DraftError, match="tested drafted a token outside the vocabulary"):
        check(GOOD, 0)  # nothing is attached


@pytest.mark.parametrize("message", BAD)
def test_the_contract_refuses(message):
    with pytest.raises(DraftError, match=message):
        check(BAD[message], 2)


def test_an_expert_is_not_corrected():
    runner = ModelRunner(wrap_model(tiny_model("qwen3_moe")), 1)
    config = SpaceConfig(32, 2, VOCAB, K, False, 4, ("mlp.experts.1.up_proj",), ((24, 32),), 0)
    with pytest.raises(
        IncompatibleModels, match=r"up_proj of model.layers.0.mlp.experts.1.*not all rows.*without this layer"
    ):
        runner.attach_adapter(SpaceAdapter(config))
