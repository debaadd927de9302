"""The parser of an answer: after every path it allows what trying each token allows, wherever it was before."""

import random
from decimal import Decimal
from weakref import WeakKeyDictionary

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from paceline import StructuredOutputsParams
from paceline.errors import ConfigError
from paceline.sampling import grammar as grammars
from paceline.sampling.grammar import Grammar, make_grammar
from tests.helpers import VOCAB
from tests.structured.common import (
    END,
    FORMS,
    WITH_ORACLE,
    allowed,
    byte_tokenizer,
    grammar_of,
    is_over,
    pieces,
    possible,
)


def wander(form: str, steps: int = 60) -> None:
    """Visit prefixes of many answers in any order, as the nodes of trees: further down, up again, to a sibling."""
    rng, pattern, grammar = random.Random(form), FORMS[form][1], grammar_of(form)
    known: list[list[int]] = [[]]
    for _ in range(steps):
        tokens = rng.choice(known[-8:])
        kept = allowed(pattern, tokens)
        text = "".join(pieces()[token] for token in tokens)
        assert grammar.is_complete(tokens) == (is_over(pattern, text) and bool(tokens)), text
        assert set(grammar.mask(tokens).nonzero().flatten().tolist()) == kept, text
        if further := sorted(kept - END):
            known.append([*tokens, rng.choice(further)])
            other = rng.randrange(3, 97)
            text += pieces()[known[-1][-1]]
            assert grammar.count_allowed(tokens, [known[-1][-1], other]) == 1 + (other in possible(pattern, text))


@pytest.mark.parametrize("form", WITH_ORACLE)
def test_every_path_allows_what_trying_allows(form):
    wander(form)


@pytest.mark.parametrize("form", WITH_ORACLE)
def test_a_state_that_is_not_taken_back_is_found_out(form, monkeypatch):
    """Mutant: what was read for one path stays for the next, its sibling."""

    def leaking(self: Grammar, tokens: list[int]) -> None:
        self._matcher.try_consume_tokens(tokens[len(self._read) :])
        self._read = list(tokens)

    monkeypatch.setattr(Grammar, "_go", leaking)
    with pytest.raises(AssertionError):
        wander(form)


def test_an_answer_is_read_once(monkeypatch):
    """The parser goes on from where it is: each token of the answer is read once, whatever is looked at beside it."""
    grammar, read = grammar_of("regex"), list[int]()

    class Counting:
        def __init__(self, matcher):
            self.matcher = matcher

        def __getattr__(self, name):
            return getattr(self.matcher, name)

        def try_consume_tokens(self, tokens):
            read.extend(tokens)
            return self.matcher.try_consume_tokens(tokens)

    grammar._matcher = Counting(grammar._matcher)
    answer = byte_tokenizer().encode("12cm,3mm,100m,55mm,7m,")
    for length in range(len(answer) + 1):
        grammar.mask(answer[:length])
        grammar.count_allowed(answer[:length], [5, 6])
        grammar.is_complete(answer[:length])
        grammar.forced(answer[:length])
    assert read == answer


@pytest.mark.parametrize(
    ("form", "before", "forced"),
    [
        ("json", "", '{"a":'),
        ("json", '{"a":7', ""),
        ("json", '{"a":7,', '"b":"'),
        ("json", '{"a":7,"b":"y', 'y"}'),
        ("choice", "abc", ""),
        ("lark", "(ab", ")"),
        ("json_object", "", "{"),
    ],
)
def test_what_is_forced(form, before, forced):
    encode = byte_tokenizer().encode
    assert grammar_of(form).forced(encode(before)) == encode(forced)


def test_an_end_that_is_ignored():
    digits = byte_tokenizer().encode("12cm")
    assert grammar_of("regex").mask(digits)[2]
    assert not grammar_of("regex", ignore_eos=True).mask(digits)[2]


def test_several_ends_and_tokens_without_text():
    """Each token of end is allowed where the answer may end; rows of the output head beyond the tokenizer never are."""
    grammar = make_grammar(StructuredOutputsParams(regex="1+"), byte_tokenizer(), 120, frozenset({1, 2}), False)
    one = byte_tokenizer().encode("1")
    assert grammar.mask([]).nonzero().flatten().tolist() == one
    assert grammar.mask(one).nonzero().flatten().tolist() == [1, 2, *one]
    assert len(grammar.mask(one)) == 120


def test_a_tokenizer_of_sentencepiece():
    """Spaces are written as a sign of their own, and bytes as tokens of their names."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "\u2581a", "ab"]
    pairs = [("\u2581", "a"), ("a", "b")]
    raw = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, pairs, unk_token="<unk>", byte_fallback=True))
    raw.normalizer = normalizers.Replace(" ", "\u2581")
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    raw.decoder = decoders.Sequence(steps)
    made = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>")
    grammar = make_grammar(StructuredOutputsParams(regex="a( a|é)b"), made, len(words), END, False)
    read = made.encode("a")
    assert {words[token] for token in grammar.mask(read).nonzero()} == {"\u2581", "\u2581a", "<0x20>", "<0xC3>"}
    read = [*read, words.index("<0xC3>")]
    assert {words[token] for token in grammar.mask(read).nonzero()} == {"<0xA9>"}
    assert made.decode(grammar.forced([*read, words.index("<0xA9>")])) == "b"


def reads(options: dict, text: str) -> bool:
    """Whether a text is an answer of a form."""
    grammar = make_grammar(StructuredOutputsParams(**options), byte_tokenizer(), VOCAB, END, False)
    tokens = byte_tokenizer().encode(text)
    return grammar.count_allowed([], tokens) == len(tokens) and bool(
        grammar.mask(tokens)[2] or not grammar.mask(tokens).any()
    )


BIG = 2**53 + 1
CHANGED = {
    "enum": {"enum": [BIG]},
    "const": {"const": -BIG},
    "that saturates": {"const": 2**63},
    "of a nested object": {"const": {"a": [{"default": BIG}]}},
    "maximum": {"type": "integer", "maximum": BIG},
    "minimum": {"type": "number", "minimum": 2**53},
    "exclusiveMinimum": {"type": "integer", "exclusiveMinimum": 2**53},
    "multipleOf": {"type": "integer", "multipleOf": BIG},
    "of a property called default": {"properties": {"default": {"const": BIG}}},
    "of a definition": {"$ref": "#/$defs/examples", "$defs": {"examples": {"const": BIG}}},
    "of an item": {"anyOf": [{"items": {"enum": [1, BIG]}}]},
    "infinite": {"maximum": float("inf")},
    "an exponent": {"const": 1e22},
    "too many digits": {"const": 0.00010151253021450147},
    "beyond all": {"minimum": 10**400},
}


@pytest.mark.parametrize("schema", CHANGED.values(), ids=CHANGED)
def test_numbers_that_would_become_others_are_refused(schema):
    with pytest.raises(ConfigError, match=r"the number .*Expected: below 2.*digits"):
        make_grammar(StructuredOutputsParams(json=schema), byte_tokenizer(), VOCAB, END, False)


@pytest.mark.parametrize("number", [2**53 - 1, 1 - 2**53, 0, 100.5, 1e-7, -0.25, 123456789.012345])
def test_other_numbers_are_kept(number):
    text = format(Decimal(repr(number)), "f")
    for key, fits in {"const": True, "minimum": True, "maximum": True, "exclusiveMinimum": False}.items():
        assert reads({"json": {"type": "number", key: number} if key != "const" else {key: number}}, text) == fits, key


def test_numbers_without_effect_may_be_any():
    notes = {"default": BIG, "examples": [1e300 * 1e300, {"a": 10**400}]}
    assert reads(
        {"json": {"properties": {"a": {"enum": [True, 7], **notes}}, "required": ["a"], **notes}}, '{"a":true}'
    )


_ANY = {"type": "object", "properties": {"a": {"const": 7}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("options", "least", "most"),
    [
        ({}, 0, 1),
        ({"disable_any_whitespace": True}, 0, 0),
        ({"whitespace_pattern": "[ ]{1,2}"}, 0, 2),
        ({"whitespace_pattern": " ?", "disable_any_whitespace": True}, 0, 1),
        ({"whitespace_pattern": " *"}, 0, 9),
    ],
)
def test_white_space_of_json(options, least, most):
    """One space at most, unless a pattern says otherwise."""
    for count in range(10):
        for form in ({"json": _ANY}, {"json_object": True}):
            gap = " " * count
            is_read = reads({**form, **options}, f'{{{gap}"a"{gap}:{gap}7{gap}}}')
            assert is_read == (least <= count <= most), (count, form)


def test_a_token_that_was_forbidden():
    """A processor of the user's may allow again what the grammar forbids; the answer cannot go on from there."""
    grammar = grammar_of("json")
    with pytest.raises(ConfigError, match=r"forbids.*token 8 at 1"):
        grammar.mask([byte_tokenizer().encode("{")[0], 8, 9])
    assert grammar.mask([]).any(), "and others are not harmed"


def test_grammars_are_kept_while_their_forms_are_short_together(monkeypatch):
    """Else a server would keep 85 MB for each regex of 200,000 characters."""
    compiled = list[str]()

    def compiler(*given, make=grammars._compiler):
        compile_one = make(*given)
        return lambda params: (compiled.append(params.regex[-1]), compile_one(params))[1]

    monkeypatch.setattr(grammars, "_compiler", compiler)
    monkeypatch.setattr(grammars, "_COMPILERS", WeakKeyDictionary())
    monkeypatch.setattr(grammars, "_KEPT", 400)
    monkeypatch.setattr(grammars, "_LEAST", 1)
    for text in ("a", "b", "a", "c", "a", "b", "x" * 1000, "x" * 1000, "a"):
        make_grammar(StructuredOutputsParams(regex=text), byte_tokenizer(), 100, END, False)
    assert "".join(compiled) == "abcbxa"
