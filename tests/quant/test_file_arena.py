"""Experts on the disk have the bits of those in memory, only what is used is resident, and no file is left."""

import ctypes
import logging
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.errors import ConfigError
from paceline.hf import load as hf_load
from paceline.hf.load import open_checkpoint
from paceline.kernels import load
from paceline.quant import file_arena
from paceline.quant.file_arena import expert_arena
from tests.cli.helpers import answer
from tests.gguf_files import TINY, write_gguf
from tests.helpers import tokenizer
from tests.hf.test_expert_files import rounded
from tests.tiny import tiny_model

pytestmark = [
    pytest.mark.skipif(load().library is None, reason=f"no native kernels here: {load().reason}"),
    pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for resident pages"),
]
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4, "vocab_size": 300}
SIZES |= {"moe_intermediate_size": 256}
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    load()
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "experts"


def written(folder, architecture="qwen3moe", **options):
    model = tiny_model(TINY.get(architecture, architecture), **{**SIZES, **options})
    return write_gguf(folder / "tiny.gguf", model, architecture, quantized=["Q4_0", "Q8_0", "MXFP4"])


def resident(tensor) -> float:
    """The share of a tensor's whole pages that are in memory."""
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    count = (tensor.data_ptr() + tensor.nbytes - start) // mmap.PAGESIZE
    pages = (ctypes.c_ubyte * count)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), count * mmap.PAGESIZE, pages) == 0
    return sum(page & 1 for page in pages) / count


def advise(tensor, advice: int) -> None:
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = tensor.data_ptr() + tensor.nbytes - start
    assert ctypes.CDLL(None).madvise(ctypes.c_void_p(start), size, advice) == 0


@pytest.mark.parametrize("architecture", ["qwen3moe", "gpt-oss"])
def test_the_same_bits(architecture, tmp_path, cache):
    path = written(tmp_path, architecture)
    held, on_disk = LLM(path, experts_in="memory"), LLM(path, experts_in="disk", drafter="lookup")
    assert list(cache.iterdir()) == []
    for (name, one), (_, other) in zip(
        held.loaded.model.named_buffers(), on_disk.loaded.model.named_buffers(), strict=True
    ):
        assert torch.equal(one, other), name
    assert held.generate("hello hello", PARAMS)[0].token_ids == on_disk.generate("hello hello", PARAMS)[0].token_ids


@pytest.mark.parametrize("overlap", [False, True])
def test_pieces_of_the_file_do_not_overlap(overlap, monkeypatch):
    monkeypatch.setattr(file_arena, "_PIECE", mmap.PAGESIZE)
    arena, held = file_arena.FileArena(), list[torch.Tensor]()
    for value in range(5):
        if overlap:
            arena._size = 0
        held.append(arena(torch.full((3000,), value, dtype=torch.int32)))
    arena.close()
    assert all(bool((one == value).all()) for value, one in enumerate(held)) is not overlap


def test_a_folder_in_16_bits(tmp_path):
    tiny_model("qwen3_moe", torch.bfloat16).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    held, on_disk = (LLM(tmp_path / "model", experts_in=where) for where in ("memory", "disk"))
    assert on_disk.loaded.model.experts_on_disk
    assert held.generate([[5, 9, 31]], PARAMS)[0].token_ids == on_disk.generate([[5, 9, 31]], PARAMS)[0].token_ids


def test_blocks_of_a_folder(tmp_path, cache, monkeypatch):
    """They are counted as they are in its files."""
    _, tensors = rounded(tmp_path)
    told = list[int]()
    monkeypatch.setattr(hf_load, "expert_arena", lambda *given: told.extend(given[2:]) or expert_arena(*given))
    model = open_checkpoint(str(tmp_path), None, "cpu", False, packs=True, experts_in="disk")[0]
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(cache) in line]
    places = [range(*(int(end, 16) for end in line[0].split("-"))) for line in maps]
    held = [
        part.data.data_ptr() for path, part in model.named_modules() if ".experts." in path and path.endswith("_proj")
    ]
    assert len(held) == 2 * 4 * 3
    assert all(any(address in place for place in places) for address in held)
    assert told == [sum(one.nbytes for name, one in tensors.items() if end in name) for end in ("", ".experts.")]


def test_experts_that_are_not_chosen_stay_on_the_disk(tmp_path):
    path = written(tmp_path, hidden_size=512, moe_intermediate_size=1024, num_local_experts=16, num_experts_per_tok=1)
    llm = LLM(path, experts_in="disk")
    layers = [layer.mlp.experts for layer in llm.loaded.model.base_model.layers]
    packed = [[expert.up_proj.data for expert in experts] for experts in layers]
    for advice in (mmap.MADV_RANDOM, 21):  # nothing is read ahead; MADV_PAGEOUT: what is mapped is dropped
        for one in (tensor for experts in packed for tensor in experts):
            one.sum()
            advise(one, advice)
    if max(resident(one) for experts in packed for one in experts) > 0.2:
        pytest.skip("the system keeps the pages")
    llm.generate([[5]], SamplingParams(max_tokens=1, ignore_eos=True))
    shares = [resident(one) for experts in packed for one in experts]
    assert sorted(shares, reverse=True)[: llm.loaded.decoder.experts_read] == [1.0, 1.0]
    assert sum(shares) < 2.5  # pages on the edge are those of two


def test_a_model_that_is_larger_than_the_memory(tmp_path, monkeypatch, caplog):
    path = written(tmp_path)
    with caplog.at_level(logging.WARNING, "paceline"):
        assert not LLM(path).loaded.model.experts_on_disk
        assert not caplog.messages
        monkeypatch.setattr(file_arena, "available_memory", lambda: 1000)
        llm = LLM(path)
    assert llm.loaded.model.experts_on_disk
    assert "tiny.gguf has 0.0 GB of weights" in caplog.text
    assert "read as they are used" in caplog.text
    assert (
        llm.generate("hello", PARAMS)[0].token_ids
        == LLM(path, experts_in="memory").generate("hello", PARAMS)[0].token_ids
    )


@pytest.mark.parametrize("end", ["exit()", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_nothing_is_left(end, tmp_path, cache):
    path = written(tmp_path)
    code = f"""
import os, signal
from pathlib import Path
from paceline.hf.gguf.load import open_gguf
from paceline.kernels import load
load()
os.environ["PACELINE_CACHE"] = {str(cache.parent)!r}
open_gguf(Path({str(path)!r}), lambda _: None, packs=True, experts_in="disk")
{end}
"""
    outside = {name: value for name, value in os.environ.items() if name != "PACELINE_CACHE"}
    done = subprocess.run([sys.executable, "-c", code], env=outside, stderr=subprocess.PIPE, text=True)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    assert list(cache.iterdir()) == []


def test_what_cannot_be_is_refused(tmp_path, monkeypatch):
    dense = write_gguf(tmp_path / "dense.gguf", tiny_model("llama", **SIZES), quantized="Q8_0")
    with pytest.raises(ConfigError, match=r"dense.gguf.*cannot lie on the disk.*no experts.*experts_in"):
        LLM(dense, experts_in="disk")
    with pytest.raises(ConfigError, match="experts_in is for models that are loaded by name"):
        LLM(tiny_model("llama"), experts_in="disk")
    monkeypatch.setattr(file_arena.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10})())
    with pytest.raises(ConfigError, match=r"do not fit on the disk.*0\.0 GB free in.*PACELINE_CACHE"):
        LLM(written(tmp_path), experts_in="disk")


def test_on_the_command_line(tmp_path):
    given = ("generate", str(written(tmp_path)), "hello", "--max-tokens", "4", "--device", "cpu")
    assert answer(*given, "--experts-in", "disk")["token_ids"] == answer(*given)["token_ids"]
