"""What the scripts about pictures share: engines that take turns, a log that a later run goes on from, and tables."""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from common import beside
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from vlm_prices import Spent, Watched

from paceline import LLM, SamplingParams
from paceline.bench.image_suites import scenes
from paceline.bench.suites import Question, choose, read_suite
from paceline.core.interfaces import Drafter, DraftPolicy
from paceline.drafters import Choose, DraftModel, SelfQuantized
from paceline.errors import CacheFull, ConfigError
from paceline.llm import Prompt
from paceline.provenance import provenance
from paceline.runner import LoadedModel, ModelRunner, load_model
from paceline.spec_config import parse
from paceline.zoo import resolve

PLAIN = "plain"


@dataclass(frozen=True)
class Line:
    """What one engine made of one turn. Seconds; vision: in the target's tower; read: of passes that read the prompt.

    A pass that reads the end of the prompt and verifies the first draft counts as reading. prompt: its tokens, image
    tokens included.
    """

    token_ids: list[int]
    text: str
    prompt: int
    vision: float
    read: float
    decode: float
    rounds: list[Spent]

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> "Line":
        """From what JSON made of one."""
        return cls(**{**given, "rounds": [Spent(*one[:-1], tuple(one[-1])) for one in given["rounds"]]})

    def as_dict(self) -> dict[str, Any]:
        """For JSON; rounds without the names of their fields."""
        return {**asdict(self), "rounds": [astuple(one) for one in self.rounds]}

    @property
    def whole(self) -> float:
        """From the prompt to the last token."""
        return self.vision + self.read + self.decode

    @property
    def joined(self) -> bool:
        """Whether the first draft was verified while the prompt was read."""
        return any(one.joined for one in self.rounds)

    @property
    def passes(self) -> int:
        """Of the target, after the prompt was read."""
        return sum(not one.joined for one in self.rounds)

    def beyond(self, plain: "Line") -> float:
        """Seconds beyond those in which plain decoding reads the prompt: decoding, the shared pass included."""
        more = self.read - plain.read if self.joined else 0.0
        return max(self.decode + more, 0.01 * self.decode)

    @property
    def parts(self) -> dict[str, float]:
        """Where the time went."""
        draft, verify, rest = (sum(one.seconds[i] for one in self.rounds) for i in range(3))
        return {"vision": self.vision, "prefill": self.read, "draft": draft, "verify": verify, "rest": rest}


@dataclass(frozen=True)
class Engine:
    """An engine and the policy that it is watched through."""

    llm: LLM
    policy: Watched

    @classmethod
    def of(cls, base: LLM, drafter: Drafter, policy: DraftPolicy | Watched) -> "Engine":
        """On the cache of `base`."""
        watched = policy if isinstance(policy, Watched) else Watched(policy)
        made = cls(beside(base, drafter, watched), watched)
        watched.measure(base.runner.max_length)
        return made

    def under(self, policy: DraftPolicy | Watched) -> "Engine":
        """The same drafter, as it is bound, under another policy."""
        watched = policy if isinstance(policy, Watched) else Watched(policy)
        other, decoder = copy.copy(self.llm), copy.copy(self.llm.decoder)
        other.decoder, decoder.policy = decoder, watched
        watched.bind(decoder.drafter, other.runner.pass_seconds)
        watched.measure(other.runner.max_length)
        return Engine(other, watched)

    def answer(self, prompt: Prompt, params: SamplingParams) -> Line:
        """Decode one prompt as if its pictures had never been seen."""
        forget_pictures(self.llm)
        self.policy.take()
        result = self.llm.generate([prompt], params)[0]
        took = result.timings
        rounds = self.policy.take()
        return Line(
            list(result.token_ids), result.text, len(result.prompt_token_ids), took.vision, took.prefill, took.decode,
            rounds,
        )  # fmt: skip


def runners_of(llm: LLM) -> list[ModelRunner]:
    """The target's runner, and those of draft models."""
    drafter = llm.decoder.drafter
    members = drafter.members if isinstance(drafter, Choose) else (drafter,)
    return [llm.runner, *(one.runner for one in members if isinstance(one, DraftModel))]


def forget_pictures(llm: LLM) -> None:
    """Empty the caches of features and prefixes: who comes second must not have it easier."""
    for runner in runners_of(llm):
        runner.reader.forget()


def draft_bytes(drafter: Drafter, target: LoadedModel) -> dict[str, int]:
    """Extra memory of a drafter: weights that the target does not have, and its own KV cache for each cached token."""
    if isinstance(drafter, SelfQuantized):
        assert drafter.report is not None
        return {"weights": drafter.report.num_bytes, "kv": 0}
    if isinstance(drafter, DraftModel):
        own = {id(t): t for t in modules_of(drafter.runner.loaded)}
        shared = {id(t) for t in modules_of(target)}
        return {
            "weights": sum(t.nbytes for key, t in own.items() if key not in shared),
            "kv": kv_bytes(drafter.runner),
        }
    if isinstance(drafter, Choose):
        each = [draft_bytes(member, target) for member in drafter.members]
        return {key: sum(one[key] for one in each) for key in ("weights", "kv")}
    module = getattr(drafter, "head", None)
    weights = sum(t.nbytes for t in module.parameters()) if isinstance(module, torch.nn.Module) else 0
    return {"weights": weights, "kv": 0}


def kv_bytes(runner: ModelRunner) -> int:
    """Of one cached token."""
    cache = runner.cache
    return cache.num_bytes // max(1, cache.capacity * cache.num_slots)


def modules_of(loaded: LoadedModel) -> Iterator[torch.Tensor]:
    """Weights and buffers of both halves."""
    yield from (*loaded.model.parameters(), *loaded.model.buffers())
    if loaded.vision is not None:
        yield from (*loaded.vision.tower.parameters(), *loaded.vision.tower.buffers())


def labelled(words: Seq[str]) -> dict[str, str]:
    """Drafters by label: LABEL=DRAFTER, or a drafter that is its own label."""
    made = {}
    for word in words:
        label, sign, rest = word.partition("=")
        is_label = bool(sign) and not set(label) & set("{:,")  # model:NAME,vision=shared has no label
        made[label if is_label else word] = rest if is_label else word
    if len(made) < len(words):
        raise ConfigError("the same drafter is given twice", got=", ".join(words), fix="give labels: LABEL=DRAFTER")
    return made


def base_engine(args: argparse.Namespace) -> LLM:
    """The target, decoding one sequence at a time."""
    torch.set_num_threads(args.threads or torch.get_num_threads())
    loaded = load_model(resolve(args.model), args.dtype)
    if loaded.vision is None:
        raise ConfigError(f"{args.model!r} reads no pictures", fix="give a vision-language model")
    numerics = None if args.numerics == "auto" else args.numerics
    return LLM(loaded, numerics=numerics, max_batch_size=1, max_model_len=args.max_model_len)


def build(word: str) -> Drafter:
    """A drafter from its short name, or from a speculative configuration as JSON."""
    return parse(word).build()[0]


def scene_questions(classes: Seq[str], per_class: int, first: int = 0) -> list[Question]:
    """Questions about held-out scenes, the classes taking turns. first: scenes of each class that are left out."""
    made = [one for one in scenes(per_class, first) if one.kind in classes]
    return [Question(one.id, one.kind, (one.text,), image=one.image, right=one.right) for one in made]


def photographs(folder: str, per_topic: int | None) -> list[Question]:
    """Questions of MMSpec, as many of each topic. folder: with its test.jsonl and images, or the one above it."""
    found = read_suite("mmspec", folder)
    topics = len({one.category for one in found})
    chosen = choose(found, None if per_topic is None else per_topic * topics)
    return [replace(one, category=f"mmspec: {one.category}") for one in chosen]


def converse(
    question: Question, engines: Mapping[str, Engine], params: SamplingParams, flipped: bool = False
) -> Iterator[dict[str, Line]]:
    """All turns of a conversation, each answered by all engines before the next; flipped: the last engine first.

    Every engine goes on from the plain answer: after different texts times could not be compared. A conversation that
    outgrows the context ends.
    """
    answers, order = [], list(engines)[:: -1 if flipped else 1]
    for _ in question.turns:
        chat = question.messages(answers)
        try:
            lines = {name: engines[name].answer(chat, params) for name in order}
        except CacheFull:
            return
        yield {name: lines[name] for name in engines}
        answers.append(lines[PLAIN].text)


class Log:
    """JSON lines: settings first, then a line for each piece of work; a later run leaves out what is there.

    Raises `ConfigError` where the file is of other settings.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any]):
        self.path, self.lines = path, list[dict[str, Any]]()
        self.head: dict[str, Any] = {"settings": json.loads(json.dumps(dict(settings), default=str))}
        if path is None:
            return
        if path.is_file() and (text := path.read_text(encoding="utf-8")):
            kept = text[: text.rfind("\n") + 1]  # a line that was being written when the run was stopped is dropped
            found = [json.loads(line) for line in kept.splitlines()]
            if not found or found[0]["settings"] != self.head["settings"]:
                raise ConfigError(f"{str(path)!r} is of another run", fix="take another file, or the same options")
            self.head, self.lines = found[0], found[1:]
            path.write_text(kept, encoding="utf-8")

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Write the head; a run that goes on keeps the facts that it finds."""
        if self.head.keys() == {"settings"}:
            self.head |= json.loads(json.dumps(dict(facts)))
            self._write("w", self.head)

    def add(self, line: dict[str, Any]) -> None:
        """One piece of work."""
        self.lines.append(json.loads(json.dumps(line)))
        self._write("a", line)

    def _write(self, mode: str, line: Mapping[str, Any]) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open(mode, encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


class Patience:
    """Seconds that a run may take; None: as many as it needs."""

    def __init__(self, seconds: float | None):
        self._end = None if seconds is None else time.monotonic() + seconds

    @property
    def is_over(self) -> bool:
        """Whether nothing more should be begun."""
        return self._end is not None and time.monotonic() > self._end


@contextmanager
def bar(what: str, total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on stderr; `step(what is done now)` moves it on."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=total)
        yield lambda now: progress.update(task, advance=1, description=f"{what}: {now}")


def table(columns: Seq[str], rows: Seq[Seq[object]]) -> str:
    """Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in cells)} |" for cells in lines)


def arguments(doc: str | None, drafters: Seq[str], tokens: int) -> argparse.ArgumentParser:
    """The options that all three scripts have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a vision-language model: a folder, a hub id or a name of the zoo")
    parser.add_argument("--drafters", nargs="+", default=list(drafters), metavar="[LABEL=]NAME_OR_JSON")
    parser.add_argument("--tokens", type=int, default=tokens, help="the longest answer")
    parser.add_argument("--limit", type=int, help="questions of each class, or of each suite")
    parser.add_argument("--seconds", type=float, help="begin nothing more after so long")
    parser.add_argument("--numerics", default="auto", choices=["auto", "invariant", "fast"])
    parser.add_argument("--dtype")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for runs.jsonl (a later run goes on) and results")
    parser.add_argument("--label", help="of the model, in tables and pictures")
    return parser


def settings_of(args: argparse.Namespace, base: LLM, more: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same for two runs to be one."""
    kept = {key: value for key, value in vars(args).items() if key not in ("seconds", "out", "limit", "label")}
    facts = {"fingerprint": base.loaded.fingerprint, "dtype": str(base.loaded.dtype), "numerics": base.numerics}
    return {**kept, **facts, "threads": torch.get_num_threads(), **more}


def save(args: argparse.Namespace, result: Mapping[str, Any], text: str) -> None:
    """result.json and result.md in the folder, if there is one."""
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        whole = {**result, "provenance": provenance()}
        (args.out / "result.json").write_text(json.dumps(whole, indent=1, default=str) + "\n", encoding="utf-8")
        (args.out / "result.md").write_text(text + "\n", encoding="utf-8")


def middle(values: Seq[float]) -> float:
    """Median; 0 of nothing."""
    return statistics.median(values) if values else 0.0
