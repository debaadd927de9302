"""Structured outputs: which tokens may follow in an answer of a given form, by llguidance.

grammar     [0-9]+(cm|mm)
output      1 2                   the state of the parser between rounds
draft       1 2 ── 5 ── c ── m    on a path it consumes tokens, and rolls them back afterwards
             └──── m
after 5     digits, c, m          `mask`
after c     m, which is forced    `forced`
"""

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from decimal import Decimal
from typing import Any, cast, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..core.structured import StructuredOutputsParams
from ..errors import ConfigError
from ..schema import brief, cut

_Compiler = Callable[[StructuredOutputsParams], tuple[Any, Any]]
_COMPILERS: WeakKeyDictionary[PreTrainedTokenizerBase, dict[object, _Compiler]] = WeakKeyDictionary()
_KEPT = 1 << 18  # characters of all forms whose grammars are kept
_LEAST = 1 << 12  # that a form counts as
_ONE_SPACE = " ?"  # small models can write white space until they run out of tokens


@final
class Grammar:
    """The grammar of one answer, with its parser. Tokens are those of the answer, the prompt left out."""

    def __init__(self, matcher: Any, tokenizer: Any, banned: Sequence[int], eos_ids: frozenset[int]):
        self._matcher, self._tokenizer, self._banned, self._eos_ids = matcher, tokenizer, banned, eos_ids
        self._read: list[int] = []  # the tokens that the parser has consumed

    def mask(self, tokens: list[int]) -> Tensor:
        """Whether each token of the tokenizer may come after these: [Vt], bool, on CPU. Raises `ConfigError`."""
        self._go(tokens)
        mask = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8).bool()
        self._check()
        mask[self._banned] = False
        return mask

    def is_complete(self, tokens: list[int]) -> bool:
        """Whether these tokens are a complete answer that nothing may follow. Raises `ConfigError`."""
        self._go(tokens)
        return bool(self._matcher.is_stopped()) and bool(self._matcher.is_accepting())

    def count_allowed(self, tokens: list[int], path: list[int]) -> int:
        """How many tokens of a path may follow the answer so far; end-of-text tokens never count."""
        self._go(tokens)
        end = next((place for place, token in enumerate(path) if token in self._eos_ids), len(path))
        return int(self._matcher.validate_tokens(path[:end]))

    def forced(self, tokens: list[int]) -> list[int]:
        """The tokens of the text that must follow, as the tokenizer encodes it; empty if there is a choice."""
        self._go(tokens)
        text = b"" if self._matcher.is_stopped() else self._matcher.compute_ff_bytes()
        return list(self._tokenizer.tokenize_bytes(text)) if text else []

    def _go(self, tokens: list[int]) -> None:
        """Move the parser to the end of these tokens."""
        same = min(len(self._read), len(tokens))
        while self._read[:same] != tokens[:same]:
            same -= 1
        if same < len(self._read):
            self._matcher.rollback(len(self._read) - same)
        done = same + self._matcher.try_consume_tokens(tokens[same:]) if same < len(tokens) else same
        self._read = tokens[:done]
        self._check()
        if done < len(tokens):
            raise ConfigError(
                "the answer has a token that its grammar forbids",
                got=f"token {tokens[done]} at {done} in the answer",
                fix="have your logits processors leave -inf as it is",
            )

    def _check(self) -> None:
        if self._matcher.is_error():
            got = _shown(self._matcher.get_error())
            raise ConfigError("this structured output allows no further token", got=got)


def make_grammar(
    params: StructuredOutputsParams,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    eos_ids: frozenset[int],
    ignore_eos: bool,
) -> Grammar:
    """The grammar of one answer; each form is compiled once for a tokenizer.

    vocab_size: V, the logits of the model.
    ignore_eos: the answer continues until nothing may follow.

    Raises `ConfigError` if llguidance is missing or cannot read the tokenizer, for a form that it cannot read, and for
    one that no token can begin.
    """
    compilers, key = _COMPILERS.setdefault(tokenizer, {}), (vocab_size, eos_ids)
    if key not in compilers:
        compilers[key] = _keeping(_compiler(tokenizer, vocab_size, eos_ids))
    matcher, vocabulary = compilers[key](params)
    banned = vocabulary.eos_tokens if ignore_eos or not eos_ids else ()
    return Grammar(matcher.deep_copy(), vocabulary, list(banned), eos_ids)


def _keeping(compiled: _Compiler) -> _Compiler:
    """The same, which keeps the grammars of the last forms, `_KEPT` characters in all; each can cost 500 bytes."""
    held = dict[StructuredOutputsParams, tuple[int, tuple[Any, Any]]]()

    def get(params: StructuredOutputsParams) -> tuple[Any, Any]:
        entry = held.pop(params, None) or (max(_LEAST, len(repr(params))), compiled(params))
        held[params] = entry
        for oldest in list(held)[:-1]:
            if sum(size for size, _ in list(held.values())) <= _KEPT:
                break
            held.pop(oldest, None)
        return entry[1]

    return get


def _compiler(tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_ids: frozenset[int]) -> _Compiler:
    """A function that makes a parser of a form, together with llguidance's vocabulary."""
    try:
        import llguidance
        from llguidance.hf import from_tokenizer
    except ImportError:
        raise ConfigError("structured_outputs need llguidance", fix="pip install 'paceline[structured]'") from None
    try:
        size, ends = max(vocab_size, len(tokenizer)), sorted(eos_ids) or None
        vocabulary = from_tokenizer(cast("Any", tokenizer), n_vocab=size, eos_token=ends)
    except Exception as error:  # of any kind, since it inspects the parts of the tokenizer
        got, expected = f"{type(tokenizer).__name__}: {_shown(error)}", "a fast tokenizer, of bytes or SentencePiece"
        raise ConfigError("the grammars cannot read this tokenizer", got=got, expected=expected) from error

    def compiled(params: StructuredOutputsParams) -> tuple[Any, Any]:
        form = f"StructuredOutputsParams.{params.form}"
        try:
            matcher: Any = llguidance.LLMatcher(vocabulary, _source(llguidance, params), log_level=0)
            refused = matcher.get_error()
        except (ValueError, RecursionError) as error:
            matcher, refused = None, str(error)
        if refused:
            raise ConfigError(f"{form} cannot be read", got=_shown(refused))
        begins = torch.frombuffer(bytearray(matcher.compute_logit_bias()), dtype=torch.uint8)[:vocab_size]
        if matcher.is_error() or not begins.any():
            raise ConfigError(f"{form} matches no text that this model can write")
        return matcher, vocabulary

    return compiled


def _source(llguidance: Any, params: StructuredOutputsParams) -> str:
    """The form in llguidance's own notation. Raises ValueError."""
    if params.regex is not None:
        return llguidance.LLMatcher.grammar_from_regex(params.regex)
    if params.choice is not None:
        return llguidance.grammar_from("choice", json.dumps(params.choice))
    if params.grammar is not None:
        for inner in re.finditer(r"%json\s*", params.grammar):
            with suppress(json.JSONDecodeError):  # llguidance says what is wrong with it
                _prepared(json.JSONDecoder().raw_decode(params.grammar, inner.end())[0])
        return llguidance.grammar_from("grammar", params.grammar)
    schema = json.loads(cast("str", params.json)) if params.json is not None else {"type": "object"}
    pattern = params.whitespace_pattern
    if pattern is None and not params.disable_any_whitespace:
        pattern = _ONE_SPACE
    options = {"whitespace_flexible": not params.disable_any_whitespace, "whitespace_pattern": pattern}
    schema = json.dumps(_prepared(schema, params.disable_additional_properties))
    return llguidance.LLMatcher.grammar_from_json_schema(schema, defaults=options)


_MOST = 1 << 53
_EXACT = "Expected: below 2**53, of at most 15 digits. Fix: make it a string, or leave it out"
_NOTES = ("default", "examples")  # keys of a JSON schema that say nothing about the answer
_VALUES = ("const", "enum")  # those that hold no schemas
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # those that hold them by name


def _prepared(schema: Any, closes: bool = False) -> Any:
    """The schema without its notes. Raises ValueError for a number that would become another.

    closes: whether to set `additionalProperties: false` in every object that lists properties and does not set it.
        Parts of `allOf` stay open: each of them lists some properties of one object.
    """
    if isinstance(schema, list):
        return [_prepared(part, closes) for part in schema]
    if not isinstance(schema, dict):
        return _checked(schema)
    closes = closes and "allOf" not in schema
    prepared = dict[str, Any]()
    for key, value in schema.items():
        if key in _VALUES:
            prepared[key] = _checked(value)
        elif key in _NAMED and isinstance(value, dict):
            prepared[key] = {name: _prepared(part, closes) for name, part in value.items()}
        elif key not in _NOTES:
            prepared[key] = _prepared(value, closes)
    return {"additionalProperties": False, **prepared} if closes and "properties" in prepared else prepared


def _checked(value: Any) -> Any:
    """The value. Raises ValueError as `_prepared`."""
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            _checked(part)
    elif type(value) in (int, float) and not _is_exact(value):
        raise ValueError(f"the number {brief(value)}. {_EXACT}")
    return value


def _is_exact(number: float) -> bool:
    """Whether llguidance, which computes in float64 and rounds on the way, keeps this number."""
    if not abs(number) < _MOST:
        return False
    _, digits, exponent = Decimal(repr(number)).as_tuple()
    return int("".join(map(str, digits))) < _MOST and cast("int", exponent) >= -22


def _shown(error: object) -> str:
    """An error of llguidance in one line, without the state of its parser."""
    return cut(" ".join(str(error).partition("<state>")[0].split()), 300)
