"""The census of architectures: what it says of some, and that docs/census.md says what all of them do."""

import json

import pytest

from bench import census
from bench.census import Row, main, rendered, renewed, verdicts
from bench.tiny_configs import default_config, shrunk

ROWS = [
    Row("llama", "native", "invariant"),
    Row("cohere", "torch", "invariant"),
    Row("vaultgemma", "torch", "fast", "rows differ between row counts"),
    Row("jetmoe", "torch", "fast", "experts"),
    Row("gemma3", "native", "invariant"),
    Row("bloom", "no", why="it uses ALiBi"),
    Row("mpt", "no", why="it uses ALiBi"),
    Row("fast_vlm", "untried", why="needs timm"),
    Row("bert", "no", why=census.NOT_CAUSAL),
]


def test_it_tells_native_from_torch_from_refused(capsys):
    assert main(["--family", "qwen3", "--family", "jetmoe", "--family", "bloom", "--json"]) == 0
    qwen, jetmoe, bloom = json.loads(capsys.readouterr().out)
    assert qwen == {"family": "qwen3", "runs": "native", "numerics": "invariant", "why": ""}
    assert (jetmoe["runs"], jetmoe["numerics"]) == ("torch", "fast")
    assert "experts" in jetmoe["why"]
    assert (bloom["runs"], bloom["numerics"]) == ("no", "")
    assert "ALiBi" in bloom["why"]


def test_what_hangs_or_dies_is_a_row(monkeypatch):
    monkeypatch.setattr(census, "SECONDS", 0)
    assert census.counted("llama").why == "it does not end"


def test_the_page_says_what_the_rows_say():
    text = rendered(ROWS)
    assert "8 decoders, 2 native, 3 in torch, 2 refused, 1 untried; 3 invariant." in text
    assert "| native | invariant | `llama` | `gemma3` |" in text
    assert "| it uses ALiBi | `bloom`, `mpt` |" in text
    assert text.endswith("Not causal language models: `bert`.\n")
    page = renewed(f"before\n{census.BEGIN}old\n{census.END}after\n", ROWS)
    assert page == f"before\n{census.BEGIN}{text}{census.END}after\n"
    assert verdicts(page) == {row.family: row.verdict for row in ROWS}
    assert Row("glm", "torch", "invariant").verdict == Row("glm", "torch", "fast", "rows differ").verdict
    assert Row("glm", "torch", "invariant").verdict != Row("glm", "torch", "fast", "experts").verdict


def test_a_tiny_config_has_all_kinds_of_layers():
    config = shrunk(default_config("qwen3_next"))
    assert set(config.layer_types) == {"linear_attention", "full_attention"}
    assert config.num_hidden_layers == len(config.layer_types) == 4
    assert config.hidden_size == 128
    text = shrunk(default_config("qwen2_vl")).text_config
    assert sum(text.rope_parameters["mrope_section"]) == text.hidden_size // text.num_attention_heads // 2


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_census_is_what_the_page_says():
    assert {row.family: row.verdict for row in census.census()} == verdicts(census.PAGE.read_text())
