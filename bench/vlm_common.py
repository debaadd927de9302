"""What the scripts about pictures share: engines that take turns, their options and settings."""

import argparse
import copy
import json
import statistics
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from common import beside
from vlm_log import Log as Log
from vlm_log import Patience as Patience
from vlm_log import bar as bar
from vlm_log import table as table
from vlm_prices import Spent, Watched

from examples.tiny_vlm.questions import scene_suite
from paceline import LLM, SamplingParams
from paceline.core.interfaces import Drafter, DraftPolicy
from paceline.drafters import Choose, DraftModel, SelfQuantized
from paceline.errors import CacheFull, ConfigError
from paceline.eval.suites import Question, choose, read_suite
from paceline.eval.summary import trained_hash
from paceline.llm import Prompt
from paceline.runner import LoadedModel, ModelRunner, load_model
from paceline.spec_config import parse
from paceline.system.provenance import provenance
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
    return [one for one in scene_suite(per_class, first) if one.category in classes]


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


def draft_fingerprints(word: str, target: LoadedModel) -> dict[str, str]:
    """Which checkpoint each model, head and trained weights of a drafter is; models are loaded to tell, and dropped."""
    found: dict[str, str] = {}
    for part in (one := parse(word)).drafters or (one,):
        if part.method == "draft_model":
            found[part.name] = load_model(resolve(str(part.model)), target.dtype, target.device).fingerprint
        elif (known := trained_hash(part)) is not None:
            found[part.name] = known
    return found


def settings_of(args: argparse.Namespace, base: LLM, more: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same for two runs to be one: the checkpoints too, whatever their names."""
    kept = {key: value for key, value in vars(args).items() if key not in ("seconds", "out", "limit", "label")}
    facts = {"fingerprint": base.loaded.fingerprint, "dtype": str(base.loaded.dtype), "numerics": base.numerics}
    drafts = {label: draft_fingerprints(word, base.loaded) for label, word in labelled(args.drafters).items()}
    return {**kept, **facts, "drafts": drafts, "threads": torch.get_num_threads(), **more}


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
