"""Split GGUF files: any part names the whole, and parts that do not belong together are refused by name."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.errors import ConfigError
from paceline.hf.gguf.file import read_gguf
from paceline.hf.gguf.load import open_gguf
from tests.gguf_files import vocabulary, write_gguf
from tests.gguf_raw import UINT64, RawGGUF
from tests.tiny import tiny_model

NAME = "tiny-{:05}-of-00003.gguf"


def tiny():
    return tiny_model("llama", vocab_size=len(vocabulary()), intermediate_size=64, hidden_size=32, pad_token_id=2)


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    write_gguf(tmp_path / "tiny.gguf", tiny(), per_part=8)
    return sorted(tmp_path.iterdir())


@pytest.mark.parametrize("empty_first", [False, True])
def test_any_part_names_the_whole(empty_first, tmp_path):
    model = tiny()
    first = write_gguf(tmp_path / "tiny.gguf", model, per_part=8, empty_first=empty_first)
    paths = sorted(tmp_path.iterdir())
    assert len(paths) == 3 + empty_first
    assert first == paths[0]
    for path in paths:
        read, tokenizer = open_gguf(path, lambda config: None)
        state = read.state_dict()
        assert all(torch.equal(state[name], weight) for name, weight in model.state_dict().items())
        assert tokenizer("he<|im_end|>").input_ids[-1] == 2


def test_packed_parts_answer_as_the_whole(tmp_path):
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    whole = LLM(write_gguf(tmp_path / "whole.gguf", tiny(), quantized="Q8_0"))
    split = LLM(write_gguf(tmp_path / "tiny.gguf", tiny(), quantized="Q8_0", per_part=8))
    answers = [llm.generate("hello", params)[0].token_ids for llm in (whole, split)]
    assert answers[0] == answers[1]


def test_a_joined_file_is_whole(tmp_path):
    assert read_gguf(write_gguf(tmp_path / "tiny.gguf", tiny(), more={"split.count": 0})).tensors


def changed(change: Callable[[RawGGUF], None]) -> Callable[[list[Path]], None]:
    """Change the second part."""

    def of(parts: list[Path]):
        raw = RawGGUF.read(parts[1])
        change(raw)
        raw.write(parts[1])

    return of


def named_as_in_the_first(raw: RawGGUF):
    raw.tensors[0].name = "token_embd.weight"


REFUSED = {
    "a missing part": (lambda parts: parts[2].unlink(), f"others are missing.*no {NAME.format(3)}.*one folder"),
    "no other part": (lambda parts: [one.unlink() for one in parts[1:]], f"no {NAME.format(2)}, {NAME.format(3)}"),
    "a part twice": (lambda parts: shutil.copy(parts[1], parts[2]), f"{NAME.format(3)}.*split.no 1, split.count 3"),
    "a whole file among them": (
        lambda parts: write_gguf(parts[1], tiny()), f"{NAME.format(2)}.*split.no None, split.count None",
    ),
    "a part of another split": (
        changed(lambda raw: raw.put("split.tensors.count", UINT64, 99)), f"{NAME.format(2)}.*split.tensors.count 99",
    ),
    "a tensor in two parts": (
        changed(named_as_in_the_first), f"{NAME.format(2)}.*'token_embd.weight', as in {NAME.format(1)}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_parts_that_do_not_fit_are_refused(name, parts):
    change, words = REFUSED[name]
    change(parts)
    with pytest.raises(ConfigError, match=words):
        read_gguf(parts[0])


def test_a_count_of_tensors_that_all_parts_deny_is_refused(parts):
    for part in parts:
        raw = RawGGUF.read(part)
        raw.put("split.tensors.count", UINT64, 99)
        raw.write(part)
    with pytest.raises(ConfigError, match=r"21 tensors in all parts, and split\.tensors\.count 99"):
        read_gguf(parts[2])


def test_a_part_of_another_name_is_refused(parts):
    with pytest.raises(ConfigError, match=r"of this name.*NAME-00001-of-00003\.gguf"):
        read_gguf(parts[1].rename(parts[1].with_name("second.gguf")))
