"""Which reader an answer needs: by the marks in the chat template, or by vLLM's name of a parser."""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from ...errors import ConfigError
from ...sampling.pieces import special_ids
from ...schema import brief
from . import gemma, harmony, json_calls, xml_calls
from .reader import Reader, Tools

OFF = "none"
CALLS: dict[str, tuple[type[Reader], tuple[str, ...], tuple[str, ...]]] = {
    "openai": (harmony.Harmony, ("<|channel|>",), ("gpt_oss", "harmony")),
    "deepseek_v32": (xml_calls.DeepSeekXml, ("｜DSML｜",), ("deepseek_v4",)),
    "deepseek_v3": (json_calls.DeepSeek, ("<｜tool▁calls▁begin｜>",), ("deepseek_v31", "deepseek_r1")),
    "kimi_k2": (json_calls.Kimi, ("<|tool_calls_section_begin|>", "tool_declare<|im_middle|>"), ()),
    "minimax_m2": (xml_calls.MiniMax, ("<minimax:tool_call>",), ()),
    "seed_oss": (xml_calls.SeedOSS, ("<seed:tool_call>",), ()),
    "qwen3_coder": (xml_calls.XmlReader, ("<parameter=",), ("qwen3_xml", "step3p5", "nemotron_v3")),
    "glm45": (xml_calls.GLM, ("<arg_key>",), ("glm47", "glm4_moe")),
    "gemma4": (gemma.Gemma4, ("<|tool_call>call:",), ()),
    "functiongemma": (gemma.FunctionGemma, ("<start_function_call>",), ()),
    "mistral": (json_calls.Mistral, ("[TOOL_CALLS]",), ()),
    "cohere_command": (json_calls.Command, ("<|START_ACTION|>",), ("cohere_command3",)),
    "granite": (json_calls.Granite, ("<|tool_call|>", "functools["), ("phi4_mini_json", "granite-20b-fc")),
    "nemotron": (json_calls.Nemotron, ("<TOOLCALL>",), ("nemotron_json",)),
    "jamba": (json_calls.Listed, ("<tool_calls>",), ("hunyuan_a13b", "minimax")),
    "internlm": (json_calls.InternLM, ("<|action_start|>",), ()),
    "pythonic": (json_calls.Pythonic, ("<|tool_call_start|>", "List of tools: ", "<function_calls>"),
                 ("olmo3", "lfm2")),
    "llama3_json": (json_calls.Llama, ("<|python_tag|>", "<|python_start|>", "ipython"),
                    ("llama4_json", "llama4_pythonic", "llama")),
    "hermes": (json_calls.Hermes, ("<tool_call>",),
               ("qwen", "qwen2_5", "qwen_coder", "xlam", "longcat", "gemma", "granite4")),
}  # fmt: skip
"""Readers of calls by name, what is in the templates of their models, and further names. The first that fits counts."""

THOUGHTS: dict[str, tuple[tuple[str, str], tuple[str, ...]]] = {
    "mistral": (("[THINK]", "[/THINK]"), ()),
    "seed_oss": (("<seed:think>", "</seed:think>"), ()),
    "gemma4": (("<|channel>thought", "<channel|>"), ()),
    "cohere_command": (("<|START_THINKING|>", "<|END_THINKING|>"), ("cohere_command3",)),
    "granite": (("Here is my thought process:", "Here is my response:"), ()),
    "qwen3": (
        ("<think>", "</think>"),
        ("deepseek_r1", "deepseek_v3", "deepseek_v31", "glm45", "kimi_k2", "minimax_m2", "ernie45", "holo2", "step3",
         "nemotron_v3", "olmo3", "hermes", "smollm3", "think"),
    ),
}  # fmt: skip
"""What is before and after thoughts, by name, and further names. A template with one of both has such thoughts."""
_HARMONY = {"openai_gptoss", "openai", "gpt_oss", "harmony"}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a request says of its answer.

    tools: those that may be called. most: calls. is_forced: the answer is a call, see `forms.forced_form`.
    is_strict: calls are those of `forms.strict_form` alone. is_formed: its form leaves no place for thoughts.
    shows_special: special tokens are part of the text.
    """

    tools: Tools
    most: int = sys.maxsize
    is_forced: bool = False
    is_strict: bool = False
    is_formed: bool = False
    shows_special: bool = False


@dataclass(frozen=True)
class Format:
    """How a model writes calls and thoughts.

    special: the texts of its special tokens, with their ids. thought_end: the token that ends thoughts, if it is one.
    """

    calls: type[Reader] | None
    thoughts: tuple[str, str] | None
    special: Mapping[str, int]
    thought_end: int | None

    @property
    def thinks(self) -> bool:
        """Whether its answers may begin with thoughts."""
        return self.thoughts is not None or self.calls is harmony.Harmony

    def reader(self, asked: Asked) -> Reader | None:
        """The reader of one answer; None where there is nothing to find."""
        if asked.is_forced:
            return json_calls.Forced(asked.tools, None, (), asked.most)
        thoughts = None if asked.is_formed else self.thoughts
        kind = self.calls if self.calls is not None and (asked.tools or self.calls is harmony.Harmony) else Reader
        if kind is Reader and thoughts is None:
            return None
        hidden = () if asked.shows_special else tuple(self.shown(bool(asked.tools)))
        reader = kind(asked.tools, thoughts, hidden, asked.most)
        if asked.is_strict and kind.marks and self.written is not None:
            reader.opens, reader.bare = (self.written[0],), ""
        return reader

    @property
    def written(self) -> tuple[str, str, str] | None:
        """See `Reader.form`."""
        if self.calls is json_calls.Mistral and "[ARGS]" in self.special:
            return "[TOOL_CALLS]", "NAME[ARGS]", ""
        return self.calls and self.calls.form

    @property
    def free(self) -> list[str]:
        """The special tokens that a text may have."""
        known = (*(self.thoughts or ()), *(self.calls.others if self.calls is harmony.Harmony else ()))
        return [text for text in self.special if any(text in mark for mark in known)]

    def as_lark(self, text: str) -> str:
        """A text with special tokens in llguidance's notation."""
        if not text:
            return ""
        special = sorted((one for one in self.special if one in text), key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, special))})", text) if special else [text]
        return " ".join(f"<[{self.special[one]}]>" if one in special else json.dumps(one) for one in parts if one)

    def shown(self, has_tools: bool) -> dict[str, int]:
        """The special tokens that the reader must see, though they are no text: their ids by their texts."""
        known = list(self.thoughts or ())
        if self.calls is not None and (has_tools or self.calls is harmony.Harmony):
            known += [*self.calls.marks, *self.calls.ends, *self.calls.others]
        return {text: token for text, token in self.special.items() if any(text in mark for mark in known)}


def format_of(
    template: str, tokenizer: PreTrainedTokenizerBase | None, calls: str | None = None, thoughts: str | None = None
) -> Format:
    """The format of a model. calls, thoughts: names of parsers; by default the template tells. Raises `ConfigError`."""
    named_calls = _named("--tool-call-parser", calls, {name: also for name, (_, _, also) in CALLS.items()})
    known = {name: also for name, (_, also) in THOUGHTS.items()} | {"openai_gptoss": tuple(_HARMONY)}
    named_thoughts = _named("--reasoning-parser", thoughts, known)
    told = [kind for kind, marks, _ in CALLS.values() if any(mark in template for mark in marks)]
    kind = told[0] if told and "tools" in template else json_calls.Hermes  # in which tools are told otherwise
    if named_calls is not None:
        kind = None if named_calls == OFF else CALLS[named_calls][0]
    elif thoughts in _HARMONY:
        kind = harmony.Harmony
    pair = next((pair for pair, _ in THOUGHTS.values() if pair[0] in template or pair[1] in template), None)
    if named_thoughts is not None:
        pair = THOUGHTS[named_thoughts][0] if named_thoughts in THOUGHTS else None
    pair = None if kind is harmony.Harmony else pair
    if tokenizer is None:
        return Format(kind, pair, {}, None)
    return Format(kind, pair, _texts(tokenizer), pair and tokenizer.get_vocab().get(pair[1]))


def _named(option: str, name: str | None, known: Mapping[str, Sequence[str]]) -> str | None:
    """The row that has a name, which may be "none"; None for "auto"."""
    if name in (None, "auto"):
        return None
    plain = name.replace("-", "_").lower()
    names = {also.replace("-", "_"): row for row in known for also in (row, *known[row])} | {OFF: OFF}
    if plain not in names:
        expected = ", ".join(["auto", OFF, *sorted({*names} - {OFF})])
        raise ConfigError(f"{option} has no such parser", got=brief(name), expected=expected)
    return names[plain]


def _texts(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """The special tokens by their texts."""
    ids = sorted(special_ids(tokenizer))
    texts = tokenizer.convert_ids_to_tokens(ids)
    return {text: token for text, token in zip(texts, ids, strict=True) if isinstance(text, str) and text}
