"""Two processes train the second stage as one does: the gradient is the same however the images are spread."""

import pytest
import torch
from safetensors.torch import load_file

from examples.tiny_vlm.stages import VlmStages
from tests.examples.toy import config_of, write_language_model
from tests.train.toy import in_two_processes

_WORKER = """
import sys
from pathlib import Path
from examples.tiny_vlm.stages import VlmStages
from tests.examples.toy import config_of
stages = VlmStages(config_of(Path(sys.argv[1]), Path(sys.argv[2]), "sft.scenes=2", "device=cpu"))
for stage in ("pretrain", "sft"):
    for event in stages.run(stage):
        pass
"""


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    base = write_language_model(tmp_path / "base")
    in_two_processes(_WORKER, str(base), str(tmp_path / "two"))
    stages = VlmStages(config_of(base, tmp_path / "one", "sft.scenes=2", "device=cpu"))
    for stage in ("pretrain", "sft"):
        list(stages.run(stage))
    for file in ("pretrain/vision.safetensors", "tiny-vlm/lora.safetensors"):
        one, two = load_file(tmp_path / "one" / file), load_file(tmp_path / "two" / file)
        assert all(torch.allclose(one[name].float(), two[name].float(), atol=2e-3) for name in one), file
