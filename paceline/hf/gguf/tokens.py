"""The tokenizer of a GGUF file, and which of its tokens end an answer."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import Field
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ...errors import ConfigError
from ...schema import brief, validate
from ...system.hardware import return_free_memory
from ..checkpoint import refused
from .file import GGUFFile, read_gguf

_ENTRIES = "tokenizer.ggml."
_CONTROL, _USER_DEFINED = 3, 4
_KINDS: Mapping[str, Any] = {
    "model": str, "pre": str, "token_type": list[Annotated[int, Field(ge=0, le=6)]], "scores": list[float],
    "merges": list[str],
}  # fmt: skip
_ENDS_OF_TURN = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<end_of_utterance>"),
    *("<|return|>", "<|call|>"),
)
_OF_OTHERS = ("remove_extra_whitespaces", "precompiled_charsmap")  # add_sep_token is about pairs of texts
_SPACE = "\u2581"  # in pieces
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
_ALPHABET = frozenset(pre_tokenizers.ByteLevel.alphabet())


@dataclass(frozen=True)
class _Split:
    """How text is split before byte pairs are merged. The merges were learnt on such pieces.

    pattern: of a piece; None: GPT-2's. digits: each is a piece.
    whole: a piece that is a token is not merged from its bytes, and texts begin with bos, unless the file says no.
    """

    pattern: str | None = None
    digits: bool = False
    whole: bool = False
    normalizer: normalizers.Normalizer | None = None

    @property
    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        if self.pattern is None:
            apart = pre_tokenizers.Digits(individual_digits=True)
            return pre_tokenizers.Sequence([apart, _BYTES]) if self.digits else _BYTES
        whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(self.pattern), "isolated"), whole])


def _words(digits: str = "", letter: str = r"\p{L}") -> str:
    return (
        rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[{letter}]+|\p{{N}}{digits}| ?[^\s{letter}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _cased(digits: str, endings: str) -> str:
    """Small letters behind capital ones; a capital letter behind a small one begins another piece."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    words = "|".join(rf"[^\r\n\p{{L}}\p{{N}}]?{upper}{a}{lower}{b}{endings}" for a, b in ("*+", "+*"))
    return words + rf"|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


_SPLITS: dict[str, _Split] = {
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "phi-2", "exaone4", "trillion"), _Split()),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _Split(digits=True)
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"), _Split(_words("{1,3}"), whole=True)
    ),
    **dict.fromkeys(("smaug-bpe", "dbrx"), _Split(_words("{1,3}"))),
    **dict.fromkeys(("qwen2",), _Split(_words(), normalizer=normalizers.NFC())),
    "deepseek-r1-qwen": _Split(_words()),
    "qwen35": _Split(_words(letter=r"\p{L}\p{M}"), normalizer=normalizers.NFC()),
    "tekken": _Split(_cased("", ""), whole=True),
    **dict.fromkeys(("gpt-4o", "llama4"), _Split(_cased("{1,3}", _ENDINGS + "?"))),
}
"""By llama.cpp's name."""
_PROOFS = {"llama-bpe": (128_000, "<|begin_of_text|>"), "qwen2": (151_644, "<|im_start|>")}
"""The id of a token that only vocabularies of this split have; older files name no split."""


def described(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What tokenizer.json says of a tokenizer; nothing of one in Python."""
    return json.loads(cast("Any", tokenizer).backend_tokenizer.to_str()) if tokenizer.is_fast else {}


def split_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """The name of how a byte-level tokenizer splits text. Raises `ConfigError` for another one."""
    held = described(tokenizer)
    model: dict[str, Any] = held.get("model", {})
    splitter = _comparable(held.get("pre_tokenizer")), model.get("type")
    rest = bool(model.get("ignore_merges")), held.get("normalizer") is not None
    for name, split in _SPLITS.items():
        known = _comparable(json.loads(cast("Any", split.pre_tokenizer).__getstate__())), "BPE"
        if (splitter, rest) == (known, (split.whole, split.normalizer is not None)):
            return name
    raise ConfigError(
        "GGUF files are written with byte-level tokenizers that are known by name",
        got=f"{splitter[1] or type(tokenizer).__name__} with {brief(held.get('pre_tokenizer'))}",
        expected="BPE that splits text as one of " + ", ".join(_SPLITS),
        fix="convert it with llama.cpp's convert_hf_to_gguf.py",
    )  # fmt: skip


def _comparable(splits: Any) -> Any:
    """A pre-tokenizer without what does not change tokens."""
    if isinstance(splits, dict):
        if splits.get("type") == "Sequence" and len(splits["pretokenizers"]) == 1:
            return _comparable(splits["pretokenizers"][0])
        return {key: _comparable(value) for key, value in splits.items() if key != "trim_offsets"}
    if isinstance(splits, str):
        return splits.replace(r"[\p{L}]", r"\p{L}")  # a set of one class
    return [_comparable(part) for part in splits] if isinstance(splits, list) else splits


def _entries(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What the metadata says of the tokenizer, with what llama.cpp takes for granted of SentencePiece."""
    held = {key.removeprefix(_ENTRIES): value for key, value in metadata.items() if key.startswith(_ENTRIES)}
    roles = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return roles | held if held.get("model") == "llama" else held


def check_tokens(file: GGUFFile) -> None:
    """Raise `ConfigError` for lists and ids of tokens that contradict one another."""
    held, owner = _entries(file.metadata), f"of {str(file.path)!r}"
    tokens = held.get("tokens", [])
    validate(list[str], _few(tokens), f"{_ENTRIES}tokens {owner}")
    token: Any = Annotated[int, Field(ge=0, lt=len(tokens))]
    for name, value in held.items():
        kind = token if name.endswith("_token_id") and tokens else bool if name.startswith("add_") else _KINDS.get(name)
        if kind is not None:
            validate(kind, _few(value), f"{_ENTRIES}{name} {owner}")
    if (got := next(_contradictions(held, len(tokens)), None)) is not None:
        raise ConfigError(
            f"the tokenizer {owner} contradicts itself", got=got,
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
        yield from (f"{entry!r} twice in {_ENTRIES}{name}" for entry, count in counts.items() if entry and count > 1)
    for name in ("token_type", "scores"):
        if name in held and len(held[name]) != num_tokens:
            yield f"{len(held[name]):,} entries of {_ENTRIES}{name} for {num_tokens:,} tokens"


def ends_of_answers(metadata: Mapping[str, Any]) -> int | list[int] | None:
    """The tokens that end an answer. Older files leave out the end of a turn, which is then known by its text."""
    held = _entries(metadata)
    ends = [held.get(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, types = held.get("tokens", []), held.get("token_type", [])
    texts = [text for text in _ENDS_OF_TURN if text in tokens]
    if {"<|return|>", "<|call|>"} <= {*texts}:  # where <|end|> ends a message, and others follow
        texts = [text for text in texts if text != "<|end|>"]
    turns = [tokens.index(text) for text in texts]
    ends += [token for token in turns if not types or types[token] in (_CONTROL, _USER_DEFINED)]
    ids = [token for token in dict.fromkeys(ends) if token is not None]
    return ids[0] if len(ids) == 1 else ids or None


def open_gguf_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a file alone. Raises `ConfigError` as `gguf_tokenizer` and `check_tokens`."""
    file = read_gguf(path)
    check_tokens(file)
    return gguf_tokenizer(file)


def gguf_tokenizer(file: GGUFFile) -> PreTrainedTokenizerBase:
    """The tokenizer of a file, with its chat template. Raises `ConfigError` for one that is not known."""
    held = _entries(file.metadata)
    kind, named = held.get("model"), _named_split(held)
    if kind not in ("gpt2", "llama") or (kind == "gpt2" and named not in _SPLITS):
        raise _unknown(file, f"{kind}, {named}", "llama, or gpt2 with one of " + ", ".join(_SPLITS))
    split = None if kind == "llama" else _SPLITS[str(named)]
    if "token_type" not in held and (split is None or split.whole):
        raise _unknown(file, f"no {_ENTRIES}token_type", "the types of tokens, which say which ones are never split")
    if split is None and not {"scores", "merges"} & held.keys():
        raise _unknown(file, f"no {_ENTRIES}scores", "the scores of pieces, which say what is merged first")
    for name in _OF_OTHERS if split is None else (*_OF_OTHERS, "add_space_prefix"):
        if held.get(name):
            raise _unknown(file, f"{_ENTRIES}{name} {brief(held[name])}", f"no {name} with a tokenizer of kind {kind}")
    with refused(f"{str(file.path)!r} has no usable tokenizer", fix="pass tokenizer=..., its folder or hub id"):
        tokenizer = _sentencepiece(held) if split is None else _byte_level(held, split)
        return_free_memory()  # of the merges
        _add_tokens(tokenizer, held, file.architecture == "phi3" and split is None)
        roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        ids = {role: held.get(f"{name}_token_id") for role, name in roles.items()}
        return PreTrainedTokenizerFast(
            tokenizer_object=_Uncopied(tokenizer),
            chat_template=file.metadata.get("tokenizer.chat_template"),
            model_max_length=file.metadata[f"{file.architecture}.context_length"],
            model_input_names=["input_ids", "attention_mask"],
            clean_up_tokenization_spaces=False,
            # llama.cpp adds the token where such a file does not say
            add_bos_token=held.get("add_bos_token", split is None or split.whole),
            add_eos_token=held.get("add_eos_token", False),
            **{
                f"{role}_token": None if token_id is None else held["tokens"][token_id]
                for role, token_id in ids.items()
            },
        )


class _Uncopied:
    """Gives transformers a tokenizer as it is, where it would copy one through JSON."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def __deepcopy__(self, memo: object) -> Tokenizer:
        return self._tokenizer


def _unknown(file: GGUFFile, got: str, expected: str) -> ConfigError:
    return ConfigError(
        f"the tokenizer of {str(file.path)!r} is not known", got=got, expected=expected,
        fix="pass tokenizer=..., the folder or hub id of the original model",
    )  # fmt: skip


def _named_split(held: Mapping[str, Any]) -> str | None:
    """The split that a file names; for an older one, that whose vocabulary it has."""
    named, tokens = held.get("pre"), held.get("tokens", [])
    proven = (name for name, (place, token) in _PROOFS.items() if tokens[place : place + 1] == [token])
    return next(proven, named) if named in (None, "default") else named


def _byte_level(held: dict[str, Any], split: _Split) -> Tokenizer:
    tokens, merges = held["tokens"], [tuple(merge.split(" ")) for merge in held.get("merges", ())]
    if "token_type" not in held:  # what no merge gives is never split, either
        merged = {left + right for left, right in merges} | _ALPHABET
        held["token_type"] = [1 if token in merged else _CONTROL for token in tokens]
    tokenizer = Tokenizer(BPE(_places(tokens), merges, ignore_merges=split.whole))
    tokenizer.pre_tokenizer = split.pre_tokenizer  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    if split.normalizer is not None:
        tokenizer.normalizer = split.normalizer  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer


def _sentencepiece(held: Mapping[str, Any]) -> Tokenizer:
    """Pieces are merged to longer ones, the best first; a character that is no piece becomes its bytes.

    A space is put before a text, and behind each token that is never split, unless the file says no.
    """
    tokens, unknown = held["tokens"], held.get("unknown_token_id")
    merges = (
        [tuple(merge.split(" ")) for merge in held["merges"]] if "merges" in held else _merges(tokens, held["scores"])
    )
    unknown = None if unknown is None else tokens[unknown]
    tokenizer = Tokenizer(BPE(_places(tokens), merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    before: list[Any] = [normalizers.Replace(" ", _SPACE)]
    after: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if held.get("add_space_prefix", True):
        before.insert(0, normalizers.Prepend(_SPACE))
        after.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(before)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Sequence(after)  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer


def _merges(pieces: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece, those of the best score first.

    Converted without tokenizer.model, a file has one score for all, and pieces in the order of their merges.
    """
    known = {piece: piece for piece in pieces}  # so that pairs share their strings
    merges = list[tuple[str, str]]()
    for place in sorted(range(len(pieces)), key=scores.__getitem__, reverse=True):
        piece = pieces[place]
        for cut in range(len(piece) - 1, 0, -1):
            if (left := known.get(piece[:cut])) is not None and (right := known.get(piece[cut:])) is not None:
                merges.append((left, right))
    return merges


def _places(tokens: Sequence[str]) -> dict[str, int]:
    return {token: place for place, token in enumerate(tokens)}


def _add_tokens(tokenizer: Tokenizer, held: Mapping[str, Any], strips: bool) -> None:
    """Tokens that are never split. strips: Phi-3's take the spaces behind them, but for those of whole texts."""
    kept = ("<s>", "<unk>", "<|endoftext|>")
    for kind, add in ((_CONTROL, tokenizer.add_special_tokens), (_USER_DEFINED, tokenizer.add_tokens)):
        own = [text for text, its in zip(held["tokens"], held["token_type"], strict=True) if its == kind]
        add([AddedToken(text, normalized=False, rstrip=strips and text not in kept) for text in own])
