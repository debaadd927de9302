"""A GGUF file that contradicts itself is refused by name: it never loads as another model."""

import math
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import PacelineError
from paceline.hf.gguf.load import open_gguf
from paceline.hf.twin import plain_twin
from paceline.kernels.library import BlockFormat
from tests.gguf_files import vocabulary, write_gguf
from tests.gguf_raw import ARRAY, BOOL, FLOAT32, INT32, STRING, UINT64, RawGGUF, Tensor
from tests.tiny import tiny_model

SIZE = len(vocabulary())
EPS, BASE, TOKENS = "llama.attention.layer_norm_rms_epsilon", "llama.rope.freq_base", "tokenizer.ggml.tokens"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    model = tiny_model("llama", vocab_size=SIZE, intermediate_size=64, hidden_size=32, pad_token_id=2)
    more = {"llama.vocab_size": SIZE, "general.alignment": 32, "tokenizer.ggml.add_bos_token": False}
    more |= {"tokenizer.ggml.scores": [0.5] * SIZE}
    return write_gguf(tmp_path_factory.mktemp("whole") / "tiny.gguf", model, more=more)


def opened(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor], Any]:
    """All that a file is read as."""
    model, tokenizer = open_gguf(path, lambda config: None)
    ids = [getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos", "pad", "unk")]
    read = {"vocabulary": tokenizer.get_vocab(), "ids": ids, "encoded": tokenizer("hello  1<|im_end|>").input_ids}
    return model.config.to_dict(), model.state_dict(), read


def put(key: str, kind: int, value: Any):
    return lambda raw: raw.put(key, kind, value)


def again(key: str, kind: int, value: Any):
    """The key once more, with another value."""

    def change(raw: RawGGUF):
        raw.put("odd", kind, value)
        raw.entries[-1] = (key, *raw.entries[-1][1:])

    return change


def tensor(place: int, **changes: Any):
    """A tensor described otherwise; a text names the tensor whose value is taken."""

    def change(raw: RawGGUF):
        for name, value in changes.items():
            setattr(raw.tensors[place], name, value(raw.tensors) if callable(value) else value)

    return change


def listed(key: str, change):
    """The bytes of an array behind its length, changed."""

    def of(raw: RawGGUF):
        _, kind, value = raw.entries[raw.place(key)]
        raw.entries[raw.place(key)] = key, kind, change(value)

    return of


def longer(value: bytes, by: int) -> bytes:
    """An array that says it is longer than it is."""
    return value[:4] + struct.pack("<Q", struct.unpack("<Q", value[4:12])[0] + by) + value[12:]


def shortened(value: bytes) -> bytes:
    return longer(value, -1)[:-4]


def appended(raw: RawGGUF):
    first = raw.tensors[1]
    raw.tensors.append(Tensor(first.name, first.shape, first.kind, len(raw.data)))
    raw.data += raw.data[: 4 * math.prod(first.shape)]


def swapped(raw: RawGGUF):
    """Two tensors of one size, each at the place of the other."""
    gate, up = (next(one for one in raw.tensors if f"blk.0.ffn_{name}" in one.name) for name in ("gate", "up"))
    gate.offset, up.offset = up.offset, gate.offset


def unscaled(raw: RawGGUF):
    raw.put("llama.rope.scaling.factor", FLOAT32, 8.0)
    raw.put("llama.rope.scaling.type", STRING, "none")


def nested(raw: RawGGUF):
    raw.entries.append(("general.odd", ARRAY, struct.pack("<IQ", ARRAY, 1) * 100_000))


CONTRADICTIONS = {
    "two tensors of one name": (appended, r"two tensors of the name 'blk\.0"),
    "a tensor under its neighbour's name": (tensor(1, name=lambda all: all[0].name), "two tensors of the name"),
    "a key twice": (again(BASE, FLOAT32, 5e5), r"the entry 'llama\.rope\.freq_base' twice"),
    "a text twice": (again("general.architecture", STRING, "llama"), "the entry 'general.architecture' twice"),
    "two tensors at one offset": (tensor(2, offset=lambda all: all[1].offset), "at offset .* end at"),
    "two tensors that change places": (swapped, r"'blk\.0\.ffn_.*at offset"),
    "an offset into a neighbour": (tensor(2, offset=lambda all: all[2].offset - 32), "at offset"),
    "a gap": (tensor(2, offset=lambda all: all[2].offset + 32), "at offset"),
    "an offset that is not aligned": (tensor(2, offset=lambda all: all[2].offset + 4), "at offset"),
    "an offset outside": (tensor(-1, offset=1 << 50), "at offset"),
    "an offset beyond 64 bits": (tensor(-1, offset=(1 << 64) - 32), "at offset"),
    "an alignment below zero": (put("general.alignment", INT32, -32), "general.alignment -32"),
    "no alignment": (put("general.alignment", INT32, 0), "general.alignment 0"),
    "an odd alignment": (put("general.alignment", INT32, 48), "general.alignment 48"),
    "an alignment of text": (put("general.alignment", STRING, "32"), "general.alignment '32'"),
    "an alignment of less": (put("general.alignment", INT32, 1), "behind the last tensor"),
    "bytes behind the tensors": (lambda raw: setattr(raw, "data", raw.data + bytes(64)), "64 bytes behind the last"),
    "one tensor less": (lambda raw: setattr(raw, "counts", (-1, 0)), "behind the last tensor"),
    "one entry less": (lambda raw: setattr(raw, "counts", (0, -1)), "cannot be read"),
    "endless tensors": (lambda raw: setattr(raw, "counts", (1 << 60, 0)), "tensors in .* bytes"),
    "endless entries": (lambda raw: setattr(raw, "counts", (0, 1 << 60)), "entries in .* bytes"),
    "endless texts": (listed(TOKENS, lambda value: longer(value, 1 << 60)), "texts in .* bytes"),
    "endless numbers": (listed("tokenizer.ggml.scores", lambda value: longer(value, 1 << 60)), "numbers in .* bytes"),
    "arrays in arrays": (nested, "an array of arrays"),
    "many dimensions": (tensor(0, shape=[1] * 99), "99 dimensions"),
    "a truth value of 7": (put("tokenizer.ggml.add_bos_token", BOOL, 7), "a truth value of 7"),
    "a truth value of text": (put("tokenizer.ggml.add_bos_token", STRING, "false"), "add_bos_token of .* 'false'"),
    **{
        f"{key.rpartition('.')[2]} {value}": (put(key, FLOAT32, value), key.rpartition(".")[2])
        for key in (EPS, BASE)
        for value in (math.inf, math.nan, 0.0, -1.0)
    },
    "epsilon of text": (put(EPS, STRING, "1e-5"), "epsilon"),
    "no epsilon": (lambda raw: raw.entries.pop(raw.place(EPS)), "no llama.attention.layer_norm_rms_epsilon"),
    "scaled by nothing": (put("llama.rope.scaling.factor", FLOAT32, 0.0), "scaling.factor"),
    "a factor without scaling": (unscaled, "rope.scaling.type 'none', rope.scaling.factor 8.0"),
    "fewer blocks": (put("llama.block_count", INT32, 1), r"blk\.1"),
    "more blocks": (put("llama.block_count", INT32, 3), "lacks weights"),
    "other heads": (put("llama.attention.head_count", INT32, 8), "misshapen"),
    "other heads of keys": (put("llama.attention.head_count_kv", INT32, 4), "misshapen"),
    "another vocabulary": (put("llama.vocab_size", INT32, SIZE - 1), f"vocab_size {SIZE - 1}"),
    "another architecture's entries": (put("qwen2.rope.freq_base", FLOAT32, 5e5), r"qwen2\.rope\.freq_base"),
    "fewer types than tokens": (listed("tokenizer.ggml.token_type", shortened), f"{SIZE - 1} entries of .*token_type"),
    "fewer scores than tokens": (listed("tokenizer.ggml.scores", shortened), f"{SIZE - 1} entries of .*scores"),
    "a type of no kind": (
        listed("tokenizer.ggml.token_type", lambda value: value[:-4] + struct.pack("<i", 9)), "token_type",
    ),
    "a score without number": (
        listed("tokenizer.ggml.scores", lambda value: value[:-4] + struct.pack("<f", math.nan)), "scores.* not finite",
    ),
    "a token twice": (listed(TOKENS, lambda value: value[:-2] + b"he"), "'he' twice in tokenizer.ggml.tokens"),
    "a merge twice": (listed("tokenizer.ggml.merges", lambda value: value[:-3] + b"h e"), "'h e' twice"),
    **{
        f"{role} {value}": (put(f"tokenizer.ggml.{role}_token_id", INT32, value), f"{role}_token_id")
        for role in ("bos", "eos", "padding", "unknown", "eot")
        for value in (SIZE, -1)
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_it_is_refused_by_name(name, whole, tmp_path):
    change, words = CONTRADICTIONS[name]
    raw = RawGGUF.read(whole)
    change(raw)
    with pytest.raises(PacelineError, match=words):
        opened(raw.write(tmp_path / "bad.gguf"))


def test_more_tokens_than_rows_are_refused(tmp_path):
    model = tiny_model("llama", vocab_size=SIZE - 1, pad_token_id=2)
    with pytest.raises(PacelineError, match=f"{SIZE:,} tokens, and {SIZE - 1:,} rows"):
        opened(write_gguf(tmp_path / "bad.gguf", model))


def test_weights_that_are_no_numbers_are_refused(whole, tmp_path):
    raw = RawGGUF.read(whole)
    raw.data = struct.pack("<f", math.nan) + raw.data[4:]
    with pytest.raises(PacelineError, match=f"{raw.tensors[0].name}.* finite"):
        opened(raw.write(tmp_path / "bad.gguf"))


def test_the_parts_written_again_are_the_same(whole, tmp_path):
    raw = RawGGUF.read(whole)
    assert raw.write(tmp_path / "same.gguf").read_bytes() == whole.read_bytes()


SIZES = ("block_count", "embedding_length", "feed_forward_length", "attention.head_count", "attention.head_count_kv")
SIZES += ("attention.key_length", "attention.value_length", "rope.dimension_count", "vocab_size")


def any_offset(raw: RawGGUF, chance: random.Random):
    one, other = chance.choices(raw.tensors, k=2)
    moved = max(0, one.offset + 4 * chance.randrange(-1000, 1000))
    one.offset = chance.choice((other.offset, moved, chance.getrandbits(64)))


def any_name(raw: RawGGUF, chance: random.Random):
    one, other = chance.choices(raw.tensors, k=2)
    one.name = chance.choice((other.name, one.name + "x", ""))


def any_shape(raw: RawGGUF, chance: random.Random):
    one = chance.choice(raw.tensors)
    one.shape = chance.choice((one.shape[::-1], [*one.shape, 1], [0], [], [size * 2 for size in one.shape], [1 << 63]))


def any_kind(raw: RawGGUF, chance: random.Random):
    chance.choice(raw.tensors).kind = chance.randrange(45)


def any_count(raw: RawGGUF, chance: random.Random):
    wrong = chance.choice((-2, -1, 1, 2, 1 << 40))
    raw.counts = chance.choice(((wrong, 0), (0, wrong)))


def any_alignment(raw: RawGGUF, chance: random.Random):
    raw.put("general.alignment", INT32, chance.choice((-64, -1, 0, 1, 8, 16, 31, 64, 256, 1 << 30)))


def any_size(raw: RawGGUF, chance: random.Random):
    value = chance.choice((0, 1, 2, 3, 4, 8, 16, 32, 64, SIZE, 1 << 20, 1 << 63))
    raw.put("llama." + chance.choice(SIZES), UINT64, value)


def any_number(raw: RawGGUF, chance: random.Random):
    raw.put(chance.choice((EPS, BASE)), FLOAT32, chance.choice((0.0, -1e-5, -1e4, math.inf, -math.inf, math.nan)))


def any_token(raw: RawGGUF, chance: random.Random):
    role = chance.choice(("bos", "eos", "padding", "unknown"))
    raw.put(f"tokenizer.ggml.{role}_token_id", UINT64, chance.choice((SIZE, SIZE + 1, 1 << 31, (1 << 64) - 1)))


def any_entry_twice(raw: RawGGUF, chance: random.Random):
    (key, *_), (_, kind, value) = chance.choices(raw.entries, k=2)
    raw.entries.insert(chance.randrange(len(raw.entries)), (key, kind, value))


def any_length(raw: RawGGUF, chance: random.Random):
    place = chance.choice([place for place, (_, kind, _) in enumerate(raw.entries) if kind == ARRAY])
    key, kind, value = raw.entries[place]
    raw.entries[place] = key, kind, longer(value, chance.choice((-1, 1, 7, 1 << 40)))


def any_prefix(raw: RawGGUF, chance: random.Random):
    place = chance.choice([place for place, (key, *_) in enumerate(raw.entries) if key.startswith("llama.")])
    key, kind, value = raw.entries[place]
    raw.entries[place] = chance.choice((key + "x", "x" + key, key.replace("llama", "qwen2"))), kind, value


def any_end(raw: RawGGUF, chance: random.Random):
    raw.data = chance.choice((raw.data[: -chance.randrange(1, 5000)], raw.data + bytes(chance.randrange(1, 5000))))


CHANGES = [one for name, one in globals().items() if name.startswith("any_")]


def changed(whole: Path, out: Path, seed: int, in_data: int = 0) -> Path:
    """Random changes, also of single bits of what describes the tensors, and of so many bytes of them."""
    chance, raw = random.Random(seed), RawGGUF.read(whole)
    if seed % 3:
        for change in chance.choices(CHANGES, k=chance.choice((1, 1, 2))):
            change(raw, chance)
    content = bytearray(raw.write(out).read_bytes())
    begin = len(content) - len(raw.data)
    if not seed % 3:
        described = content.index(b"token_embd") - 8, begin
        content[chance.randrange(*described)] ^= 1 << chance.randrange(8)
    for _ in range(in_data if len(raw.data) else 0):
        content[chance.randrange(begin, len(content))] = chance.choice((0, 0x7C, 0xFF, chance.randrange(256)))
    out.write_bytes(content)
    return out


def some_and(many: int):
    return pytest.mark.parametrize(
        "seeds", [range(many), pytest.param(range(many, many + 1000), marks=pytest.mark.slow)], ids=len
    )


@some_and(60)
def test_random_changes_are_refused_or_without_effect(seeds, whole, tmp_path):
    config, state, read = opened(whole)
    refused = 0
    for seed in seeds:
        try:
            found_config, found_state, found_read = opened(changed(whole, tmp_path / "bad.gguf", seed))
        except PacelineError:
            refused += 1
            continue
        assert (found_config, found_read) == (config, read), seed
        assert state.keys() == found_state.keys(), seed
        assert all(torch.equal(weight, found_state[name]) for name, weight in state.items()), seed
    assert refused > len(seeds) // 2


@pytest.fixture(scope="module")
def in_blocks(tmp_path_factory) -> Path:
    """A file with matrices of every block format."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_attention_heads": 4}
    model = tiny_model("llama", vocab_size=SIZE, pad_token_id=2, **sizes)
    forms = [form.name for form in BlockFormat if form.is_in_files]
    return write_gguf(tmp_path_factory.mktemp("blocks") / "tiny.gguf", model, quantized=forms)


@some_and(30)
def test_random_changes_of_blocks_are_refused_or_read(seeds, in_blocks, tmp_path):
    """Without a crash, also under the sanitizers: `tests/kernels/test_sanitizers.py`."""
    refused = 0
    for seed in seeds:
        path = changed(in_blocks, tmp_path / "bad.gguf", seed, in_data=seed % 2 * 8)
        try:
            model, _ = open_gguf(path, lambda config: None, packs=True)
        except PacelineError:
            refused += 1
            continue
        plain_twin(model)(torch.tensor([[1, 2, 3]]))
    assert len(seeds) // 4 < refused < len(seeds)
