"""One table turns words into drafters: every key is known or refused, with the nearest name."""

import pytest

from paceline import (
    Choose,
    CostModel,
    Coupled,
    DraftModel,
    Dynamic,
    Fixed,
    Lookahead,
    Ouroboros,
    Plain,
    PromptLookup,
    Ratio,
    SelfQuantized,
    Typical,
)
from paceline.config import SpecConfig, parse
from paceline.core.request import SamplingParams, TokenSequence
from paceline.errors import ConfigError, LossyNotAllowed
from paceline.methods import Space


@pytest.mark.parametrize(
    ("given", "method", "tokens"),
    [
        (None, "none", 0),
        ("none", "none", 0),
        ("lookup", "ngram", 16),
        ("ngram", "ngram", 16),
        ("suffix", "suffix", 16),
        ("suffix:some/folder", "suffix", 16),
        ({"method": "suffix", "policy": "fixed"}, "suffix", 8),
        ("recycling", "token_recycling", 16),
        ({"method": "token_recycling", "policy": "fixed"}, "token_recycling", 6),
        ("self-int4", "self_int4", 16),
        ("lookahead", "lookahead", 16),
        ("ouroboros:model:some/draft@int4,ngram=4", "ouroboros", 16),
        ({"method": "ouroboros", "model": "some/draft", "policy": "fixed"}, "ouroboros", 12),
        ("lookup+lookahead:window=5,ngram=4,pool=shared", "choose", 16),
        ({"method": "lookahead", "guesses": 3, "policy": "fixed"}, "lookahead", 4),
        ("lookup+model:some/draft@int4", "choose", 16),
        ({"method": "ngram", "policy": "fixed"}, "ngram", 8),
        ({"method": "ngram", "policy": "cost_model", "num_speculative_tokens": 6}, "ngram", 6),
        ("model:some/draft", "draft_model", 16),
        ({}, "none", 0),
        ({"model": "some/draft"}, "draft_model", 16),
        ({"method": "ngram", "num_speculative_tokens": 3}, "ngram", 3),
        ({"method": "eagle3", "model": "some/head"}, "eagle3", 16),
        ({"method": "eagle", "model": "some/head", "tree": "static", "policy": "fixed"}, "eagle", 5),
        (
            {"method": "eagle3", "model": "h", "num_speculative_tokens": 6, "num_draft_nodes": 40, "top_k": 8},
            "eagle3",
            6,
        ),
        ({"method": "medusa", "model": "h", "policy": "fixed", "top_k": 4}, "medusa", 4),
        ({"method": "choose", "drafters": ["lookup", {"method": "mtp", "model": "h"}]}, "choose", 16),
        ('{"method": "self_int4", "group_size": 64, "lm_head": "shared"}', "self_int4", 16),
        (' {"method": "ngram", "prompt_lookup_max": 5, "prompt_lookup_min": 2, "match": "first"}', "ngram", 16),
    ],
)
def test_what_is_understood(given, method, tokens):
    config = parse(given)
    assert (config.method, config.num_speculative_tokens) == (method, tokens)
    assert parse(config.as_dict()) == config


def test_a_number_of_tokens_overrules():
    assert parse("lookup", 3).num_speculative_tokens == 3
    assert parse({"method": "ngram", "num_speculative_tokens": 9}, 3).num_speculative_tokens == 3


def nested(depth: int) -> dict[str, object]:
    given: dict[str, object] = {"method": "choose", "drafters": ["lookup", "self-int4"]}
    for _ in range(depth):
        given = {"method": "choose", "drafters": [given, "lookup"]}
    return given


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("lokup", ["unknown drafter", "self-int4", "did you mean 'lookup'"]),
        ("model:", ["nothing follows the colon", "Expected: model:PATH_OR_ID"]),
        ({"methode": "ngram"}, ["speculative_config takes no 'methode'", "did you mean 'method'"]),
        ({"method": "ngrams"}, ["method has a wrong value", "did you mean 'ngram'", "self_int4"]),
        ({"method": "eagel"}, ["method has a wrong value", "did you mean 'eagle'", "draft_model"]),
        ({"method": "eagle"}, ['"eagle" needs "model"', "packaged head"]),
        ({"method": "space"}, ['"space" needs "model"', "packaged head"]),
        ({"method": "space", "model": "x", "tree": "chain"}, ["does not take 'tree'"]),
        ("head:", ["nothing follows the colon", "Expected: head:PATH_OR_NAME"]),
        ("eagle:", ["nothing follows the colon", "Expected: head:PATH_OR_NAME"]),
        ("lookup:", ["nothing follows the colon", "Expected: lookup."]),
        ("suffix:", ["nothing follows the colon", "Expected: suffix[:CORPUS]"]),
        ("none:", ["nothing follows the colon", "Expected: none."]),
        ("self-int4:", ["nothing follows the colon", "Expected: self-int4[:FOLDER]"]),
        ("head:no-such-head", ["no head at 'no-such-head'", "paceline models"]),
        ("hed:x", ["unknown drafter", "did you mean 'head:'"]),
        ({"method": "medusa", "model": "x", "tree": "chain"}, ["does not take 'tree'"]),
        ({"method": "eagle3", "model": "x", "tree": "dynamc"}, ["tree has a wrong value", "did you mean 'dynamic'"]),
        ({"method": "eagle3", "model": "x", "top_k": 0}, ["top_k has a wrong value"]),
        ({"method": "eagle3", "model": "x", "tree": "chain", "top_k": 4}, ['"chain" tree does not take "top_k"']),
        ({"method": "eagle3", "model": "x", "num_draft_nodes": 8}, ["chooses the number of nodes itself"]),
        (
            {"method": "eagle3", "model": "x", "num_speculative_tokens": 9, "num_draft_nodes": 8},
            ["num_draft_nodes is below num_speculative_tokens", "8 and 9"],
        ),
        (
            {"method": "eagle3", "model": "x", "tree": "chain", "policy": "fixed", "num_draft_nodes": 8},
            ["num_draft_nodes is for drafters of trees"],
        ),
        (
            {"method": "choose", "drafters": ["lookup", "self-int4"], "policy": "fixed", "num_draft_nodes": 8},
            ["drafters of trees"],
        ),
        ({"method": ["ngram"]}, ["method has a wrong value"]),
        ({"method": "draft_model"}, ['needs "model"']),
        ({"method": "ngram", "model": "x"}, ["does not take 'model'", "prompt_lookup_max"]),
        ({"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 3}, ["n-gram range", "min 3, max 2"]),
        ({"method": "lookahead", "window": 0}, ["window has a wrong value"]),
        ({"method": "ouroboros"}, ['needs "model"']),
        ("ouroboros:", ["nothing follows the colon", "Expected: ouroboros:model:PATH_OR_ID"]),
        ("ouroboros:model:x,phrases=0", ["phrases has a wrong value"]),
        ("lookahead:pool=everything", ["pool has a wrong value", "shared"]),
        ({"method": "ngram", "prompt_lookup_max": 0}, ["prompt_lookup_max has a wrong value"]),
        ({"method": "ngram", "num_speculative_tokens": True}, ["num_speculative_tokens has a wrong value"]),
        ({"method": "ngram", "num_speculative_tokens": 2.5}, ["num_speculative_tokens has a wrong value"]),
        ({"method": "ngram", "num_speculative_tokens": 0}, ["drafts nothing"]),
        ({"method": "self_int4", "group_size": 48}, ["group_size has a wrong value", "48", "32, 64, 128 or 256"]),
        ({"method": "self_int4", "lm_head": "int8"}, ["lm_head has a wrong value", "'int4' or 'shared'"]),
        ({"model": 3}, ["model has a wrong value"]),
        ({"rejection_sample_method": "strict"}, ["rejection_sample_method has a wrong value", "typical"]),
        ({"method": "ngram", "policy": "costmodel"}, ["policy has a wrong value", "did you mean 'cost_model'"]),
        ({"method": "choose"}, ['needs "drafters"']),
        ("lookup+none", ["\"drafters\" cannot hold 'none'"]),
        ("lookup+lokup", ["unknown drafter 'lokup'"]),
        ("model:some/draft@int3", ["weights has a wrong value", "'int3'"]),
        ({"method": "self_int4", "bits": 5}, ["bits has a wrong value", "5"]),
        ("{not json", ["not valid JSON", "line 1 column 2"]),
        ("[1, 2]", ["not a JSON object"]),
        ('"lookup"', ["not a JSON object"]),
        ({"method": "ngram", "modell": None}, ["takes no 'modell'"]),
        ({1: 2}, ["takes no '1'"]),
        ({"method": "self_int4", "group_size": 32.5}, ["group_size has a wrong value"]),
        ({"method": "ngram", "prompt_lookup_max": 10**5000}, ["speculative_config"]),
        ({"method": "draft_model", "model": "a\udcff"}, ["speculative_config cannot be read", "surrogate"]),
        ({"method": "choose", "drafters": [1, 2]}, ["this is no drafter", "1"]),
        ({"method": "choose", "drafters": "lookup"}, ['needs "drafters"', "'lookup'"]),
        ({"method": "choose", "drafters": ["lookup", None]}, ["cannot hold 'none'"]),
        (nested(100_000), ["cannot hold 'choose'"]),
        (5, ["this is no drafter"]),
        ({"num_speculative_tokens": 3}, ["names no drafter", "num_speculative_tokens", '"method"']),
        ({"method": "ngram", "parallel_drafting": True}, ["takes no 'parallel_drafting'", "P-EAGLE"]),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 9}, ["Fix: num_speculative_tokens"]),
        ('{"method": ' + "[" * 1000 + "]" * 1000 + "}", ["not valid JSON", "recursion limit"]),
        ('{"method": "ngram", "prompt_lookup_max": ' + "9" * 5000 + "}", ["speculative"]),
        ('{"method": "\\ud800"}', ["not valid JSON", "hex escape"]),
        ("[" * 100_000, ["not valid JSON"]),
    ],
    ids=lambda value: None,
)
def test_what_is_refused(given, words):
    with pytest.raises(ConfigError) as caught:
        parse(given)
    for word in words:
        assert word in str(caught.value)


def test_build_makes_the_objects():
    kinds = {"none": Plain, "lookup": PromptLookup, "self-int4": SelfQuantized, "model:some/draft": DraftModel}
    kinds |= {"lookahead": Lookahead, "ouroboros:model:some/draft": Ouroboros}
    for name, kind in kinds.items():
        drafter, policy, verifier = parse(name, policy="fixed").build()
        assert isinstance(drafter, kind)
        assert isinstance(verifier, Coupled)
        seq = TokenSequence([1], SamplingParams(), 0, frozenset(), 100)
        assert policy.budgets([seq])[0].depth == parse(name, policy="fixed").num_speculative_tokens


@pytest.mark.parametrize(("name", "kind"), [("cost_model", CostModel), ("dynamic", Dynamic), ("fixed", Fixed)])
def test_policies(name, kind):
    assert isinstance(parse("lookup", policy=name).build()[1], kind)


def test_the_policy_decides_unless_a_number_is_given():
    assert parse("lookup").policy == "cost_model"
    assert parse("lookup", 3).policy == "fixed"
    assert parse("none").policy == "fixed"


def test_ouroboros_is_named_as_its_draft_model():
    config = parse("lookup+ouroboros:model:some/draft@int4")
    assert config.name == "lookup+ouroboros:model:some/draft@int4"
    assert config.models == ("some/draft",)
    assert parse("ouroboros:some/draft") == parse("ouroboros:model:some/draft")


def test_several_drafters():
    config = parse("lookup+model:some/draft@int4")
    assert config.name == "lookup+model:some/draft@int4"
    assert config.models == ("some/draft",)
    drafter, policy, _ = config.build()
    assert isinstance(drafter, Choose)
    assert isinstance(policy, CostModel)


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


@pytest.mark.parametrize(
    ("given", "nodes"),
    [
        ({"method": "eagle3", "policy": "fixed"}, 24),
        ({"method": "eagle3", "num_speculative_tokens": 30}, 30),
        ({"method": "eagle3"}, None),
        ({"method": "eagle3", "tree": "chain", "policy": "fixed"}, None),
        ({"method": "blockwise", "policy": "fixed"}, None),
        ({"method": "medusa", "policy": "fixed", "num_draft_nodes": 7}, 7),
        ({"method": "space", "policy": "fixed"}, 24),
        ({"method": "space", "num_speculative_tokens": 30}, 30),
        ({"method": "space", "num_speculative_tokens": 5, "num_draft_nodes": 8}, 8),
        ({"method": "space"}, None),
    ],
)
def test_nodes_of_a_tree(given, nodes):
    config = parse({**given, "model": "h"})
    assert config.num_draft_nodes == nodes
    assert parse(config.as_dict()) == config


def test_the_method_of_a_head_is_read_from_its_folder(tmp_path):
    for name, method in (("a", "eagle3"), ("b", "mtp"), ("c", "lookahead"), ("d", "space")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(f'{{"paceline_head": 1, "method": "{method}"}}')
    config = parse(f"lookup+head:{tmp_path / 'a'}", 4)
    assert [member.method for member in config.drafter.parts] == ["ngram", "eagle3"]
    assert config.num_draft_nodes == 24
    assert config.models == ()
    drafter, policy, _ = config.build()
    assert isinstance(drafter, Choose)
    budget = policy.budgets([TokenSequence([1], SamplingParams(), 0, frozenset(), 100)])
    assert (budget[0].depth, budget[0].nodes) == (4, 24)
    assert parse(f"eagle:{tmp_path / 'a'}").method == "eagle3"
    assert parse(f"head:{tmp_path / 'b'}").name == f"head:{tmp_path / 'b'}"
    assert parse(f"space:{tmp_path / 'd'}").method == parse(f"head:{tmp_path / 'd'}").method == "space"
    made, policy, _ = parse(f"space:{tmp_path / 'd'}", 4).build()
    assert isinstance(made, Space)
    assert made.top_k == 4
    budget = policy.budgets([TokenSequence([1], SamplingParams(), 0, frozenset(), 100)])
    assert (budget[0].depth, budget[0].nodes) == (4, 24)
    for name, words in (
        (f"eagle:{tmp_path / 'b'}", "of another method"),
        (f"space:{tmp_path / 'b'}", "of another method"),
        (f"head:{tmp_path / 'c'}", "unknown method"),
    ):
        with pytest.raises(ConfigError, match=words):
            parse(name)
    with pytest.raises(ConfigError, match="is not of the method 'eagle'"):
        parse({"method": "eagle", "model": str(tmp_path / "a")}).build()
