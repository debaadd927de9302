"""Answers as training data: the right state at the right column, an order that depends on nothing else, no leaks."""

from dataclasses import replace

import pytest
import torch

from paceline.errors import ConfigError
from paceline.methods.eagle.recipe import EagleRecipe
from paceline.target import wrap_model
from paceline.train.config import RunConfig
from paceline.train.data import Answers, online_states
from tests.helpers import loaded
from tests.tiny import tiny_model
from tests.train.toy import LAYERS, write_answers


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("answers")
    return [write_answers(base / str(i), part=(i, 2)) for i in range(2)]


def states_are_aligned(answers: Answers, shift: int = 0) -> bool:
    """Every stored state is the one plain transformers has at that column, and padding is zero."""
    model = tiny_model("llama")
    for batch_of in answers.plan(64, 0, 0):
        batch = answers.batch(batch_of, LAYERS, 64)
        for row, index in enumerate(batch_of):
            one = answers.all[index]
            ids = torch.tensor([one.prompt_ids + one.answer_ids])
            assert batch.token_ids[row, : one.length].tolist() == ids[0].tolist()
            assert batch.is_answer[row].sum() == len(one.answer_ids)
            assert batch.is_answer[row, len(one.prompt_ids)]
            with torch.no_grad():
                got = model(ids, output_hidden_states=True).hidden_states
            for layer in LAYERS:
                held = batch.states[layer][row].float()
                want = got[layer][0].clone()
                want[-1] = 0
                want = torch.roll(want, shift, 0)
                if held[one.length :].any() or not torch.allclose(held[: one.length], want, rtol=0.02, atol=0.02):
                    return False
    return True


def test_states_are_at_their_tokens(folders):
    answers = Answers.read(folders)
    assert len(answers) == 24
    assert states_are_aligned(answers)
    assert not states_are_aligned(answers, shift=1), "the test sees a shift by one"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # native passes, and those of torch
def test_online_states_are_the_stored_ones(folders, dtype):
    answers, target = Answers.read(folders), wrap_model(tiny_model("llama").to(dtype))
    assert target.is_native == (dtype == torch.float32)
    for indices in answers.plan(200, 0, 0):
        stored = answers.batch(indices, LAYERS, 200)
        again = online_states(target, stored, LAYERS)
        for layer in LAYERS:
            assert torch.allclose(stored.states[layer].to(dtype), again.states[layer], rtol=0.02, atol=0.02)
            off_by_one = torch.roll(again.states[layer], 1, 1)
            assert not torch.allclose(stored.states[layer].to(dtype), off_by_one, rtol=0.02, atol=0.02)


def test_recipes_measure_states_that_are_computed_again(folders):
    config = RunConfig(model="tiny", out="runs", head={"states": [1, 2]})
    stored = Answers.read(folders)
    bare = Answers(replace(one, states=None) for one in stored.all)
    plan = EagleRecipe.plan("eagle3", config, loaded())
    scales = [next(iter(EagleRecipe.build(plan, answers).input_scales.values())) for answers in (stored, bare)]
    torch.testing.assert_close(*scales, rtol=0.02, atol=0.02)


def test_plan(folders):
    answers = Answers.read(folders)
    for budget in (24, 64, 500):
        plan = answers.plan(budget, seed=3, epoch=0)
        assert sorted(i for batch in plan for i in batch) == list(range(len(answers)))
        assert all(len(b) == 1 or len(b) * max(answers.all[i].length for i in b) <= budget for b in plan)
        assert plan == Answers.read(folders[::-1]).plan(budget, seed=3, epoch=0), "folders in any order"
        assert plan != answers.plan(budget, seed=3, epoch=1) != answers.plan(budget, seed=4, epoch=1) or budget == 500


def test_cut(folders):
    answers = Answers.read(folders).fitting(12)
    assert all(len(one.prompt_ids) < 12 for one in answers.all)
    indices = list(range(len(answers)))
    batch = answers.batch(indices, LAYERS, 12)
    assert batch.token_ids.shape[1] == 12
    assert batch.is_answer.sum() == sum(min(one.length, 12) - len(one.prompt_ids) for one in answers.all)
    assert batch.states[1].shape[:2] == batch.token_ids.shape


def test_prompts_count_as_answers_behind_what_they_share(folders):
    template = (5, 6, 7)
    read = [replace(one, prompt_ids=template + one.prompt_ids, states=None) for one in Answers.read(folders).all]
    answers = Answers(read)
    indices = list(range(len(answers)))
    alone, both = (answers.batch(indices, (), 64, prompts=prompts).is_answer for prompts in (False, True))
    for row, one in enumerate(answers.all):
        columns = both[row].nonzero().flatten().tolist()
        assert columns == list(range(3, one.length)), "neither the template nor padding"
        assert alone[row].nonzero().flatten().tolist() == columns[len(one.prompt_ids) - 3 :]


def test_held_out_prompts_are_never_trained_on(folders):
    answers = Answers.read([folders[0], folders[0], folders[1]])  # answers to one prompt come more than once
    training, held_out = answers.split(0.4)
    assert len(training) + len(held_out) == len(answers)
    assert training.all
    assert held_out.all
    assert not {one.prompt_ids for one in training.all} & {one.prompt_ids for one in held_out.all}
    again, _ = Answers.read(folders[:1]).split(0.4)
    assert {a.prompt_ids for a in again.all} <= {a.prompt_ids for a in training.all}, "more data moves none across"


def test_limits_nest(folders):
    answers = Answers.read(folders)
    taken = [{one.prompt_ids for one in answers.limited(n).all} for n in (3, 10, 24, 100)]
    assert [len(t) for t in taken] == [3, 10, 24, 24]
    assert taken[0] < taken[1] < taken[2] == taken[3]


def test_growing_folder(folders, tmp_path):
    lines = (folders[0] / "answers.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "answers.jsonl").write_bytes(b"".join(lines[:5]) + lines[5][:20])
    assert len(Answers.read(tmp_path)) == 5, "the line in the making is left out"
    assert len(Answers.read(tmp_path, {str(tmp_path): 3})) == 3
    (tmp_path / "answers.jsonl").write_bytes(lines[0][:20])
    with pytest.raises(ConfigError, match="no answers"):
        Answers.read(tmp_path)


def test_missing_layer_is_reported(folders):
    answers = Answers.read(folders)
    with pytest.raises(ConfigError, match=r"states of layer 7.*online"):
        answers.batch([0], (7,), 64)


def test_text_alone(tmp_path):
    answers = Answers.read(write_answers(tmp_path, count=4, layers=()))
    assert not answers.has_states
    batch = answers.batch([0, 1], LAYERS, 64)
    assert not batch.states
    assert set(online_states(loaded(), batch, LAYERS).states) == set(LAYERS)
