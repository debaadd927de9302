"""A tokenizer of bytes, forms of answers, and a slow oracle of them: `regex`, which knows partial matches."""

from functools import cache
from string import printable

import regex
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from paceline import SamplingParams, StructuredOutputsParams
from paceline.core.request import TokenSequence
from paceline.sampling.grammar import Grammar, make_grammar
from tests.helpers import SPECIAL, VOCAB, byte_pairs, loaded, sequence

END = frozenset({2})
_RARE = "`^~@$|#<>&?Q "
_MERGES = ["a b", "1 2", "c m", '" :', '{ "', "a l", "al o", "0 0", "ab ab", '" ,', "m m"]


@cache
def byte_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Three special tokens, most printable bytes, and some pairs, so that one text may be written in several ways."""
    pairs = [(left, right) for left, right in (merge.split() for merge in _MERGES)]
    letters = [c for c in printable[:95] if c not in _RARE]
    tokens = [*SPECIAL.values(), *letters, "Ġ", *(left + right for left, right in pairs)]
    assert len(tokens) == VOCAB
    return byte_pairs(tokens, pairs, chat_template=chat_template, **SPECIAL)


_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "yy", "ab12"]}},
    "required": ["a", "b"],
}
_TIGHT = {"disable_any_whitespace": True, "disable_additional_properties": True}

FORMS: dict[str, tuple[dict, str]] = {
    "json": ({"json": _SCHEMA, **_TIGHT}, r'\{"a":(0|[1-9][0-9]?),"b":("x"|"yy"|"ab12")\}'),
    "regex": ({"regex": "[0-9]{1,3}(cm|mm|m)(,[0-9]{1,3}(cm|mm|m))*"}, "[0-9]{1,3}(cm|mm|m)(,[0-9]{1,3}(cm|mm|m))*"),
    "choice": ({"choice": ["abab", "abc", "al", 'a"l/\\o']}, r'abab|abc|al|a"l/\\o'),
    "gbnf": ({"grammar": 'root ::= item ("," item)*\nitem ::= "12" | "alo" | "0"+'}, "(12|alo|0+)(,(12|alo|0+))*"),
    "lark": ({"grammar": 'start: "(" start ")" | "ab"'}, r"(?P<s>\((?&s)\)|ab)"),
    "json_object": ({"json_object": True, "whitespace_pattern": " ?"}, ""),
}
"""The options of each form, and the regex of the same texts; "" where there is none."""
WITH_ORACLE = [name for name, (_, pattern) in FORMS.items() if pattern]


def may_be(pattern: str, text: str) -> bool:
    """Whether a text, or some longer one that begins with it, has the form."""
    return regex.fullmatch(pattern, text, partial=True) is not None


def is_whole(pattern: str, text: str) -> bool:
    return regex.fullmatch(pattern, text) is not None


def is_over(pattern: str, text: str) -> bool:
    """Whether no longer text that begins with this one has the form."""
    return not any(may_be(pattern, text + one) for one in printable)


@cache
def pieces() -> list[str]:
    """The text of each token; special ones have none."""
    return [byte_tokenizer().decode([token]) if token > 2 else "" for token in range(VOCAB)]


def possible(pattern: str, text: str) -> set[int]:
    """The tokens that may come next, by trying each of them; special ones left out."""
    return {token for token, piece in enumerate(pieces()) if piece and may_be(pattern, text + piece)}


def forced(pattern: str, text: str) -> str:
    """What must follow."""
    more = ""
    while (
        not is_whole(pattern, text + more)
        and len(ways := [c for c in printable if may_be(pattern, text + more + c)]) == 1
    ):
        more += ways[0]
    return more


def allowed(pattern: str, tokens: list[int]) -> set[int]:
    """All tokens that may come next.

    Text that must follow is written as the tokenizer writes it. Its last tokens are left open where they could be the
    beginning of a longer one.
    """
    text = "".join(pieces()[token] for token in tokens)
    if more := forced(pattern, text):
        written = byte_tokenizer().encode(more)
        for count in range(len(written) + 1):
            before = text + "".join(pieces()[token] for token in written[:count])
            end = "".join(pieces()[token] for token in written[count:])
            longer = [t for t in possible(pattern, before) if pieces()[t].startswith(end) and pieces()[t] != end]
            if end and longer:
                written = written[:count]
                break
        if written:
            return {written[0]}
    return possible(pattern, text) | (END if is_whole(pattern, text) else set())


class Guided:
    """The oracle as a logits processor."""

    def __init__(self, pattern: str, prompt_length: int):
        self.pattern, self.prompt_length = pattern, prompt_length

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        kept = sorted(allowed(self.pattern, ids[0, self.prompt_length :].tolist()))
        return torch.full_like(scores, -torch.inf).index_copy_(1, torch.tensor(kept), scores[:, kept])


def grammar_of(form: str, **options) -> Grammar:
    return make_grammar(
        StructuredOutputsParams(**FORMS[form][0]), byte_tokenizer(), VOCAB, END, **{"ignore_eos": False, **options}
    )


def formed(form: str, ids: list[int], temperature: float = 0.0, max_tokens: int = 24, **options) -> TokenSequence:
    """A request for an answer of a form, as the front door makes it."""
    params = SamplingParams(
        temperature=temperature, max_tokens=max_tokens, structured_outputs=FORMS[form][0], **options
    )
    seq = sequence(loaded(), ids, params, eos_ids=END)
    seq.grammar = grammar_of(form, ignore_eos=params.ignore_eos)
    return seq
