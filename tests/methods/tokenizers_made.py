"""Small tokenizers of the two families, trained on a few sentences, and models that read them."""

import json
from functools import cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from paceline.target import LoadedModel, wrap_model
from tests.tiny import tiny_model

TEXT = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps over there in the sun.",
    "def mean(values):\n    return sum(values) / len(values)  # of the values\n",
    "The town lies at the end of the valley, where most of the people work in the mill.",
]


def finished(raw: Tokenizer, **names: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=raw, clean_up_tokenization_spaces=False, **names)


@cache
def byte_level(size: int = 420, prefix: bool = False, special: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """Byte-level BPE as of GPT-2; `prefix`: with a space before every text."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(
            vocab_size=size,
            initial_alphabet=alphabet,
            special_tokens=["<pad>", special, "<image>"],
            show_progress=False,
        ),
    )
    return finished(raw, pad_token="<pad>", eos_token=special)


@cache
def sentencepiece(size: int = 200, prefix: bool = True) -> PreTrainedTokenizerFast:
    """BPE as of Llama 2: U+2581 for spaces, one before the text, byte fallback, <s> before every text."""
    pieces = Tokenizer(models.BPE())
    pieces.normalizer = normalizers.Replace(" ", "\u2581")
    pieces.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=size, show_progress=False))
    trained = json.loads(pieces.to_str())["model"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *trained["vocab"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge) for merge in trained["merges"]]
    raw = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    spaces = normalizers.Replace(" ", "\u2581")
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces]) if prefix else spaces
    raw.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.post_processor = _begins_with("<s>", 1)
    return finished(raw, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@cache
def metaspace(size: int = 300) -> PreTrainedTokenizerFast:
    """Unigram as of T5 and Gemma: a Metaspace before each word, byte fallback."""
    pieces = Tokenizer(models.Unigram())
    pieces.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    pieces.train_from_iterator(TEXT, trainers.UnigramTrainer(vocab_size=size, show_progress=False, unk_token="<unk>"))
    learned = [(piece, score) for piece, score in json.loads(pieces.to_str())["model"]["vocab"] if piece != "<unk>"]
    bytes_ = [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    raw = Tokenizer(models.Unigram([("<unk>", 0.0), ("</s>", 0.0), *bytes_, *learned], 0, byte_fallback=True))
    raw.pre_tokenizer = pieces.pre_tokenizer
    raw.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    return finished(raw, unk_token="<unk>", eos_token="</s>")


def _begins_with(token: str, index: int):
    from tokenizers.processors import TemplateProcessing

    return TemplateProcessing(single=f"{token} $A", special_tokens=[(token, index)])


@cache
def permuted(shift: int = 7) -> PreTrainedTokenizerFast:
    """The tokens of `byte_level` under other ids, all but the first three."""
    state = json.loads(byte_level().backend_tokenizer.to_str())
    vocab, size = state["model"]["vocab"], len(byte_level())
    state["model"]["vocab"] = {
        token: index if index < 3 else 3 + (index - 3 + shift) % (size - 3) for token, index in vocab.items()
    }
    return finished(Tokenizer.from_str(json.dumps(state)), pad_token="<pad>", eos_token="<|im_end|>")


TOKENIZERS = {
    "byte level": byte_level,
    "byte level, larger": lambda: byte_level(520),
    "byte level, prefixed": lambda: byte_level(440, True, "</s>"),
    "sentencepiece": sentencepiece,
    "sentencepiece, no prefix": lambda: sentencepiece(150, False),
    "metaspace": metaspace,
    "permuted": permuted,
}


@cache
def reader(name: str, seed: int = 0, **overrides: object) -> LoadedModel:
    """A random model of this tokenizer, its vocabulary padded by five rows."""
    tokenizer = TOKENIZERS[name]()
    return wrap_model(tiny_model("llama", seed=seed, vocab_size=len(tokenizer) + 5, **overrides), tokenizer)
