"""The tokenizer of a GGUF file, and which of its tokens end an answer."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import Field
from tokenizers import Regex, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..errors import ConfigError
from ..schema import brief, validate
from .checkpoint import refused
from .gguf_file import GGUFFile, read_gguf

_ENTRIES = "tokenizer.ggml."
_CONTROL = 3
_KINDS: Mapping[str, Any] = {
    "model": str, "pre": str, "token_type": list[Annotated[int, Field(ge=0, le=6)]], "scores": list[float],
    "merges": list[str],
}  # fmt: skip
_ENDS_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
_DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _BYTES])


def _words(digits: str) -> pre_tokenizers.PreTokenizer:
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_WORDS % digits), "isolated"), whole])


_SPLITS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": lambda: _BYTES,
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), lambda: _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe"), lambda: _words("{1,3}")),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), lambda: _words("")),
}
"""How text is split before byte pairs are merged, by llama.cpp's name. The merges were learnt on such pieces."""


def described(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What tokenizer.json says of a tokenizer; nothing of one in Python."""
    return json.loads(cast("Any", tokenizer).backend_tokenizer.to_str()) if tokenizer.is_fast else {}


def split_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """The name of how a byte-level tokenizer splits text. Raises `ConfigError` for another one."""
    held = described(tokenizer)
    given = _comparable(held.get("pre_tokenizer")), held.get("model", {}).get("type")
    for name, make in _SPLITS.items():
        if given == (_comparable(json.loads(make().__getstate__())), "BPE"):
            return name
    raise ConfigError(
        "GGUF files are written with byte-level tokenizers that are known by name",
        got=f"{given[1] or type(tokenizer).__name__} with {brief(held.get('pre_tokenizer'))}",
        expected="BPE that splits text as one of " + ", ".join(_SPLITS),
        fix="convert it with llama.cpp's convert_hf_to_gguf.py",
    )  # fmt: skip


def _comparable(splits: Any) -> Any:
    """A pre-tokenizer without what does not change tokens."""
    if isinstance(splits, dict):
        if splits.get("type") == "Sequence" and len(splits["pretokenizers"]) == 1:
            return _comparable(splits["pretokenizers"][0])
        return {key: _comparable(one) for key, one in splits.items() if key != "trim_offsets"}
    return [_comparable(one) for one in splits] if isinstance(splits, list) else splits


def check_tokens(file: GGUFFile) -> None:
    """Raise `ConfigError` for lists and ids of tokens that contradict one another."""
    held = {key.removeprefix(_ENTRIES): one for key, one in file.metadata.items() if key.startswith(_ENTRIES)}
    what = f"of {str(file.path)!r}"
    tokens = held.get("tokens", [])
    validate(list[str], _few(tokens), f"{_ENTRIES}tokens {what}")
    token: Any = Annotated[int, Field(ge=0, lt=len(tokens))]
    for name, one in held.items():
        kind = token if name.endswith("_token_id") and tokens else bool if name.startswith("add_") else _KINDS.get(name)
        if kind is not None:
            validate(kind, _few(one), f"{_ENTRIES}{name} {what}")
    if (got := next(_contradictions(held, len(tokens)), None)) is not None:
        raise ConfigError(
            f"the tokenizer {what} contradicts itself", got=got,
            expected="each token and each merge once, with a type and a score for each token", fix="fetch it again",
        )  # fmt: skip


def _few(value: Any) -> Any:
    """Of an array, whose values are of one type, those that show what it holds; anything else as it is."""
    if not isinstance(value, list) or not value:
        return value
    return value[:1] if isinstance(value[0], str) else [min(value), max(value)]


def _contradictions(held: Mapping[str, Any], num_tokens: int) -> Iterator[str]:
    for name in ("tokens", "merges"):
        counts = Counter(held.get(name, ()))
        yield from (f"{one!r} twice in {_ENTRIES}{name}" for one, count in counts.items() if one and count > 1)
    for name in ("token_type", "scores"):
        if name in held and len(held[name]) != num_tokens:
            yield f"{len(held[name]):,} entries of {_ENTRIES}{name} for {num_tokens:,} tokens"


def ends_of_answers(metadata: Mapping[str, Any]) -> int | list[int] | None:
    """The tokens that end an answer. Older files leave out the end of a turn, which is then known by its text."""
    ends = [metadata.get(f"{_ENTRIES}{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, types = metadata.get(f"{_ENTRIES}tokens", []), metadata.get(f"{_ENTRIES}token_type", [])
    turns = [tokens.index(one) for one in _ENDS_OF_TURN if one in tokens]
    ends += [token for token in turns if types and types[token] == _CONTROL]
    found = [one for one in dict.fromkeys(ends) if one is not None]
    return found[0] if len(found) == 1 else found or None


def open_gguf_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a file alone. Raises `ConfigError` as `gguf_tokenizer` and `check_tokens`."""
    file = read_gguf(path)
    check_tokens(file)
    return gguf_tokenizer(file)


def gguf_tokenizer(file: GGUFFile) -> PreTrainedTokenizerBase:
    """The tokenizer of a file, with its chat template. Raises `ConfigError` for one that is not known."""
    kind, split = (file.metadata.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    if kind not in ("gpt2", "llama") or (kind == "gpt2" and split not in _SPLITS):
        raise ConfigError(
            f"the tokenizer of {str(file.path)!r} is not known", got=f"{kind}, {split}",
            expected="llama, or gpt2 with one of " + ", ".join(_SPLITS),
            fix="pass tokenizer=..., the folder or hub id of the original model",
        )  # fmt: skip
    with refused(f"{str(file.path)!r} has no usable tokenizer", fix="pass tokenizer=..., its folder or hub id"):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            file.path.parent,
            gguf_file=file.path.name,
            model_max_length=file.metadata[f"{file.architecture}.context_length"],
            model_input_names=["input_ids", "attention_mask"],
            clean_up_tokenization_spaces=False,
            # transformers reads this from 5.23 on; llama.cpp adds the token to a "llama" vocabulary that does not say
            add_bos_token=file.metadata.get("tokenizer.ggml.add_bos_token", kind == "llama"),
        )
        if kind == "gpt2":
            tokenizer.backend_tokenizer.pre_tokenizer = _SPLITS[str(split)]()
            if split == "qwen2":
                tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    return tokenizer
