"""One table turns words into drafters: every key is known or refused, with the nearest name."""

import pytest

from paceline import Coupled, DraftModel, Plain, PromptLookup, Ratio, SelfQuantized, Typical
from paceline.core.request import SamplingParams, Sequence
from paceline.errors import ConfigError, LossyNotAllowed
from paceline.spec_config import SpecConfig, parse


@pytest.mark.parametrize(
    ("given", "method", "tokens"),
    [
        (None, "none", 0),
        ("none", "none", 0),
        ("lookup", "ngram", 8),
        ("ngram", "ngram", 8),
        ("self-int4", "self_int4", 4),
        ("model:some/draft", "draft_model", 5),
        ({}, "none", 0),
        ({"model": "some/draft"}, "draft_model", 5),
        ({"method": "ngram", "num_speculative_tokens": 3}, "ngram", 3),
        ('{"method": "self_int4", "group_size": 64, "lm_head": "shared"}', "self_int4", 4),
        (' {"method": "ngram", "prompt_lookup_max": 5, "prompt_lookup_min": 2, "match": "first"}', "ngram", 8),
    ],
)
def test_what_is_understood(given, method, tokens):
    config = parse(given)
    assert (config.method, config.num_speculative_tokens) == (method, tokens)
    assert parse(config.as_dict()) == config


def test_a_number_of_tokens_overrules():
    assert parse("lookup", 3).num_speculative_tokens == 3
    assert parse({"method": "ngram", "num_speculative_tokens": 9}, 3).num_speculative_tokens == 3


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("lokup", ["unknown drafter", "self-int4", "did you mean 'lookup'"]),
        ("model:", ["names no model"]),
        ({"methode": "ngram"}, ["unknown speculative_config key 'methode'", "did you mean 'method'"]),
        ({"method": "ngrams"}, ["unknown method", "did you mean 'ngram'", "self_int4"]),
        ({"method": "eagle"}, ["unknown method", "draft_model"]),
        ({"method": ["ngram"]}, ["unknown method"]),
        ({"method": "draft_model"}, ['needs "model"']),
        ({"method": "ngram", "model": "x"}, ["does not take 'model'", "prompt_lookup_max"]),
        ({"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 3}, ["above prompt_lookup_max"]),
        ({"method": "ngram", "prompt_lookup_max": 0}, ["prompt_lookup_max is out of range"]),
        ({"method": "ngram", "num_speculative_tokens": True}, ["out of range"]),
        ({"method": "ngram", "num_speculative_tokens": 2.5}, ["out of range"]),
        ({"method": "ngram", "num_speculative_tokens": 0}, ["drafts nothing"]),
        ({"method": "self_int4", "group_size": 48}, ["unknown group_size 48", "32, 64, 128, 256"]),
        ({"method": "self_int4", "lm_head": "int8"}, ["unknown lm_head", "did you mean 'int4'"]),
        ({"model": 3}, ["model is not a name"]),
        ({"rejection_sample_method": "strict"}, ["unknown rejection_sample_method", "typical"]),
        ("{not json", ["not valid JSON", "character 1"]),
        ("[1, 2]", ["not a JSON object"]),
        ('"lookup"', ["not a JSON object"]),
    ],
)
def test_what_is_refused(given, words):
    with pytest.raises(ConfigError) as caught:
        parse(given)
    for word in words:
        assert word in str(caught.value)


def test_build_makes_the_objects():
    kinds = {"none": Plain, "lookup": PromptLookup, "self-int4": SelfQuantized, "model:some/draft": DraftModel}
    for name, kind in kinds.items():
        drafter, policy, verifier = parse(name).build()
        assert isinstance(drafter, kind)
        assert isinstance(verifier, Coupled)
        seq = Sequence([1], SamplingParams(), 0, frozenset(), 100)
        assert policy.budget(seq).depth == parse(name).num_speculative_tokens


@pytest.mark.parametrize(("rule", "kind"), [("exact", Coupled), ("standard", Ratio), ("ratio", Ratio)])
def test_rules(rule, kind):
    assert isinstance(parse({"method": "ngram", "rejection_sample_method": rule}).build()[2], kind)


def test_a_lossy_rule_needs_consent():
    config = parse({"method": "ngram", "rejection_sample_method": "typical"})
    with pytest.raises(LossyNotAllowed, match="allow"):
        config.build()
    assert isinstance(config.build(allow_lossy=True)[2], Typical)


def test_the_default_config_is_plain():
    assert SpecConfig() == parse("none")
