"""A processor that cannot be loaded says what to do about it."""

import pytest
from transformers.models.smolvlm import processing_smolvlm

from paceline.errors import ConfigError
from paceline.hf.processors import load_processor
from tests.vision.families import make


def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch):
    model, processor = make("smolvlm")
    processor.save_pretrained(tmp_path)
    assert load_processor(str(tmp_path), model.config)
    monkeypatch.setattr(processing_smolvlm, "num2words", None)  # as where it is not installed
    with pytest.raises(ConfigError, match=r"needs a package(.|\n)*Fix: pip install num2words\b") as caught:
        load_processor(str(tmp_path), model.config)
    assert "processor_config.json" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (ModuleNotFoundError("No module named 'einops.layers'", name="einops.layers"), "pip install einops"),
        (ImportError("It needs the foo-bar library.\nTry `pip install -U foo-bar`."), "pip install foo-bar"),
        (ImportError("a name that is not there"), "install what it names"),
    ],
)
def test_other_packages(error, fix, tmp_path, monkeypatch):
    def broken(*_):
        raise error

    model, _ = make("llava")
    monkeypatch.setattr("paceline.hf.processors.PROCESSOR_MAPPING.get", broken)
    with pytest.raises(ConfigError) as caught:
        load_processor(str(tmp_path), model.config)
    assert caught.value.fix == fix
