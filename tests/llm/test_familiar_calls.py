"""What users of vLLM and of transformers type first."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import BatchEncoding, GenerationConfig

from paceline import LLM, Coupled, DraftModel, Fixed, PromptLookup, Ratio, SamplingParams
from paceline.errors import ConfigError, LossyNotAllowed
from tests.helpers import tokenizer
from tests.tiny import tiny_model

TEXT = "abcabcabcab"
CHAT = [{"role": "user", "content": "abc"}]
NGRAM = {"method": "ngram"}
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(tiny_model("llama"), tokenizer=tokenizer(), drafter="lookup", max_num_seqs=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    place = tmp_path_factory.mktemp("model")
    model = tiny_model("llama")
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9, top_k=20, max_new_tokens=7)
    model.save_pretrained(place)
    tokenizer().save_pretrained(place)
    return str(place)


def test_prompts_in_all_their_forms(llm):
    ids = tokenizer().encode(TEXT)
    want = llm.generate(TEXT, PARAMS)[0].token_ids
    alone = [
        [TEXT], {"prompt": TEXT}, [{"prompt": TEXT}], {"prompt_token_ids": ids}, [{"prompt_token_ids": ids}], ids,
        [ids], np.array(ids), torch.tensor(ids), torch.tensor([ids]), tokenizer()(TEXT), tokenizer()([TEXT]),
        tokenizer()([TEXT], return_tensors="pt"), BatchEncoding({"input_ids": ids}), {"input_ids": torch.tensor([ids])},
    ]  # fmt: skip
    for prompt in alone:
        (result,) = llm.generate(prompt, PARAMS)
        assert (result.prompt_token_ids, result.token_ids) == (ids, want), prompt
    two = llm.generate(tokenizer()([TEXT, "xyz"]), PARAMS)
    assert [one.prompt_token_ids for one in two] == [ids, tokenizer().encode("xyz")]


@pytest.mark.parametrize(
    "prompt",
    ["", [""], [[]], {"prompt": ""}, {}, None, 3, 1.5, b"abc", [[[5]]], [None], [5, None], [[5], 6], object(),
     {"prompts": TEXT}, {"prompt": TEXT, "multi_modal_data": {"audio": 1}}, {"role": "user", "content": "abc"}],
)  # fmt: skip
def test_what_is_no_prompt(llm, prompt):
    with pytest.raises(ConfigError) as told:
        llm.generate(prompt, PARAMS)
    assert "Expected" in str(told.value) or "Fix" in str(told.value)


def test_fields_of_a_request_output(llm):
    first, second = llm.generate([TEXT, tokenizer().encode(TEXT)], SamplingParams(max_tokens=5, logprobs=2))
    assert (first.prompt, second.prompt) == (TEXT, None)
    assert int(second.request_id) == int(first.request_id) + 1
    assert first.finished
    assert first.prompt_logprobs is None
    (one,) = first.outputs
    assert (one.index, one.finish_reason, one.stop_reason) == (0, "length", None)
    assert one.logprobs is not None
    own = [entry[token] for entry, token in zip(one.logprobs, one.token_ids, strict=True)]
    assert one.cumulative_logprob == sum(entry.logprob for entry in own)
    assert "".join(entry.decoded_token or "" for entry in own) == one.text
    assert llm.chat(CHAT, PARAMS)[0].prompt == "u:abc;a:"
    assert llm.generate(TEXT, PARAMS)[0].outputs[0].cumulative_logprob is None
    for shown in (repr(first), repr(one), repr(llm.generate("x" * 200, PARAMS))):
        assert "\n" not in shown
        assert len(shown) < 400
    sampled = SamplingParams(n=3, temperature=1.0, max_tokens=2, seed=1)
    assert [answer.index for answer in llm.generate(TEXT, sampled)[0].outputs] == [0, 1, 2]


def test_outputs_as_json(llm):
    import json

    result = llm.generate(TEXT, SamplingParams(max_tokens=3, logprobs=1, prompt_logprobs=0))[0]
    read = json.loads(json.dumps(result.to_dict()))
    assert read["outputs"][0]["text"] == result.text
    assert read["outputs"][0]["logprobs"][0]["token_id"] == result.token_ids[0]
    assert read["prompt_logprobs"][0] is None
    assert read["metrics"]["rounds"] == result.metrics.rounds


def test_seconds_are_those_of_the_request(llm):
    short, long = llm.generate([TEXT, TEXT], [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 12)])
    assert short.metrics.rounds == len(short.rounds) < long.metrics.rounds == len(long.rounds)
    assert 0 < short.metrics.decode + short.metrics.prefill < long.metrics.decode + long.metrics.prefill
    several = llm.generate(TEXT, SamplingParams(n=2, temperature=1.0, max_tokens=4, seed=1, ignore_eos=True))[0]
    assert several.metrics.rounds == max(len(one.rounds) for one in several.outputs), "shared rounds count once"


@pytest.mark.parametrize(
    ("options", "kind", "depth"),
    [
        ({"drafter": "lookup"}, PromptLookup, None),
        ({"speculative_config": {**NGRAM, "num_speculative_tokens": 4, "prompt_lookup_max": 3}}, PromptLookup, 4),
        ({"speculative_config": {**NGRAM, "num_speculative_tokens": 2, "prompt_lookup_min": 1}}, PromptLookup, 2),
        ({"drafter": "model:FOLDER"}, DraftModel, None),
        ({"speculative_config": {"model": "FOLDER", "num_speculative_tokens": 3}}, DraftModel, 3),
    ],
)  # fmt: skip
def test_drafters_by_text_and_by_vllms_keys(folder, options, kind, depth):
    if isinstance(options.get("drafter"), str):
        options = {"drafter": options["drafter"].replace("FOLDER", folder)}
    elif "model" in options["speculative_config"]:
        options = {"speculative_config": {**options["speculative_config"], "model": folder}}
    llm = LLM(folder, dtype="float32", **options)
    assert isinstance(llm.decoder.drafter, kind)
    assert depth is None or isinstance(llm.decoder.policy, Fixed)
    assert max(r.num_drafted for r in llm.generate(TEXT, PARAMS)[0].rounds) <= (depth or 64)
    assert llm.generate(TEXT, PARAMS)[0].token_ids == llm.plain().generate(TEXT, PARAMS)[0].token_ids


def test_what_a_speculative_config_decides():
    model = tiny_model("llama")
    ratio = {"method": "ngram", "num_speculative_tokens": 2, "rejection_sample_method": "standard"}
    assert isinstance(LLM(model, speculative_config=ratio).verifier, Ratio)
    kept = LLM(model, speculative_config=ratio, verifier=Coupled(), policy=Fixed(5))
    assert isinstance(kept.verifier, Coupled)
    assert isinstance(kept.decoder.policy, Fixed)
    with pytest.raises(ConfigError, match="one of them"):
        LLM(model, drafter=PromptLookup(), speculative_config=ratio)
    with pytest.raises(ConfigError, match=r"takes no draft_tensor_parallel_size=2.*Fix: leave it out"):
        LLM(model, speculative_config={"method": "ngram", "draft_tensor_parallel_size": 2})
    with pytest.raises(LossyNotAllowed, match="typical"):
        LLM(model, speculative_config={"method": "ngram", "rejection_sample_method": "typical"})


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        ({"max_batch_size": 4}, "Fix: max_num_seqs"),
        ({"tensor_parallel_size": 2}, "one device"),
        ({"torch_dtype": "float32"}, "Fix: dtype"),
        ({"quantization": "awq"}, "give weights"),
        ({"device_map": "auto"}, 'device="cuda:0"'),
        ({"assistant_model": 1}, "DraftModel"),
        ({"hf_token": "x"}, "token is for models that are loaded by name"),
        ({"max_num_sequences": 4}, "Fix: max_num_seqs"),
        ({"max_num_seq": 4}, "did you mean 'max_num_seqs'"),
        ({"revision": "main"}, "loaded by name"),
    ],
)
def test_names_of_other_engines(options, answer):
    with pytest.raises(ConfigError, match=answer):
        LLM(tiny_model("llama"), **options)


def test_calls_with_names_of_others(llm):
    for call, answer in (
        (lambda: llm.generate(TEXT, max_new_tokens=3), "sampling_params=SamplingParams"),
        (lambda: llm.generate(TEXT, PARAMS, lora_request=1), "no LoRARequest"),
        (lambda: llm.chat(CHAT, enable_thinking=False), "chat_template_kwargs"),
        (lambda: llm.generate(TEXT, PARAMS, params=PARAMS), "one of them"),
        (lambda: llm.chat("abc"), "no chat"),
        (lambda: SamplingParams(n=2), "all the same"),
    ):
        with pytest.raises(ConfigError, match=answer):
            call()
    with pytest.raises(AttributeError, match="there is no beam search"):
        llm.beam_search()
    assert llm.get_tokenizer() is llm.tokenizer
    want = llm.generate(TEXT, PARAMS)[0].token_ids
    assert llm.generate(TEXT, params=PARAMS)[0].token_ids == want
    assert llm.generate([TEXT], sampling_params=PARAMS, use_tqdm=True)[0].token_ids == want
    assert [t for chunk in llm.stream(TEXT, sampling_params=PARAMS) for t in chunk.token_ids] == want


def test_chats_with_options(llm):
    answer = [*CHAT, {"role": "assistant", "content": "de"}]
    assert llm.chat([CHAT, answer], PARAMS)[1].prompt == "u:abc;a:de;a:"
    assert llm.generate(CHAT, PARAMS)[0].token_ids == llm.chat(CHAT, PARAMS)[0].token_ids
    template = (
        "{% if tools %}[{{ tools[0]['function']['name'] }}]{% endif %}"
        "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + ';' }}{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}{% if mood is defined %}{{ mood }}{% endif %}"
    )
    tools = [{"type": "function", "function": {"name": "add", "description": "d", "parameters": {"type": "object"}}}]

    def prompt(**options):
        return llm.chat(CHAT, PARAMS, chat_template=template, **options)[0].prompt

    assert prompt() == "u:abc;a:"
    assert prompt(add_generation_prompt=False) == "u:abc;"
    assert prompt(tools=tools) == "[add]u:abc;a:"
    assert prompt(chat_template_kwargs={"mood": "!"}) == "u:abc;a:!"
    going_on = llm.chat(
        answer, PARAMS, chat_template=template, add_generation_prompt=False, continue_final_message=True
    )
    assert going_on[0].prompt == "u:abc;a:de"
    called = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}]
    assert llm.chat(called, PARAMS, chat_template=template)[0].prompt == "u:abc;a:;a:"
    with pytest.raises(ConfigError, match="does not read 'tools'"):
        llm.chat(CHAT, PARAMS, tools=tools)
    with pytest.raises(ConfigError, match="does not read 'mod'"):
        llm.chat(CHAT, PARAMS, chat_template=template, chat_template_kwargs={"mod": 1})
    with pytest.raises(ConfigError, match="refuses this chat"):
        llm.chat(answer, PARAMS, continue_final_message=True)


def test_defaults_from_generation_config(folder):
    own = LLM(folder, generation_config="auto")
    assert own.get_default_sampling_params() == SamplingParams(0.6, top_p=0.9, top_k=20, max_tokens=7)
    assert len(own.generate(TEXT)[0].token_ids) <= 7
    assert own.generate(TEXT)[0].outputs[0].seed != own.generate(TEXT)[0].outputs[0].seed
    assert LLM(folder).get_default_sampling_params() == SamplingParams()


def test_a_seed_of_the_engine(folder):
    sampled = SamplingParams(temperature=1.0, max_tokens=8)
    one, two = ([r.token_ids for r in LLM(folder, seed=5).generate([TEXT, TEXT], sampled)] for _ in range(2))
    assert one == two
    assert one[0] != one[1]
    assert LLM(folder, seed=6).generate(TEXT, sampled)[0].token_ids != one[0]


def test_tokenizers_given_apart(folder, tmp_path):
    tokenizer(7).save_pretrained(tmp_path)
    want = tokenizer(7).encode(TEXT)
    for given in (str(tmp_path), tokenizer(7)):
        assert LLM(folder, tokenizer=given).encode(TEXT) == want
    assert LLM(tiny_model("llama"), tokenizer=str(tmp_path)).encode(TEXT) == want
    with pytest.raises(ConfigError, match="no revision"):
        LLM(folder, revision="main")


@pytest.mark.more
def test_loggers_of_others_are_left_alone():
    """A process of its own: importing the library twice would register its attention twice. A command silences them."""
    code = """
import logging, torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
told = []
logging.Logger.setLevel = lambda logger, level: told.append(logger.name)
import paceline, paceline.cli
paceline.LLM
assert not {"torch", "transformers", "huggingface_hub", "torchao"} & set(told), told
paceline.cli.silence_loggers()
assert "torch" in told
"""
    subprocess.run([sys.executable, "-c", code], check=True)
