"""Answers that the target itself writes to given prompts, with the hidden states it had while writing them.

A head learns to foresee one model, so that model's own answers are its lesson. The states of a token cost a pass of
the target to compute, and here they are computed anyway.

    folder/prepare.json             what was asked of which model
    folder/answers.jsonl            one answer a line: prompt_ids, answer_ids, temperature, seed; of a chat with
                                    pictures also messages and images, see `pictures`
    folder/states-000000.safetensors   "17.30": states 30 of answer 17, [its tokens - 1, E]

An answer counts as written once its line stands in answers.jsonl, after its states: a kill at any moment loses at most
the answers in progress, and running again goes on from there.
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
from ..core.vision import VisionPrompt
from ..decoding import SpeculativeDecoder, generate
from ..errors import ConfigError
from ..hf.image_prompts import text_prompt
from ..policy import Fixed
from ..runner import ModelRunner
from ..schema import checked, validate
from ..system.files import parse_json, read_bytes, read_json, write_text
from ..verify import Coupled
from .pictures import Asked, PicturedChat, read_again
from .run_folder import understood

_RECORD = "prepare.json"
_MAX_BYTES = 1 << 40  # of answers: millions of them
_SHARD = 32
"""Answers whose states share a file."""
_HELD = 128
"""Prompts with pictures whose pixels are in memory together."""


@dataclass(frozen=True)
class PrepareConfig:
    """What to write.

    limit: answers in all. max_tokens: of an answer. temperatures: taken in turn. mix: weight of each source of
    prompts; empty takes them as they come, shuffled. layers: hidden states to keep, none for text alone.
    part: (i, n) writes every n-th prompt only, for n processes side by side.
    """

    limit: int = 1000
    max_tokens: int = 256
    temperatures: tuple[float, ...] = (0.0, 1.0)
    mix: Mapping[str, float] = field(default_factory=dict[str, float])
    layers: tuple[int, ...] = ()
    seed: int = 0
    part: tuple[int, int] = (0, 1)


def ordered(prompts: Seq[Mapping[str, object]], config: PrepareConfig) -> list[Mapping[str, object]]:
    """The prompts to answer, shuffled by the seed, sources interleaved by their weights. Raises `ConfigError`."""
    chance = random.Random(config.seed)
    shuffled = list(prompts)
    chance.shuffle(shuffled)
    if config.mix:
        piles = {source: [p for p in shuffled if p.get("source") == source] for source in config.mix}
        for source, pile in piles.items():
            if not pile:
                known = ", ".join(sorted({str(p.get("source")) for p in prompts}))
                raise ConfigError(f"no prompt comes from {source!r}", expected=f"sources among {known}")
        shuffled = []
        while any(piles.values()) and len(shuffled) < config.limit:
            sources = [source for source, pile in piles.items() if pile]
            source = chance.choices(sources, [config.mix[s] for s in sources])[0]
            shuffled.append(piles[source].pop())
    return shuffled[: config.limit]


@final
class _Recorder(Drafter):
    """Proposes nothing; takes the states of every finished answer out of the store before its slot is given back."""

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
    """What a round brought: tokens of all answers in progress, and answers that stand on the disk by now."""

    tokens: int
    answers: int


_TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


@checked
class _Line:
    """What a line of answers.jsonl holds."""

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


def written(folder: Path) -> list[dict[str, object]]:
    """The answers of a folder; a last line that a kill cut short is left out. Raises `ConfigError`."""
    path = folder / "answers.jsonl"
    if not path.exists():
        return []
    lines = list[dict[str, object]]()
    for number, text in enumerate(read_bytes(path, "the answers", _MAX_BYTES).split(b"\n")[:-1], start=1):
        where = f"line {number} of {str(path)!r}"
        with understood(where, "remove this line: `prepare` writes its answer again"):
            lines.append(parse_json(text, where))
            validate(_Line, lines[-1], where)
    return lines


def prepare(
    runner: ModelRunner,
    prompts: Iterable[Asked],
    eos_ids: frozenset[int],
    config: PrepareConfig,
    folder: Path,
) -> Iterator[Written]:
    """Write the answers that are still missing, yielding after each round.

    prompts: in the order of `ordered`. Raises `ConfigError` where the folder holds answers to
    other prompts, or was prepared in another way; only `limit` may change.
    """
    folder.mkdir(parents=True, exist_ok=True)
    answers = folder / "answers.jsonl"
    done = written(folder)
    _check_same(folder, runner, config)
    if answers.exists():  # drop a line that was cut short
        whole = answers.read_bytes()
        with answers.open("r+b") as file:
            file.truncate(whole.rfind(b"\n") + 1)
    known = {int(str(line["index"])): (line["prompt_ids"], line.get("images")) for line in done}
    recorder = _Recorder(config.layers)
    decoder = SpeculativeDecoder(runner, recorder, Coupled(), Fixed(0))
    waiting: dict[int, tuple[int, Asked]] = {}
    missing: list[tuple[int, Asked]] = []
    for index, one in enumerate(prompts):
        now = one.token_ids, None if one.chat is None else list(one.chat.images)
        if known.get(index, now) != now:
            raise ConfigError(
                f"{str(folder)!r} holds answers to other prompts",
                got=f"another prompt {index}",
                fix="name a new folder",
            )
        if index % config.part[1] == config.part[0] and index not in known:
            missing.append((index, one))

    def sequence(index: int, one: Asked) -> Sequence:
        temperature = config.temperatures[index // config.part[1] % len(config.temperatures)]
        params, seed = SamplingParams(temperature=temperature, max_tokens=config.max_tokens), config.seed * 1_000_003
        vision = prompt_vision(runner, one.token_ids, one.chat)
        return Sequence(one.token_ids, params, seed + index, eos_ids, runner.max_length, vision=vision)

    most = _HELD if any(one.chat is not None for _, one in missing) else None
    todo, finished, stand = iter(missing), list[Sequence](), len(done)
    while group := list(islice(todo, most)):
        seqs = [sequence(index, one) for index, one in group]
        waiting |= {id(seq): asked for seq, asked in zip(seqs, group, strict=True)}
        for took_part in generate(decoder, seqs):
            finished += [seq for seq in took_part if seq.is_finished]
            if len(finished) >= _SHARD:
                _write(folder, finished, waiting, recorder)
                stand, finished = stand + len(finished), []
            yield Written(len(took_part), stand)
    _write(folder, finished, waiting, recorder)
    yield Written(0, stand + len(finished))


def prompt_vision(runner: ModelRunner, token_ids: Seq[int], chat: PicturedChat | None) -> VisionPrompt | None:
    """What the pictures of a prompt are to the model, or what text alone is to one that sees. Errors: `read_again`."""
    half = runner.loaded.vision
    if chat is not None:
        return read_again(runner, token_ids, chat)
    return None if half is None else text_prompt(half, len(token_ids))


def _check_same(folder: Path, runner: ModelRunner, config: PrepareConfig) -> None:
    """Note in prepare.json what is asked of which model, or hold it against what stands there."""
    asked = {key: value for key, value in asdict(config).items() if key != "limit"}
    now = json.loads(json.dumps({**asked, "target": runner.loaded.name, "fingerprint": runner.loaded.fingerprint}))
    then = prepared(folder)
    if then is None:
        write_text(folder / _RECORD, json.dumps(now, indent=2) + "\n")
        return
    for key, value in now.items():
        if then.get(key) != value:
            raise ConfigError(
                f"{str(folder)!r} was prepared with another {key}", got=value, expected=then.get(key),
                fix="name a new folder",
            )  # fmt: skip


def prepared(folder: Path) -> dict[str, Any] | None:
    """What was asked of which model; None where nothing tells. Raises `ConfigError` for a damaged record."""
    path = folder / _RECORD
    if not path.exists():
        return None
    what = f"the record {str(path)!r}"
    with understood(what, "remove it where the answers beside it were asked for as now, else the whole folder"):
        return validate(dict[str, Any], read_json(path, "the record"), what)


def _write(folder: Path, seqs: list[Sequence], indices: dict[int, tuple[int, Asked]], recorder: _Recorder) -> None:
    """States first, then the lines that vouch for them."""
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
                "index": index,
                "source": one.source,
                "temperature": seq.params.temperature,
                "seed": seq.seed,
                "finish_reason": seq.finish_reason,
                "prompt_ids": seq.prompt_ids,
                "answer_ids": seq.output_ids,
                "states": shard if tensors else None,
            }
            if one.chat is not None:
                line |= {"messages": one.chat.messages, "images": one.chat.images}
            file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())
    for seq in seqs:  # a million tokens' rounds would fill the memory
        seq.rounds.clear()
        seq.origins.clear()
        seq.sources.clear()
