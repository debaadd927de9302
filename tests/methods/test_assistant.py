"""Gemma 4 assistants: the drafts of transformers' module over the target's cache, the answers of plain decoding."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma4AssistantConfig

from paceline import LLM, SamplingParams
from paceline.errors import ConfigError, IncompatibleModels
from paceline.methods import Gemma4Assistant
from paceline.target import ModelRunner, load_model
from paceline.target.load import with_kv_cache
from paceline.verify import Coupled
from tests.helpers import NO_EOS, REPEATING, SEED, assert_identical, loaded, prompt, runner, tokenizer
from tests.tiny import ARCHITECTURES, SMALL, tiny_model

TEXT = {**SMALL, **ARCHITECTURES["gemma4"][1]} | {
    "model_type": "gemma4_text",
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_kv_shared_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    **dict.fromkeys(("hidden_size_per_layer_input", "vocab_size_per_layer_input"), 0),
    "use_double_wide_mlp": False,
    "final_logit_softcapping": None,
}


def assistant(ordered: bool = False, **text: object):
    """A random one for the tiny Gemma 4."""
    centroids = {"use_ordered_embeddings": ordered, "num_centroids": 24, "centroid_intermediate_top_k": 5}
    vocabulary = {"vocab_size": 96} if ordered else {}
    config = Gemma4AssistantConfig(text_config={**TEXT, **vocabulary, **text}, backbone_hidden_size=32, **centroids)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.25)
    if ordered:
        model.masked_embedding.token_ordering.copy_(torch.randperm(96))
    return model.eval()


@torch.inference_mode()
def chain_of_transformers(module, target, text: list[int], count: int) -> list[torch.Tensor]:
    """The logits [V] of each step, as transformers' `SinglePositionMultiTokenCandidateGenerator` drives the module."""
    model = target.model
    out = model(torch.tensor([text[:-1]]), output_hidden_states=True, return_shared_kv_states=True, use_cache=True)
    token, state, logits = torch.tensor([text[-1:]]), out.hidden_states[-1][:, -1:], []
    for _ in range(count):
        inputs = torch.cat([model.get_input_embeddings()(token), state], -1)
        step = module(
            inputs_embeds=inputs,
            position_ids=torch.tensor([[len(text) - 1]]),
            shared_kv_states=out.shared_kv_states,
            use_cache=False,
        )
        logits.append(step.logits[0, 0])
        token, state = step.logits.argmax(-1), step.last_hidden_state
    return logits


@torch.inference_mode()
@pytest.mark.parametrize("ordered", [False, True])
def test_it_drafts_what_transformers_drafts(ordered):
    """Two texts side by side, past the window, against each by itself."""
    options: dict[str, Any] = {"vocab_size": 96, "vocab_size_per_layer_input": 96} if ordered else {}
    module, texts, count = assistant(ordered), [prompt(21, 1), prompt(12, 2)], 4
    on = ModelRunner(loaded("gemma4", **options), 3)
    drafter = Gemma4Assistant(module)
    drafter.bind(on, Coupled())
    slots = [on.admit(text) for text in texts]
    for slot, text in zip(slots, texts, strict=True):
        on.extend_cache(slot, text[:-1])
    last = [on.read_states(slot, len(text) - 2, len(text) - 1, (5,)) for slot, text in zip(slots, texts, strict=True)]
    level, found = drafter.layer.extend_cache(slots, [text[-1:] for text in texts], last), list[torch.Tensor]()
    for _ in range(count):
        found.append(level.logits[:, 0])
        level = drafter.layer.step(level.logits.argmax(-1), level.hidden, torch.zeros(2, 1, dtype=torch.long))
    plain = tiny_model("gemma4", **options)
    for row, text in enumerate(texts):
        for ours, theirs in zip(found, chain_of_transformers(module, plain, text, count), strict=True):
            known = ours[row] > ours[row].min()  # those of the nearest centroids; the others lie below all of a batch
            assert int(known.sum()) == (20 if ordered else 96)
            torch.testing.assert_close(ours[row][known], theirs[known], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tree", ["dynamic", "chain"])
def test_answers_are_those_of_plain_decoding(tree):
    asked = [(ids, SamplingParams(t, max_tokens=12), SEED, NO_EOS) for ids in (REPEATING, [5]) for t in (0.0, 1.0)]
    seqs = assert_identical(runner(loaded("gemma4")), Gemma4Assistant(assistant(), tree=tree), asked)
    assert sum(r.num_nodes for seq in seqs for r in seq.rounds) > 12


def test_it_is_read_from_its_folder(tmp_path):
    for name, model in (("target", tiny_model("gemma4")), ("assistant", assistant())):
        model.save_pretrained(tmp_path / name)
        tokenizer().save_pretrained(tmp_path / name)
    target, place = str(tmp_path / "target"), str(tmp_path / "assistant")
    llm = LLM(target, drafter=f"head:{place}")
    result = llm.generate([REPEATING], SamplingParams(max_tokens=12, ignore_eos=True))[0]
    assert (
        result.token_ids
        == llm.plain().generate([REPEATING], SamplingParams(max_tokens=12, ignore_eos=True))[0].token_ids
    )
    with pytest.raises(IncompatibleModels, match=r"cannot decode by itself.*head:FOLDER"):
        load_model(place)
    with pytest.raises(ConfigError, match="no Gemma 4 assistant"):
        LLM(target, drafter=Gemma4Assistant(target))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("llama", {}, "Gemma 4 alone"),
        ("gemma4", {"global_head_dim": 8}, "full attention 2 heads of 8"),
        ("gemma4", {"vocab_size": 50}, "vocab size 50"),
    ],
)
def test_other_targets_are_refused(name, text, message):
    with pytest.raises(IncompatibleModels, match=message):
        Gemma4Assistant(assistant(**text)).bind(runner(loaded(name)), Coupled())


def test_a_rounded_cache_is_refused():
    rounded = with_kv_cache(loaded("gemma4"), "int8")
    with pytest.raises(ConfigError, match=r"reads the target's keys.*which rounds them"):
        Gemma4Assistant(assistant()).bind(runner(rounded), Coupled())
