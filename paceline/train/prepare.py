"""Answers that the target itself writes to given prompts, with the hidden states it had while writing them.

A head learns to predict one model, so it learns from that model's own answers. The states of a token cost a pass of
the target, and here they are computed anyway.

    folder/prepare.json             what was asked of which model
    folder/answers.jsonl            one answer a line: prompt_ids, answer_ids, temperature, seed; of a chat with
                                    images also messages and images, see `prompts`
    folder/states-000000.safetensors   "17.30": states 30 of answer 17, [its tokens - 1, E]

An answer counts as written once its line is in answers.jsonl, after its states: a kill at any moment loses at most
the answers in progress, and running again continues from there.
"""

import json
import os
import random
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, ClassVar, final

import torch
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor

from ..core.draft import Draft
from ..core.interfaces import DraftBudget, Drafter, DrafterInfo, TargetView, Verifier
from ..core.outputs import TargetOutput, VerifyOutput
from ..core.request import SamplingParams, Sequence
from ..core.tree import TokenTree
from ..decoding import SpeculativeDecoder, generate
from ..errors import ConfigError
from ..eval.prompts import PromptLine
from ..policy import Fixed
from ..runner import ModelRunner
from ..schema import checked, validate
from ..system.files import parse_json, read_bytes, read_json, write_text
from ..verify import Coupled
from .prompts import TrainPrompt, vision_of
from .run_folder import check_same, understood

_RECORD = "prepare.json"
_MAX_BYTES = 1 << 40  # of answers: millions of them
_PER_FILE = 32
"""Answers whose states share a file."""
_WITH_IMAGES = 128
"""Prompts with images whose pixels are in memory together."""


@dataclass(frozen=True)
class PrepareConfig:
    """What to write.

    limit: the number of answers. max_tokens: of an answer. temperatures: taken in turn. mix: the weight of each source
    of prompts; empty takes them as they come, shuffled. layers: hidden states to keep, none for text alone.
    part: (i, n) writes every n-th prompt only, for n processes side by side.
    """

    limit: int = 1000
    max_tokens: int = 256
    temperatures: tuple[float, ...] = (0.0, 1.0)
    mix: Mapping[str, float] = field(default_factory=dict[str, float])
    layers: tuple[int, ...] = ()
    seed: int = 0
    part: tuple[int, int] = (0, 1)


def ordered(prompts: Seq[PromptLine], config: PrepareConfig) -> list[PromptLine]:
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
class _Recorder(Drafter):
    """Proposes nothing; copies the states of every finished answer before its slot is given back."""

    name: ClassVar[str] = "recorder"
    info = DrafterInfo(reads_states=True)

    def __init__(self, layers: Seq[int]):
        self.layers = tuple(layers)
        self.states: dict[int, dict[int, Tensor]] = {}

    def bind(self, target: TargetView, verifier: Verifier) -> None:
        """Watch the layers."""
        self._target = target
        target.watch_states(self.layers)

    def propose(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> Draft:
        """Nothing."""
        return Draft(TokenTree.chain([[seq.token_ids[-1]] for seq in seqs]))

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOutput, verdict: VerifyOutput) -> None:
        """Copy the states of finished answers, keyed by the sequence's identity."""
        for seq in seqs:
            if seq.is_finished and self.layers:
                read = self._target.read_states
                states = {n: read(seq.slot, 0, seq.num_cached, [n]) for n in self.layers}
                self.states[id(seq)] = {n: state.to("cpu", torch.bfloat16) for n, state in states.items()}


@dataclass(frozen=True)
class Written:
    """After a round: the tokens it gave to answers in progress, and the number of answers on the disk."""

    tokens: int
    answers: int


_TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


@checked
class _Line:
    """A line of answers.jsonl."""

    index: Annotated[int, Field(ge=0)]
    source: str
    temperature: float
    prompt_ids: _TokenIds
    answer_ids: _TokenIds
    seed: int = 0
    finish_reason: str | None = None
    states: Annotated[str, Field(pattern=r"^[^/\\]+$")] | None = None
    messages: list[object] | None = None
    images: list[str] | None = None


def read_answers(folder: Path) -> list[dict[str, Any]]:
    """The lines of a folder's answers, without a last one that a kill cut short. Raises `ConfigError`."""
    path = folder / "answers.jsonl"
    if not path.exists():
        return []
    lines = list[dict[str, Any]]()
    for number, text in enumerate(read_bytes(path, "the answers", _MAX_BYTES).split(b"\n")[:-1], start=1):
        where = f"line {number} of {str(path)!r}"
        with understood(where, "remove this line: `prepare` writes its answer again"):
            lines.append(parse_json(text, where))
            validate(_Line, lines[-1], where)
    return lines


def read_record(folder: Path) -> dict[str, Any] | None:
    """What was asked of which model; None where there is no record. Raises `ConfigError` for a damaged one."""
    path = folder / _RECORD
    if not path.exists():
        return None
    what = f"the record {str(path)!r}"
    with understood(what, "remove it where the answers beside it were asked for as now, else the whole folder"):
        return validate(dict[str, Any], read_json(path, "the record"), what)


def prepare(
    runner: ModelRunner, prompts: Iterable[TrainPrompt], eos_ids: frozenset[int], config: PrepareConfig, folder: Path
) -> Iterator[Written]:
    """Write the answers that are still missing, yielding after each round.

    prompts: in the order of `ordered`. Raises `ConfigError` where the folder holds answers to other prompts, or was
    prepared in another way; only `limit` may change.
    """
    folder.mkdir(parents=True, exist_ok=True)
    answers, done = folder / "answers.jsonl", read_answers(folder)
    _check_record(folder, runner, config)
    if answers.exists():  # drop a line that was cut short
        whole = answers.read_bytes()
        with answers.open("r+b") as file:
            file.truncate(whole.rfind(b"\n") + 1)
    known = {line["index"]: (line["prompt_ids"], line.get("images")) for line in done}
    missing: list[tuple[int, TrainPrompt]] = []
    for index, one in enumerate(prompts):
        now = one.token_ids, None if one.chat is None else list(one.chat.images)
        if known.get(index, now) != now:
            got = f"another prompt {index}"
            raise ConfigError(f"{str(folder)!r} holds answers to other prompts", got=got, fix="name a new folder")
        if index % config.part[1] == config.part[0] and index not in known:
            missing.append((index, one))

    def sequence(index: int, one: TrainPrompt) -> Sequence:
        temperature = config.temperatures[index // config.part[1] % len(config.temperatures)]
        params, seed = SamplingParams(temperature=temperature, max_tokens=config.max_tokens), config.seed * 1_000_003
        vision = vision_of(runner, one.token_ids, one.chat)
        return Sequence(one.token_ids, params, seed + index, eos_ids, runner.max_length, vision=vision)

    recorder = _Recorder(config.layers)
    decoder = SpeculativeDecoder(runner, recorder, Coupled(), Fixed(0))
    together = _WITH_IMAGES if any(one.chat is not None for _, one in missing) else None
    todo, waiting, finished, count = iter(missing), dict[int, tuple[int, TrainPrompt]](), list[Sequence](), len(done)
    while group := list(islice(todo, together)):
        seqs = [sequence(index, one) for index, one in group]
        waiting |= {id(seq): prompt for seq, prompt in zip(seqs, group, strict=True)}
        for active in generate(decoder, seqs):
            finished += [seq for seq in active if seq.is_finished]
            if len(finished) >= _PER_FILE:
                _write(folder, finished, waiting, recorder)
                count, finished = count + len(finished), []
            yield Written(len(active), count)
    _write(folder, finished, waiting, recorder)
    yield Written(0, count + len(finished))


def _check_record(folder: Path, runner: ModelRunner, config: PrepareConfig) -> None:
    """Write what is asked of which model to prepare.json, or compare it with what is there."""
    asked = {key: value for key, value in asdict(config).items() if key != "limit"}
    asked |= {"target": runner.loaded.name, "fingerprint": runner.loaded.fingerprint}
    then = read_record(folder)
    if then is None:
        write_text(folder / _RECORD, json.dumps(asked, indent=2) + "\n")
    else:
        check_same(str(folder), {key: then.get(key) for key in asked}, asked, "name a new folder")


def _write(
    folder: Path, seqs: list[Sequence], indices: dict[int, tuple[int, TrainPrompt]], recorder: _Recorder
) -> None:
    """States first, then the lines that name them."""
    if not seqs:
        return
    shard = f"states-{indices[id(seqs[0])][0]:06d}.safetensors"
    tensors = {
        f"{indices[id(seq)][0]}.{layer}": state.contiguous()
        for seq in seqs
        for layer, state in recorder.states.pop(id(seq), {}).items()
    }
    if tensors:
        part = folder / (shard + ".part")
        save_file(tensors, part)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(folder / shard)
    with (folder / "answers.jsonl").open("a") as file:
        for seq in seqs:
            index, one = indices[id(seq)]
            line: dict[str, object] = {
                "index": index, "source": one.source, "temperature": seq.params.temperature, "seed": seq.seed,
                "finish_reason": seq.finish_reason, "prompt_ids": seq.prompt_ids, "answer_ids": seq.output_ids,
                "states": shard if tensors else None,
            }  # fmt: skip
            if one.chat is not None:
                line |= {"messages": one.chat.messages, "images": one.chat.images}
            file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())
    for seq in seqs:  # a million tokens' rounds would fill the memory
        seq.rounds.clear()
        seq.origins.clear()
        seq.sources.clear()
