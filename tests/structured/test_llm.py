"""`structured_outputs` from the front door: forms side by side, every way to give them, and what is refused."""

import builtins
import json
import pickle
import sys

import pytest

from paceline import LLM, Fixed, SamplingParams, StructuredOutputsParams
from paceline.cascade.calibration import sampling_options
from paceline.errors import ConfigError
from tests.adversaries import RandomTrees
from tests.cli.helpers import answer, refusal
from tests.helpers import tokenizer
from tests.structured.common import FORMS, WITH_ORACLE, byte_tokenizer, is_whole, may_be
from tests.tiny import tiny_model

TEXT = "abcabcabcab"


@pytest.fixture(scope="module")
def llm() -> LLM:
    model = tiny_model("llama")
    return LLM(model, tokenizer=byte_tokenizer(), drafter="jump-forward+lookup", policy=Fixed(4), max_num_seqs=3)


def params_of(form: str, **options) -> SamplingParams:
    return SamplingParams(structured_outputs=FORMS[form][0], **{"max_tokens": 40, "seed": 3, **options})


def test_forms_side_by_side(llm):
    params = [params_of(form, temperature=0.7, n=3, logprobs=2) for form in FORMS] + [SamplingParams(max_tokens=9)]
    drafted, plain = llm.generate([TEXT] * len(params), params), llm.plain().generate([TEXT] * len(params), params)
    assert list(map(seen, drafted)) == list(map(seen, plain))
    assert drafted[-1].token_ids == llm.generate(TEXT, SamplingParams(max_tokens=9))[0].token_ids
    for form, result in zip(FORMS, drafted, strict=False):
        for one in result.outputs:
            pattern = FORMS[form][1]
            assert one.stop_reason is None
            assert not pattern or may_be(pattern, one.text)
            assert one.finish_reason == "length" or not pattern or is_whole(pattern, one.text)
    assert any(one.num_accepted for result in drafted for one in result.outputs)


def seen(result):
    """What does not differ with speculation."""
    return [(one.token_ids, one.text, one.finish_reason, one.stop_reason, one.logprobs) for one in result.outputs]


@pytest.mark.parametrize("form", WITH_ORACLE)
def test_an_ended_answer_has_its_whole_text(llm, form):
    """Also the last token, where no token of end follows; the same in a stream, and with stop strings."""
    ended = [
        one
        for one in llm.generate(TEXT, params_of(form, temperature=1.0, n=20))[0].outputs
        if one.finish_reason == "stop"
    ]
    assert ended
    for one in ended:
        params = params_of(form, temperature=1.0)
        assert is_whole(FORMS[form][1], one.text)
        streamed = list(llm.stream(TEXT, SamplingParams(**{**vars(params), "seed": one.seed})))
        assert "".join(chunk.text for chunk in streamed) == one.text
        stops = SamplingParams(**{**vars(params), "seed": one.seed, "stop": "~", "include_stop_str_in_output": True})
        assert llm.generate(TEXT, stops)[0].text.removesuffix("</s>") == one.text


def test_other_ends(llm):
    params = params_of("gbnf", ignore_eos=True)
    assert llm.generate(TEXT, params)[0].outputs[0].finish_reason == "length", "nothing forbids to go on"
    assert llm.generate(TEXT, params_of("choice", ignore_eos=True))[0].outputs[0].finish_reason == "stop"
    text = llm.generate(TEXT, params_of("gbnf", stop=","))[0].text
    assert "," not in text
    cut = llm.generate(TEXT, params_of("json", max_tokens=3))[0].outputs[0]
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 3)


def test_log_probabilities_are_those_of_the_model(llm):
    free = llm.generate(TEXT, SamplingParams(max_tokens=1, prompt_logprobs=2, logprobs=-1))[0]
    held = llm.generate(TEXT, params_of("regex", max_tokens=1, prompt_logprobs=2, logprobs=-1))[0]
    assert held.prompt_logprobs == free.prompt_logprobs
    assert held.outputs[0].logprobs[0].top == free.outputs[0].logprobs[0].top


def test_every_way_to_give_a_form():
    schema = {"type": "object", "properties": {"a": {"const": "b"}}}
    given = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
    assert given == SamplingParams(structured_outputs={"json": json.dumps(schema), "regex": None})
    assert given == pickle.loads(pickle.dumps(given))
    kept = json.loads(json.dumps(sampling_options(given)))
    assert SamplingParams(**kept) == given
    assert SamplingParams(structured_outputs={"choice": ["a", "b"]}).structured_outputs.choice == ("a", "b")


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({}, "one form.*Got: none"),
        ({"regex": "a", "choice": ["b"]}, "Got: regex and choice"),
        ({"json_object": False}, "Got: none"),
        ({"choice": []}, "choice"),
        ({"choice": "abc"}, "choice"),
        ({"regex": 7}, "regex"),
        ({"json": "{"}, "json is no JSON schema.*line 1 column 2"),
        ({"json": {"a": {1, 2}}}, "json is no JSON schema"),
        ({"json": "[3]"}, "json is no JSON schema"),
        ({"regex": "a", "disable_any_whitespace": True}, "disable_any_whitespace is for JSON only.*Got: regex"),
        ({"structural_tag": "{}"}, "takes no 'structural_tag'.*grammar"),
        ({"regexp": "a"}, "takes no 'regexp'.*did you mean 'regex'"),
    ],
)
def test_params_that_are_no_form(form, words):
    with pytest.raises(ConfigError, match=words):
        SamplingParams(structured_outputs=form)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"regex": "ab[c"}, "regex cannot be read.*unclosed character class"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"json": {"type": "objekt"}}, "json cannot be read.*objekt"),
        ({"json": {"not": {}}}, "Unimplemented.*not"),
        ({"json": {"enum": []}}, "Unsatisfiable"),
        ({"json_object": True, "whitespace_pattern": "["}, "json_object cannot be read"),
        (
            {"json": {"properties": {"a": {"const": 2**53 + 1}}}},
            "json cannot be read.*9007199254740993.*2\\*\\*53.*a string",
        ),
        ({"grammar": 'start: "a" %json {"enum": [9007199254740993]}'}, "grammar cannot be read.*9007199254740993"),
        ({"grammar": "root ::= missing"}, "grammar cannot be read.*missing"),
        ({"grammar": 'start: "a'}, "grammar cannot be read"),
        ({"regex": "é+"}, "no text that this model can write"),
        ({"regex": "[a&&b]"}, "no text that this model can write"),
    ],
)
def test_forms_that_cannot_be_read(llm, form, words):
    """Refused before anything is decoded, also as the second of two prompts."""
    with pytest.raises(ConfigError, match=words):
        llm.generate([TEXT, TEXT], [SamplingParams(max_tokens=2), SamplingParams(structured_outputs=form)])


def test_a_grammar_without_an_end_in_the_vocabulary(llm):
    """No token writes its second letter: an error where plain decoding meets it, with any drafter."""
    params = SamplingParams(structured_outputs={"regex": "aé"})
    for engine in (llm, llm.plain(), LLM(tiny_model("llama"), tokenizer=byte_tokenizer(), drafter=RandomTrees())):
        with pytest.raises(ConfigError, match="allows no further token"):
            engine.generate(TEXT, params)


def test_models_that_take_no_grammars(monkeypatch):
    params = SamplingParams(structured_outputs={"regex": "a"})
    with pytest.raises(ConfigError, match="no tokenizer"):
        LLM(tiny_model("llama")).generate([5, 6], params)
    with pytest.raises(ConfigError, match=r"cannot read this tokenizer.*decoder"):
        LLM(tiny_model("llama"), tokenizer=tokenizer()).generate("abc", params)
    real = builtins.__import__

    def without(name, *given, **more):
        if name.startswith("llguidance"):
            raise ImportError(name)
        return real(name, *given, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    for name in [name for name in sys.modules if name.startswith("llguidance")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match=r"need llguidance.*paceline\[structured\]"):
        LLM(tiny_model("llama"), tokenizer=byte_tokenizer.__wrapped__()).generate("abc", params)


def test_command_line(tmp_path):
    model, schema = tmp_path / "model", tmp_path / "schema.json"
    tiny_model("llama").save_pretrained(model)
    byte_tokenizer().save_pretrained(model)
    schema.write_text(json.dumps(FORMS["json"][0]["json"]))
    ask = ("generate", str(model), "-p", TEXT, "-d", "jump-forward")
    assert answer(*ask, "--choice", "abc", "--choice", "alo")["text"] in ("abc", "alo")
    assert is_whole("[0-9]{3}", answer(*ask, "--regex", "[0-9]{3}")["text"])
    assert answer(*ask, "--json-schema", str(schema), "--max-tokens", "4")["text"].startswith('{"a"')
    assert "one form" in refusal(*ask, "--regex", "a", "--choice", "b")
    assert "the schema in" in refusal(*ask, "--json-schema", str(tmp_path / "none.json"))
    assert "unclosed" in refusal(*ask, "--regex", "[")
