"""DSpark heads as their authors and speculators publish them, written by hand."""

import pytest
import torch

from paceline.config import parse
from paceline.errors import ConfigError, IncompatibleModels
from paceline.methods.dspark.head import DSparkConfig, DSparkHead
from paceline.methods.heads.folder import load_head, save_head
from tests.methods.heads import block_states, told

from .exchange_common import DRAFT, VOCAB, WIDTH, draft_ids, folder_of, plain_config, randomised, target
from .test_dflash_layout import speculators, tensors_of

FORMS = pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])


def dspark(size: int = VOCAB, **options) -> DSparkHead:
    fixed = {"qk_norm": True, "num_hidden_layers": 2, "markov_rank": 8, "own_tables": True, "from_anchor": True}
    config = DSparkConfig(WIDTH, (2, 4, 6), size, VOCAB, 48, 4, 2, 8, 11, 6, **fixed | options)
    return randomised(DSparkHead(config, draft_ids(size) if size < VOCAB else torch.arange(VOCAB)))


def written(head: DSparkHead) -> dict[str, torch.Tensor]:
    """Its tensors, and those of a confidence head."""
    sure = {"confidence_head.proj.weight": torch.ones(1, WIDTH), "confidence_head.proj.bias": torch.ones(1)}
    return tensors_of(head) | sure


def authors(**changes) -> dict:
    """config.json of DeepSpec, which copies what the target's says."""
    return plain_config(**{
        "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "num_hidden_layers": 2, "block_size": 6,
        "mask_token_id": 11, "target_layer_ids": [1, 3, 5], "num_target_layers": 8, "num_anchors": 512,
        "layer_types": ["full_attention"] * 2, "markov_rank": 8, "markov_head_type": "vanilla",
        "enable_confidence_head": True, "confidence_head_with_markov": False, **changes,
    })  # fmt: skip


def laws(head: DSparkHead) -> torch.Tensor:
    """The logits of all rows after some tokens."""
    head.attach(target().embeddings, target().output_rows())
    states, text = torch.randn(1, 9, 3 * WIDTH, generator=torch.Generator().manual_seed(0)), list(range(8))
    with torch.inference_mode():
        hidden = block_states(head, states, text)
        return torch.stack([told(head, hidden, [7, 20, 3, 60, 41, 9][: row + 1]) for row in range(len(hidden))])


@FORMS
def test_the_authors_layout(kind, tmp_path):
    head = dspark(markov_head_type=kind)
    tensors = {
        **written(head),
        "embed_tokens.weight": target().embeddings.clone(),
        "lm_head.weight": target().output_rows().clone(),
    }
    folder = folder_of(tmp_path / "h", authors(markov_head_type=kind), tensors)
    read = load_head(folder, target())
    assert read.config == head.config
    assert read.config.num_speculative_tokens == 6
    torch.testing.assert_close(laws(read), laws(head))
    assert parse(f"head:{folder}").as_dict()["method"] == "dspark"
    again = load_head(save_head(tmp_path / "ours", read, target(), {}), target())
    assert again.config == read.config


@FORMS
@pytest.mark.parametrize("size", [DRAFT, VOCAB])
@pytest.mark.parametrize("from_anchor", [True, False])
def test_the_layout_of_speculators(kind, size, from_anchor, tmp_path):
    head = dspark(size, markov_head_type=kind, from_anchor=from_anchor)
    more = {
        "speculators_model_type": "dspark",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "sample_from_anchor": from_anchor,
        "markov_rank": 8,
        "markov_head_type": kind,
    }
    config, tensors = speculators(head, **more)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(3))  # of the file's draft vocabulary
    for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
        tensors[name] = tensors[name][order]
    tensors |= {"d2t": head.draft_ids[order] - torch.arange(size)}
    folder = folder_of(tmp_path / "h", config, tensors)
    read = load_head(folder, target())
    assert read.config == head.config
    torch.testing.assert_close(laws(read), laws(head))


@pytest.mark.parametrize(("changes", "name"), [
    ({"sample_from_anchor": None}, "which row drafts the first token"),
    ({"markov_head_type": "fir"}, "markov_head_type"),
    ({"markov_rank": None}, "markov_rank"),
    ({"markov_rank": 4}, "do not fit"),
    ({"selector_rank": 4}, "selector_rank"),
    ({"causal": True}, "blocks are causal"),
], ids=str)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(changes, name, tmp_path):
    more = {"speculators_model_type": "dspark", "sample_from_anchor": True, "markov_rank": 8}
    config, tensors = speculators(dspark(markov_head_type="vanilla"), **more | changes)
    config = {key: value for key, value in config.items() if value is not None}
    with pytest.raises((ConfigError, IncompatibleModels), match=name):
        load_head(folder_of(tmp_path / "h", config, tensors), target())
