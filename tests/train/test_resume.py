"""A run that was killed and goes on ends with the bits of one that was not."""

import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch

from paceline.errors import ConfigError, NumericsError
from paceline.train import loop
from paceline.train.config import TrainConfig
from paceline.train.data import Answers
from paceline.train.log import Evaluated, Finished, Started, Stepped, read_log
from paceline.train.recipe import Batch, Losses
from tests.train.toy import Toy, same, trained, weights, write_answers

CONFIG = TrainConfig(
    epochs=3, max_tokens=64, held_out=0.2, checkpoint_seconds=0.0, log_every=3, evaluate_every=4, weight_decay=0.1,
    optimizer="muon", lr=3e-3,
)  # fmt: skip


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return Answers.read(write_answers(tmp_path_factory.mktemp("answers")))


def run(answers, folder: Path, config=CONFIG, until: int | None = None, recipe=None):
    recipe = recipe or Toy()
    return recipe, trained(recipe, answers, config, folder, until)


@pytest.fixture(scope="module")
def straight(answers, tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    recipe, events = run(answers, folder)
    return weights(recipe), read_log(folder), events[0].steps


def got(log):
    return [{key: value for key, value in line.items() if key != "tokens_per_s"} for line in log]


@pytest.mark.parametrize("steps", [(1,), (5, 6), (13,)])
def test_resumed_run_has_the_same_bits(answers, straight, tmp_path, steps):
    for until in steps:
        run(answers, tmp_path, until=until)
        torch.manual_seed(99)  # another process
        assert len(list(tmp_path.glob("checkpoint-*"))) <= 2
    recipe, events = run(answers, tmp_path, recipe=Toy(seed=5))
    assert events[0].resumed
    assert same(weights(recipe), straight[0])
    assert got(read_log(tmp_path)) == got(straight[1])


@pytest.mark.parametrize("forgotten", ["random", "optimizer", "position"])
def test_forgetful_checkpoint_is_noticed(answers, straight, tmp_path, forgotten):
    run(answers, tmp_path, until=5)
    state = torch.load(max(tmp_path.glob("checkpoint-*.pt")), weights_only=True)
    if forgotten == "random":
        state["random"][0]["torch"] = torch.Generator().get_state()
    elif forgotten == "optimizer":
        state["optimizer"]["state"] = {}
    else:
        state["step"] -= 1
    torch.save(state, tmp_path / "checkpoint-00000005.pt")
    recipe, _ = run(answers, tmp_path)
    assert not same(weights(recipe), straight[0])


class Killed(Toy):
    def loss(self, batch):
        if len(self.seen) > 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(batch)


Killed.__name__ = "Toy"  # a checkpoint names its recipe


def test_killed_process(answers, straight, tmp_path):
    """Forked where it can be: a process of its own takes seconds to import torch."""
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
    process = context.Process(target=run, args=(answers, tmp_path), kwargs={"recipe": Killed()})
    process.start()
    process.join(300)
    assert process.exitcode == -signal.SIGKILL
    assert list(tmp_path.glob("checkpoint-*.pt"))
    (tmp_path / ".checkpoint-99999999.pt.1.part").write_bytes(b"half")  # killed while writing
    recipe, events = run(answers, tmp_path)
    assert events[0].resumed
    assert same(weights(recipe), straight[0])


def test_events_and_log(answers, straight, tmp_path):
    recipe, events = run(answers, tmp_path)
    started, last = events[0], events[-1]
    assert isinstance(started, Started)
    assert isinstance(last, Finished)
    assert last.tokens == 3 * started.data["tokens"]
    stepped = [e for e in events if isinstance(e, Stepped)]
    assert [e.step for e in stepped][-1] == started.steps
    assert stepped[-1].loss < stepped[0].loss, "it learns"
    evaluated = [e for e in events if isinstance(e, Evaluated)]
    assert [e.step for e in evaluated] == sorted({*range(4, started.steps, 4), started.steps})
    first, second = evaluated[-1].agreement
    assert evaluated[-1].accepted_length == pytest.approx(1 + first + first * second)
    lines = read_log(tmp_path)
    assert [line["event"] for line in lines].count("evaluation") == len(evaluated)
    again, events = run(answers, tmp_path)
    assert [type(e) for e in events] == [Started, Finished], "nothing is left to do"
    assert same(weights(again), weights(recipe))


def test_other_run_is_refused(answers, tmp_path):
    run(answers, tmp_path, until=2)
    with pytest.raises(ConfigError, match=r"other settings(.|\n)*lr: (.|\n)*delete"):
        run(answers, tmp_path, TrainConfig(epochs=3, max_tokens=64, lr=1e-3))
    with pytest.raises(ConfigError, match="answers: "):
        run(answers.limited(12), tmp_path)
    path = max(tmp_path.glob("checkpoint-*.pt"))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ConfigError, match="delete it"):
        run(answers, tmp_path)


def test_gradient_does_not_depend_on_how_batches_are_spread(answers, tmp_path, monkeypatch):
    """Two accumulated batches make the step that both together would make: each answer token counts alike."""
    monkeypatch.setattr(loop, "cpu_flags", tuple)  # in float32
    quiet = Toy()
    quiet.module.eval()

    class Silent(Toy):
        def loss(self, batch):
            self.module.eval()
            return super().loss(batch)

    ends = []
    for name, most, accumulate in (("one", 10_000, 1), ("many", 64, 1000)):
        config = TrainConfig(epochs=2, max_tokens=most, accumulate=accumulate, held_out=0.0)
        recipe, events = run(answers, tmp_path / name, config, recipe=Silent())
        assert events[0].steps == 2
        ends.append(weights(recipe))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*ends, strict=True))


def test_loss_that_is_not_finite_stops_the_run(answers, tmp_path):
    class Broken(Toy):
        def loss(self, batch):
            losses = super().loss(batch)
            return Losses(losses.total * float("nan"), losses.parts, losses.agreement)

    recipe = Broken()
    before = weights(recipe)
    with pytest.raises(NumericsError, match="not finite"):
        run(answers, tmp_path, recipe=recipe)
    assert same(weights(recipe), before)


def test_log_is_json(answers, straight, tmp_path):
    run(answers, tmp_path, until=6)
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"event": "st')  # killed while writing
    run(answers, tmp_path)
    assert got([json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]) == got(straight[1])


@pytest.mark.parametrize("has", [False, True])
def test_products_are_in_bfloat16_where_the_processor_has_them(answers, tmp_path, monkeypatch, has):
    seen = list[torch.dtype]()

    class Seen(Toy):
        def loss(self, batch: Batch) -> Losses:
            seen.append(self.module(batch.states[1].new_zeros(1, 2 * 32)).dtype)
            return super().loss(batch)

    monkeypatch.setattr(loop, "cpu_flags", lambda: ("AVX-512-BF16",) * has)
    recipe, events = run(answers, tmp_path, recipe=Seen())
    assert set(seen) == {torch.bfloat16 if has else torch.float32}
    assert {parameter.dtype for parameter in recipe.module.parameters()} == {torch.float32}
    steps = [event.loss for event in events if isinstance(event, Stepped)]
    assert steps[-1] < steps[0]
