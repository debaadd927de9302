"""The stage `prepare`: the target's answers to prompts, with the hidden states of their tokens.

A head learns to predict one model, so it learns from that model's own answers. Decoding computes the hidden states
anyway, so they are stored.

    folder/prepare.json             the settings, and the model
    folder/answers.jsonl            one answer a line: prompt_ids, answer_ids, temperature, seed; of a chat with images
                                    also its messages, with whole paths, and a hash of each image's pixels
    folder/states-000000.safetensors   "17.30": states 30 of answer 17, [its tokens - 1, E]

An answer is complete once its line is in answers.jsonl, after its states. A killed process loses at most the answers in
progress, and the next run continues from there.

Images are not copied: training opens them again, and refuses files with other hashes.
"""

import hashlib
import json
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, ClassVar, final

import torch
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor

from ..core.draft import Draft
from ..core.interfaces import DrafterInfo, Target, Verifier
from ..core.request import SamplingParams, TokenSequence
from ..core.vision import VisionPrompt
from ..core.walk import Walk
from ..engine.loop import SpeculativeDecoder
from ..engine.request import Request
from ..engine.scheduler import run
from ..errors import CacheFull, ConfigError
from ..hf.chats import has_images
from ..hf.image_prompts import encode, text_prompt
from ..measure.prompts import PromptLine, read_lines
from ..methods.plain import Plain
from ..policy import Fixed
from ..schema import Many, checked, validate
from ..system.files import parse_json, read_bytes, replacing, write_text
from ..target import ModelRunner
from ..target.prompts import Chat, read_prompt
from ..verify import Coupled
from .config import PrepareSection
from .run_folder import check_same, read_if_there, understood

_RECORD = "prepare.json"
_MAX_BYTES = 1 << 40  # of answers: millions of them
_PER_FILE = 32
"""Answers whose states share a file."""
_WITH_IMAGES = 128
"""Prompts with images whose pixels are in memory at the same time."""


@dataclass(frozen=True)
class ImageChat:
    """A chat with images. messages: as `LLM.generate` takes them. images: `PromptImage.key` of each image."""

    messages: Chat
    images: tuple[str, ...]


@dataclass(frozen=True)
class TrainPrompt:
    """A prompt for the target. chat: if it has images."""

    source: str
    token_ids: list[int]
    chat: ImageChat | None = None


def read_files(paths: Iterable[str]) -> list[PromptLine]:
    """The prompts of all files, with absolute paths of images. Raises `ConfigError` if there is none."""
    lines = [line for path in paths for line in read_lines(Path(path).absolute())]
    if not lines:
        raise ConfigError(
            "there are no prompts to answer", fix="name files in the configuration, as prompts: [a.jsonl]"
        )
    return lines


def chat_of(line: PromptLine) -> Chat:
    """A line as a chat; raw text becomes the user's message."""
    return [{"role": "user", "content": line.prompt}] if isinstance(line.prompt, str) else line.prompt


def encode_line(runner: ModelRunner, line: PromptLine) -> TrainPrompt | None:
    """A line as token ids, with the chat template if there is one. None where it does not fit the context."""
    source, tokenizer = str(line.row.get("source", "")), runner.loaded.tokenizer
    if line.is_bare and runner.loaded.vision is None and not getattr(tokenizer, "chat_template", None):
        assert tokenizer is not None
        return TrainPrompt(source, encode(tokenizer, line.turns[0]))
    messages = chat_of(line)
    try:
        ids, vision = read_prompt(runner.loaded, messages, runner.max_length)
    except CacheFull:
        return None
    return TrainPrompt(source, ids, ImageChat(messages, vision.keys) if vision and has_images(messages) else None)


def vision_of(runner: ModelRunner, token_ids: Sequence[int], chat: ImageChat | None) -> VisionPrompt | None:
    """The images of a prompt for the runner; None for a text model.

    Raises `ConfigError` where a file is missing or has another image.
    """
    if chat is None:
        return None if runner.loaded.vision is None else text_prompt(runner.loaded.vision, len(token_ids))
    ids, vision = read_prompt(runner.loaded, chat.messages, runner.max_length)
    assert vision is not None
    if vision.keys != chat.images or ids != list(token_ids):
        raise ConfigError(
            "the images of prepared answers have changed",
            got=f"{len(ids)} prompt tokens, images {_brief(vision.keys)}",
            expected=f"{len(token_ids)} prompt tokens, images {_brief(chat.images)}",
            fix="put the files back, or prepare answers anew in another folder",
        )
    return vision


def _brief(keys: Sequence[str]) -> str:
    return ", ".join(key[:8] for key in keys) or "none"


def ordered(prompts: Sequence[PromptLine], config: PrepareSection) -> list[PromptLine]:
    """The prompts to answer, shuffled by the seed, sources interleaved by their weights. Raises `ConfigError`."""
    chance = random.Random(config.seed)
    shuffled = list(prompts)
    chance.shuffle(shuffled)
    if config.mix:
        piles = {source: [p for p in shuffled if p.row.get("source") == source] for source in config.mix}
        for source, pile in piles.items():
            if not pile:
                known = ", ".join(sorted({str(p.row.get("source")) for p in prompts}))
                raise ConfigError(f"no prompt comes from {source!r}", expected=f"sources among {known}")
        shuffled = []
        while any(piles.values()) and len(shuffled) < config.limit:
            sources = [source for source, pile in piles.items() if pile]
            source = chance.choices(sources, [config.mix[s] for s in sources])[0]
            shuffled.append(piles[source].pop())
    return shuffled[: config.limit]


@final
class _Recorder(Plain):
    """Proposes nothing; copies the states of every finished answer before its slot is released."""

    name: ClassVar[str] = "recorder"
    info = DrafterInfo(reads_states=True)

    def __init__(self, layers: Sequence[int]):
        self.layers = tuple(layers)
        self.states: dict[int, dict[int, Tensor]] = {}

    def bind(self, target: Target, verifier: Verifier) -> None:
        self._target = target
        target.watch_states(self.layers)

    def observe(self, seqs: Sequence[TokenSequence], draft: Draft, logits: Tensor, walks: Sequence[Walk]) -> None:
        for seq in seqs:
            if seq.is_finished and self.layers:
                self.states[id(seq)] = stored_states(self._target, seq, self.layers)


def stored_states(target: Target, seq: TokenSequence, layers: Sequence[int], begin: int = 0) -> dict[int, Tensor]:
    """The states of a sequence as they are written, from this token on: of all but the last."""
    read = {n: target.read_states(seq.slot, begin, seq.num_cached, [n]) for n in layers}
    return {n: state.to("cpu", torch.bfloat16).contiguous() for n, state in read.items()}


_TokenIds = Annotated[Many[Annotated[int, Field(ge=0)]], Field(min_length=1)]


@checked
class PreparedAnswer:
    """A line of answers.jsonl in a folder. states: the name of the file of its states; messages, images: see above."""

    folder: Path
    index: Annotated[int, Field(ge=0)]
    source: str
    temperature: float
    prompt_ids: _TokenIds
    answer_ids: _TokenIds
    seed: int = 0
    finish_reason: str | None = None
    states: Annotated[str, Field(pattern=r"^[^/\\]+$")] | None = None
    messages: list[Mapping[str, Any]] | None = None
    images: Many[str] = ()

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.answer_ids)

    @property
    def chat(self) -> ImageChat | None:
        """The prompt, where it has images."""
        return None if self.messages is None else ImageChat(self.messages, self.images)

    @cached_property
    def place(self) -> int:
        """A hash of the prompt and its images, from 0 to 2^64 - 1."""
        text = ",".join([*map(str, self.prompt_ids), *self.images]).encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:8], "big")


def read_answers(folder: Path) -> list[PreparedAnswer]:
    """A folder's answers, without an incomplete last line. Raises `ConfigError`."""
    path = folder / "answers.jsonl"
    if not path.exists():
        return []
    answers = list[PreparedAnswer]()
    for number, text in enumerate(read_bytes(path, "the answers", _MAX_BYTES).split(b"\n")[:-1], start=1):
        where = f"line {number} of {str(path)!r}"
        with understood(where, "remove this line: `prepare` writes its answer again"):
            answers.append(validate(PreparedAnswer, {**parse_json(text, where), "folder": str(folder)}, where))
    return answers


def read_record(folder: Path) -> dict[str, Any] | None:
    """The settings and the model of a folder; None where there is no record. Raises `ConfigError` for a damaged one."""
    fix = "remove it if the answers beside it were made with the same settings, else the whole folder"
    return read_if_there(dict[str, Any], folder / _RECORD, fix)


def write_record(folder: Path, record: Mapping[str, object]) -> None:
    """Write the settings and the model to prepare.json."""
    write_text(folder / _RECORD, json.dumps(record, indent=2) + "\n")


def prepare(
    runner: ModelRunner, prompts: Iterable[TrainPrompt], eos_ids: frozenset[int], config: PrepareSection, folder: Path,
    layers: tuple[int, ...] = (),
) -> Iterator[tuple[int, int]]:  # fmt: skip
    """Write the missing answers; yields after each round its number of tokens and the answers on disk.

    prompts: in the order of `ordered`. layers: the hidden states to store. Raises `ConfigError` where the folder has
    answers to other prompts, or was prepared with other settings; only `limit` may change.
    """
    folder.mkdir(parents=True, exist_ok=True)
    answers, done = folder / "answers.jsonl", read_answers(folder)
    _check_record(folder, runner, config, layers)
    if answers.exists():  # drop a line that was cut short
        whole = answers.read_bytes()
        with answers.open("r+b") as file:
            file.truncate(whole.rfind(b"\n") + 1)
    known = {answer.index: (answer.prompt_ids, answer.images) for answer in done}
    missing: list[tuple[int, TrainPrompt]] = []
    for index, prompt in enumerate(prompts):
        now = tuple(prompt.token_ids), () if prompt.chat is None else prompt.chat.images
        if known.get(index, now) != now:
            got = f"another prompt {index}"
            raise ConfigError(f"{str(folder)!r} holds answers to other prompts", got=got, fix="name a new folder")
        if index % config.part[1] == config.part[0] and index not in known:
            missing.append((index, prompt))

    def sequence(index: int, prompt: TrainPrompt) -> TokenSequence:
        temperature = config.temperatures[index // config.part[1] % len(config.temperatures)]
        params, seed = SamplingParams(temperature=temperature, max_tokens=config.max_tokens), config.seed * 1_000_003
        vision = vision_of(runner, prompt.token_ids, prompt.chat)
        return TokenSequence(prompt.token_ids, params, seed + index, eos_ids, runner.max_length, vision=vision)

    recorder = _Recorder(layers)
    decoder = SpeculativeDecoder(runner, recorder, Coupled(), Fixed(0))
    together = _WITH_IMAGES if any(prompt.chat is not None for _, prompt in missing) else None
    todo, waiting, finished, count = (
        iter(missing),
        dict[int, tuple[int, TrainPrompt]](),
        list[TokenSequence](),
        len(done),
    )
    while group := list(islice(todo, together)):
        seqs = [sequence(index, prompt) for index, prompt in group]
        waiting |= {id(seq): prompt for seq, prompt in zip(seqs, group, strict=True)}
        for step in run(decoder, [Request.of(decoder, seq) for seq in seqs]):
            active = [answer.seq for answers in step.updated.values() for answer in answers]
            finished += [seq for seq in active if seq.is_finished]
            if len(finished) >= _PER_FILE:
                _write(folder, finished, waiting, recorder)
                count, finished = count + len(finished), []
            yield len(active), count
    _write(folder, finished, waiting, recorder)
    yield 0, count + len(finished)


def _check_record(folder: Path, runner: ModelRunner, config: PrepareSection, layers: tuple[int, ...]) -> None:
    """Write the settings and the model to prepare.json, or compare them with what is there."""
    now = {key: getattr(config, key) for key in ("max_tokens", "temperatures", "mix", "seed", "part")}
    now |= {"layers": layers, "target": runner.loaded.name, "fingerprint": runner.loaded.fingerprint}
    then = read_record(folder)
    if then is None:
        write_record(folder, now)
    else:
        check_same(str(folder), {key: then.get(key) for key in now}, now, "name a new folder")


def append_answers(
    folder: Path, lines: Sequence[Mapping[str, object]], states: Mapping[str, Tensor], shard: str, syncs: bool = True
) -> None:
    """Append answers to a folder: first the file `shard` of their states, then the lines, which name it.

    syncs: see `replacing`.
    """
    if states:
        with replacing(folder / shard, syncs) as part:
            save_file(dict(states), part)
    with (folder / "answers.jsonl").open("a") as file:
        for line in lines:
            file.write(json.dumps({**line, "states": shard if states else None}) + "\n")
        file.flush()
        if syncs:
            os.fsync(file.fileno())


def _write(
    folder: Path, seqs: list[TokenSequence], indices: dict[int, tuple[int, TrainPrompt]], recorder: _Recorder
) -> None:
    """The answers of these sequences, whose rounds are dropped."""
    if not seqs:
        return
    lines, states = list[dict[str, object]](), dict[str, Tensor]()
    for seq in seqs:
        index, prompt = indices[id(seq)]
        for layer, state in recorder.states.pop(id(seq), {}).items():
            states[f"{index}.{layer}"] = state
        line: dict[str, object] = {
            "index": index, "source": prompt.source, "temperature": seq.params.temperature, "seed": seq.seed,
            "finish_reason": seq.finish_reason, "prompt_ids": seq.prompt_ids, "answer_ids": seq.output_ids,
        }  # fmt: skip
        if prompt.chat is not None:
            line |= {"messages": prompt.chat.messages, "images": prompt.chat.images}
        lines.append(line)
    append_answers(folder, lines, states, f"states-{lines[0]['index']:06d}.safetensors")
    for seq in seqs:  # rounds of a million tokens would fill the memory
        seq.rounds.clear()
        seq.origins.clear()
        seq.sources.clear()
