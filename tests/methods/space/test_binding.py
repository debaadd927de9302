"""SPACE's transition, what it costs and promises, and which adapters are taken."""

import pytest
import torch

from paceline import Plain, Ratio, SamplingParams
from paceline.core.interfaces import DraftBudget
from paceline.errors import ConfigError, IncompatibleModels
from paceline.methods import Medusa, Space
from paceline.methods.heads.folder import save_head
from paceline.methods.parallel.head import MedusaConfig, MedusaHead
from paceline.methods.space import drafter as space
from paceline.methods.space.adapter import SpaceAdapter, SpaceConfig
from paceline.target import ModelRunner
from paceline.verify import Coupled
from tests.helpers import REPEATING, VOCAB, Budgets, loaded, memoryless, sequence
from tests.methods.space.common import adapter
from tests.methods.space.foresight import accepted, knowing_transition

V = VOCAB


def bound(given: SpaceAdapter, top_k: int):
    """A drafter, its runner, and a sequence that was admitted."""
    on = ModelRunner(loaded(), 1)
    drafter = Space(given, top_k)
    drafter.bind(on, Coupled())
    seq = sequence(on.loaded, REPEATING, SamplingParams(max_tokens=12))
    seq.slot = on.admit(seq.token_ids)
    return drafter, on, seq


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("ngrams", [True, False])
def test_what_followed_the_same_tokens_is_drafted_first(ngrams, rank):
    on, text = ModelRunner(loaded(), 1), [60, 61, 95] * 4
    drafter = Space(adapter(transition_rank=rank), 1, ngrams=ngrams)
    drafter.bind(on, Coupled())
    seq = sequence(on.loaded, text, SamplingParams(max_tokens=12))
    seq.slot = on.admit(text)
    logits = torch.zeros(2, V).index_fill(1, torch.tensor([7]), 2.0)  # the masks would draft 7
    drafter._predicted[seq.slot] = space._Predicted(seq, len(text), logits)
    tokens = drafter.propose([seq], [DraftBudget(2, 2)]).tree.token_ids[0].tolist()
    assert (tokens[:3] == [95, 60, 61]) == ngrams
    drafter._predicted.clear()
    tokens = drafter.propose([seq], [DraftBudget(2, 4)]).tree.token_ids[0].tolist()
    assert (tokens[:3] == [95, 60, 61]) == ngrams, "where no mask has predicted anything"
    assert tokens[-2:] == [V, V + 1]


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.5])
def test_a_transition_that_knows_is_accepted_whole(temperature, monkeypatch):
    """With the noise of the position shared, sampled tokens are predicted like the most probable ones."""
    monkeypatch.setattr(space, "SHORTLIST", V)  # these masks say nothing, so that their best are any
    params = SamplingParams(temperature=temperature, max_tokens=31)
    counts = accepted(ModelRunner(memoryless(), 1), Space(knowing_transition(), 1), Budgets(depth=4, nodes=24), params)
    assert set(counts) == {4}
    wide = accepted(ModelRunner(memoryless(), 1), Space(knowing_transition(), 3), Budgets(depth=4, nodes=499), params)
    assert sum(wide) / len(wide) > 3.0  # the best three of a level are not always the right path


@pytest.mark.parametrize("node", [lambda tree, seq: 0, lambda tree, seq: seq.token_ids[-2]])
def test_a_transition_from_another_token_is_noticed(node, monkeypatch):
    monkeypatch.setattr(space, "SHORTLIST", V)
    real = Space._children

    def other(self, logits, seqs, level, before):
        return real(
            self, logits, seqs, level, [[node(None, seq)] * len(row) for seq, row in zip(seqs, before, strict=True)]
        )

    monkeypatch.setattr(Space, "_children", other)
    params = SamplingParams(temperature=0.8, max_tokens=31)
    counts = accepted(ModelRunner(memoryless(), 1), Space(knowing_transition(), 1), Budgets(depth=4, nodes=24), params)
    assert sum(counts) / len(counts) < 1.5


@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.6])
def test_the_corrected_law_written_out(temperature, coupled, monkeypatch):
    monkeypatch.setattr(space, "SHORTLIST", 20)
    drafter, on, seq = bound(adapter(num_masks=3, transition_rank=4), top_k=5)
    drafter.bind(on, Coupled() if coupled else Ratio())
    seq.params = SamplingParams(temperature=temperature)
    logits = 3 * torch.randn(1, V, generator=torch.Generator().manual_seed(1))
    tokens, logps = drafter._children(logits, [seq], 1, [[11, 50]])
    model = loaded().model
    heat = temperature if coupled else 0.0
    g = (
        space.TokenRanking(torch.arange(V), True).scores(torch.zeros(1, V), [seq], 1)[0] / temperature
        if heat
        else torch.zeros(V)
    )
    cool = max(1.0, temperature) if temperature and not coupled else 1.0
    for place, before in enumerate([11, 50]):
        e = model.get_input_embeddings().weight[before]
        a = on.loaded.attached.adapter
        inner = torch.nn.functional.silu(a.transition_in @ (e / e.square().mean().sqrt()))
        moved = model.get_output_embeddings().weight @ (a.transition_out @ inner)
        alone, both = logits[0] / cool + heat * g, (logits[0] + moved) / cool + heat * g
        short = alone.topk(20).indices
        probs = torch.full((V,), 0.0)
        probs[short] = alone.softmax(0)[short].sum() * both[short].softmax(0)
        best = probs.topk(5)
        assert tokens[0][place] == best.indices.tolist()
        assert torch.allclose(torch.tensor(logps[0][place]).exp(), best.values, atol=1e-5)


# Binding


def test_refusals():
    on = ModelRunner(loaded(), 1)
    with pytest.raises(ConfigError, match=r"Space\.top_k"):
        Space(adapter(), top_k=0)
    medusa = MedusaHead(MedusaConfig(32, (2,), V, V, 2))
    with pytest.raises(ConfigError, match=r"Space\.adapter.*MedusaHead"):
        Space(medusa).bind(on, Coupled())
    with pytest.raises(ConfigError, match=r"Medusa\.head.*SpaceAdapter"):
        Medusa(adapter()).bind(on, Coupled())
    for sizes in ((16, 2, V), (32, 3, V), (32, 2, V + 1)):
        with pytest.raises(IncompatibleModels, match="does not fit"):
            Space(SpaceAdapter(SpaceConfig(*sizes, 2))).bind(on, Coupled())
    soft = ModelRunner(loaded("gemma2"), 1)
    with pytest.raises(IncompatibleModels, match="final_logit_softcapping"):
        Space(SpaceAdapter(SpaceConfig(32, 2, V, 2, transition_rank=2))).bind(soft, Coupled())
    assert on.num_masks == soft.num_masks == 0  # nothing is put on that was refused
    Space(SpaceAdapter(SpaceConfig(32, 2, V, 2))).bind(soft, Coupled())  # the transition alone needs output rows


def test_one_adapter_serves_many_drafters(tmp_path):
    """A module, another of the same weights, a folder read twice; another adapter is refused."""
    on, given = ModelRunner(loaded(), 1), adapter(seed=4)
    drafter = Space(given)
    for one in (drafter, drafter, Space(given, 1), Space(adapter(seed=4))):
        one.bind(on, Coupled())
    with pytest.raises(ConfigError, match="another SPACE adapter"):
        Space(adapter(seed=5)).bind(on, Coupled())
    folder = save_head(tmp_path / "a", given, loaded(), {})
    read = ModelRunner(loaded(), 1)
    for _ in range(2):
        Space(folder).bind(read, Coupled())
    assert torch.allclose(read.loaded.attached.adapter.masks, given.masks, rtol=0.01)
    drafter.bind(ModelRunner(loaded("llama", torch.float64), 1), Coupled())  # in another precision
    assert drafter._adapter.masks.dtype == torch.float64


def test_draft_options():
    drafter, _, seq = bound(adapter(num_masks=3), 2)
    (look,) = drafter.draft_options(seq)
    assert (look.source, look.hint, look.uncached_tokens, look.branches, look.masks, look.ready) == (
        "space",
        0,
        0,
        3,
        3,
        0,
    )
    assert drafter.info.branches == 3
    assert not drafter.info.reads_states
    ((name, (token, reading)),) = drafter.seconds().items()
    assert (name, reading) == ("space", 0.0)
    assert token > 0
    bent, _, _ = bound(adapter(transition_rank=4), 2)
    assert bent.seconds()["space"][0] > 0
    assert Plain().draft_options(seq)[0].masks == 0
