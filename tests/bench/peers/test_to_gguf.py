"""A quantised GGUF file written again in bf16: same weights, same metadata."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, dequantize, quantize

from bench.peers.to_gguf import to_gguf
from paceline.errors import ConfigError
from tests.gguf_files import finish


def matrix(seed: int, rows: int = 5, columns: int = 64) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32)


@pytest.fixture
def source(tmp_path):
    """Matrices in Q8_0, Q5_0 and F16, a vector, and metadata of every kind."""
    writer = GGUFWriter(tmp_path / "in.gguf", "qwen2")
    writer.add_uint32("qwen2.block_count", 1)
    writer.add_float32("qwen2.rope.freq_base", 1e6)
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    writer.add_array("tokenizer.ggml.tokens", ["a", "ü", "<|end|>"])
    writer.add_array("tokenizer.ggml.token_type", [1, 1, 3])
    writer.add_string("tokenizer.chat_template", "{{ messages }}")
    writer.add_file_type(7)
    writer.add_quantization_version(2)
    q8, q5 = GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q5_0
    writer.add_tensor("token_embd.weight", quantize(matrix(0), q5), raw_dtype=q5)
    writer.add_tensor("output.weight", quantize(matrix(1), q8), raw_dtype=q8)
    writer.add_tensor("blk.0.attn_q.weight", matrix(2).astype(np.float16))
    writer.add_tensor("blk.0.attn_q.bias", matrix(3)[0])
    return finish(writer, tmp_path / "in.gguf")


def values(path) -> dict[str, np.ndarray]:
    tensors = GGUFReader(path).tensors
    return {t.name: dequantize(t.data, t.tensor_type).reshape(t.shape[::-1]).astype(np.float32) for t in tensors}


def as_bf16(array: np.ndarray) -> np.ndarray:
    return torch.from_numpy(array.copy()).bfloat16().float().numpy()


def test_weights_and_metadata(source, tmp_path):
    to_gguf(source, tmp_path / "out.gguf")
    before, after = GGUFReader(source), GGUFReader(tmp_path / "out.gguf")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in after.tensors}
    assert kinds == {"token_embd.weight": "BF16", "output.weight": "BF16", "blk.0.attn_q.weight": "BF16",
                     "blk.0.attn_q.bias": "F32"}  # fmt: skip
    old, new = values(source), values(tmp_path / "out.gguf")
    for name in kinds:
        np.testing.assert_array_equal(new[name], as_bf16(old[name]), err_msg=name)
    assert not np.array_equal(new["blk.0.attn_q.bias"], old["blk.0.attn_q.bias"]), "vectors are rounded too"
    for key, field in before.fields.items():
        if not key.startswith(("GGUF.", "general.file_type", "general.quantization_version")):
            assert after.fields[key].contents() == field.contents(), key
            assert after.fields[key].types == field.types, key
    assert after.fields["general.file_type"].contents() == 32
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".part"] == []


def test_tied(source, tmp_path):
    to_gguf(source, tmp_path / "out.gguf", tied=True)
    old, new = values(source), values(tmp_path / "out.gguf")
    assert sorted(new) == ["blk.0.attn_q.bias", "blk.0.attn_q.weight", "token_embd.weight"]
    np.testing.assert_array_equal(new["token_embd.weight"], as_bf16(old["output.weight"]))
    assert not np.array_equal(new["token_embd.weight"], as_bf16(old["token_embd.weight"])), "not the coarser copy"


def test_half(source, tmp_path):
    to_gguf(source, tmp_path / "out.gguf", half=True)
    after = GGUFReader(tmp_path / "out.gguf")
    assert {tensor.tensor_type.name for tensor in after.tensors if tensor.name.endswith("weight")} == {"F16"}
    assert after.fields["general.file_type"].contents() == 1
    for name, old in values(source).items():
        np.testing.assert_array_equal(values(tmp_path / "out.gguf")[name], as_bf16(old), err_msg=name)


def test_half_refuses_what_float16_does_not_hold(tmp_path):
    writer = GGUFWriter(tmp_path / "in.gguf", "qwen2")
    writer.add_tensor("token_embd.weight", np.full((2, 32), 1e6, dtype=np.float32))
    finish(writer, tmp_path / "in.gguf")
    with pytest.raises(ConfigError, match="float16 does not hold"):
        to_gguf(tmp_path / "in.gguf", tmp_path / "out.gguf", half=True)
    assert not (tmp_path / "out.gguf").exists()


def test_refusals(source, tmp_path):
    with pytest.raises(ConfigError, match="overwrite"):
        to_gguf(source, source)
    with pytest.raises(ConfigError, match="no such GGUF file"):
        to_gguf(tmp_path / "absent.gguf", tmp_path / "out.gguf")
    (tmp_path / "short.gguf").write_bytes(source.read_bytes()[:200])
    with pytest.raises((ValueError, IndexError)):
        to_gguf(tmp_path / "short.gguf", tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()
