"""Several processes train as one does: the step's gradient is the same however its batches are spread."""

import pytest
import torch

from paceline.train.config import TrainConfig
from paceline.train.data import Answers
from paceline.train.log import Started, read_log
from tests.train.toy import Toy, in_two_processes, trained, weights, write_answers

CONFIG = TrainConfig(epochs=2, max_tokens=64, held_out=0.2, log_every=1)


class Silent(Toy):
    """Without noise, which every process would draw for itself."""

    def loss(self, batch):
        self.module.eval()
        return super().loss(batch)


_WORKER = """
import os, sys, torch
from pathlib import Path
from tests.train.test_devices import CONFIG, Silent, trained
from paceline.train.data import Answers
rank = os.environ["RANK"]
recipe = Silent(seed=int(rank))  # weights are those of the first process
trained(recipe, Answers.read(Path(sys.argv[1])), CONFIG, Path(sys.argv[2]))
torch.save([p.detach() for p in recipe.module.parameters()], sys.argv[2] + f"/weights-{rank}.pt")
"""


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    data = write_answers(tmp_path / "answers")
    (tmp_path / "two").mkdir()
    in_two_processes(_WORKER, str(data), str(tmp_path / "two"))

    one = Silent(seed=0)
    config = TrainConfig(epochs=2, max_tokens=64, held_out=0.2, log_every=1, accumulate=2)
    events = trained(one, Answers.read(data), config, tmp_path / "one")
    ends = [torch.load(tmp_path / "two" / f"weights-{rank}.pt", weights_only=True) for rank in range(2)]
    for both in zip(weights(one), *ends, strict=True):
        assert torch.equal(both[1], both[2]), "the processes keep the same weights"
        assert torch.allclose(both[0], both[1], atol=1e-5)
    assert isinstance(events[0], Started)
    logs = [[line["accepted_length"] for line in read_log(tmp_path / name) if line["event"] == "evaluation"]
            for name in ("one", "two")]  # fmt: skip
    assert logs[0] == pytest.approx(logs[1], abs=1e-3)
