"""A drafter whose head learns from the answers it drafts for.

    answer ends ── states, tokens ──> recorder ─> trainer ──> new head ── on trial beside the old one ──> kept, or not

While a new head is on trial, requests draft with the old and the new one in turn, so that both see the same traffic.
The new one stays unless fewer of its tokens are accepted. Each head has a drafter and so caches of its own: no cache
outlives a swap.
"""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from ..core.draft import Draft
from ..core.interfaces import DraftBudget, Drafter, DraftOptions, Target, Verifier
from ..core.request import TokenSequence
from ..core.tree import TokenTree
from ..core.walk import Walk
from ..errors import ConfigError
from ..methods.choose import Part, merged
from ..methods.eagle.drafter import Eagle, EagleSpec
from ..methods.heads.folder import load_head, save_head
from ..methods.heads.info import head_class
from ..methods.method import named
from ..methods.spec import DrafterSpec, HeadSpec
from ..methods.table import method_named
from ..train.config import RunConfig
from ..train.head_recipe import HeadRecipe
from ..train.prepare import stored_states
from ..train.run_folder import hash_tensors, need
from .folder import LearnFolder, LearnSettings, Recorded, Recorder
from .learner import Learner
from .target import FILE, save_target


@dataclass(eq=False)
class _Head:
    """A head that drafts. drafts, accepted: how often it did in this process, and how many tokens were accepted."""

    folder: Path
    drafter: Drafter
    drafts: int = 0
    accepted: int = 0

    @property
    def mean(self) -> float:
        return self.accepted / max(1, self.drafts)


@final
class Learned(Drafter):
    """Draft with a head that learns from the answers, in a folder of its own. See docs/learning.md.

    head: the options of the head that it begins with; None: it drafts nothing until it has learnt an EAGLE-1 head.
    folder: where answers and heads are. A folder with heads goes on from the best one.
    settings: how much is recorded and learnt. trains: whether the trainer runs; otherwise answers are recorded alone.
    """

    name: ClassVar[str] = "learned"

    def __init__(
        self, head: DrafterSpec | None, folder: Path | str, settings: LearnSettings | None = None, trains: bool = True
    ):
        self._folder, self._settings, self._trains = LearnFolder(folder), settings or LearnSettings(), trains
        spec = head or EagleSpec(model=str(folder))
        self._recipe = recipe_of(spec)
        assert isinstance(spec, HeadSpec)
        self._spec, self._start = spec, None if head is None else spec.model
        if trains:
            need("accelerate", "learning")
        self._heads, self._of, self._drafted = list[_Head](), dict[int, _Head](), dict[int, _Head]()  # by slot
        self._count = self.swaps = self.rollbacks = 0

    def bind(self, target: Target, verifier: Verifier) -> None:
        """Lock the folder and load its best head.

        Raises `ConfigError` where another process holds it, or where it is of another target or head, and
        `IncompatibleModels` where heads cannot learn from this target.
        """
        super().bind(target, verifier)
        loaded, folder = target.loaded, self._folder
        loaded.output_rows()  # which a target may lack: before anything is written
        plan = self._recipe.plan(self._spec.method, RunConfig(model=loaded.name, out=str(folder.path)), loaded)
        start: Any = None if self._start is None else load_head(self._start, loaded)
        config = self._recipe.configure(plan) if start is None else start.config
        about = {"target": loaded.name, "fingerprint": loaded.fingerprint, "method": self._spec.method}
        folder.claim({**about, "start": None if start is None else hash_tensors(_rounded(start))})
        try:
            if not (folder.path / FILE).exists():
                save_target(folder.path, loaded)
            if start is not None and not folder.heads():
                save_head(folder.path / "heads" / "000000", start, loaded, {})
            read = partial(_read, self._spec, target, verifier)
            self._heads = [_Head(place, read(place)) for place in folder.heads()[:1]]
            self._shape = None if self._heads else _random(config, target, verifier)
            self.info = self._drafter.info
            self._layers = tuple(sorted({*config.states, loaded.num_layers}))
            target.watch_states(self._layers)
            record = {"layers": self._layers, "target": loaded.name, "fingerprint": loaded.fingerprint}
            recorder, self._cache = Recorder(folder, record, self._settings.max_bytes), target.cache
            is_busy = partial(_has_requests, target.cache)
            self.learner = Learner(folder, recorder, self._settings, is_busy, read, self._trains)
        except BaseException:
            folder.release()
            raise
        self._target = target
        self.close = weakref.finalize(self, self.learner.close)  # also when the interpreter ends

    def draft_options(self, seq: TokenSequence) -> Sequence[DraftOptions]:
        if not self._heads:
            return (DraftOptions(self.name, hint=-1),)
        return (replace(self._head_of(seq).drafter.draft_options(seq)[0], source=self.name),)

    def seconds(self) -> Mapping[str, tuple[float, float]]:
        """Before there is a head, those of a random one of the same shape."""
        costs = [*self._drafter.seconds().values()]
        return {self.name: costs[0]} if costs else {}

    def propose(self, seqs: Sequence[TokenSequence], budgets: Sequence[DraftBudget]) -> Draft:
        parts: list[Part | None] = [None] * len(seqs)
        self._drafted = {seq.slot: self._head_of(seq) for seq in seqs} if self._heads else {}
        for head in self._heads:
            rows = [row for row, seq in enumerate(seqs) if self._drafted[seq.slot] is head]
            if rows:
                draft = head.drafter.propose([seqs[row] for row in rows], [budgets[row] for row in rows])
                for place, row in enumerate(rows):
                    parts[row] = draft, place
                if len(rows) == len(seqs):
                    return replace(draft, source=self.name, sources=None)
        empty = Draft(TokenTree.chain([[seq.token_ids[-1]] for seq in seqs]))
        draft = merged([part or (empty, row) for row, part in enumerate(parts)])
        return replace(draft, source=self.name, sources=None)

    def observe(self, seqs: Sequence[TokenSequence], draft: Draft, logits: Tensor, walks: Sequence[Walk]) -> None:
        """Record the answers that ended, count what was accepted, and swap heads: the next round drafts with them."""
        for row, (seq, walk) in enumerate(zip(seqs, walks, strict=True)):
            head = self._drafted.pop(seq.slot, None)
            if head is not None and len(draft.tree.rows[row].candidates) > 1:
                head.drafts, head.accepted = head.drafts + 1, head.accepted + len(walk.path)
            if seq.is_finished and may_record(seq) and not self.learner.has_failed:
                self.learner.put(self._recorded(seq))
        for head in self._heads:
            head.drafter.observe(seqs, draft, logits, walks)
        self._swap()

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._of.pop(slot, None)
            self._drafted.pop(slot, None)
        for head in self._heads:
            head.drafter.release(slots)
        if _has_requests(self._cache):  # one was admitted just now
            self.learner.pause()

    def metrics(self) -> Mapping[str, tuple[str, float]]:
        recorder, current = self.learner.recorder, self._heads[-1] if self._heads else None
        return {
            "learn_answers_total": ("Answers recorded to learn from.", recorder.answers),
            "learn_answer_tokens_total": ("Their tokens.", recorder.tokens),
            "learn_heads_total": ("New heads that stayed.", self.swaps),
            "learn_rollbacks_total": ("New heads that did not.", self.rollbacks),
            "learn_head": ("Number of the newest head; 0: the one it began with.", _number(current)),
            "learn_accepted_per_draft": ("Accepted tokens of its drafts.", current.mean if current else 0.0),
            "learn_stopped": ("Whether learning has stopped after an error.", float(self.learner.has_failed)),
        }

    @property
    def _drafter(self) -> Drafter:
        """Of the head in use; before there is one, of a random head."""
        drafter = self._heads[0].drafter if self._heads else self._shape
        assert drafter is not None
        return drafter

    def _head_of(self, seq: TokenSequence) -> _Head:
        """The head of a sequence: while one is on trial, of each second request."""
        head = self._of.get(seq.slot)
        if head not in self._heads:
            self._count += 1
            head = self._of[seq.slot] = self._heads[self._count % len(self._heads)]
        return head

    def _swap(self) -> None:
        """Take a new head on trial, or end the trial."""
        if len(self._heads) < 2:
            offered, self.learner.offered = self.learner.offered, None
            if offered is None:
                return
            self._heads.append(_Head(*offered))
            if len(self._heads) == 1:  # the first
                self.swaps, self._shape = self.swaps + 1, None
            for head in self._heads:
                head.drafts = head.accepted = 0
        elif all(head.drafts >= self._settings.trial for head in self._heads):
            old, new = self._heads
            stays = new.mean >= old.mean
            self.swaps, self.rollbacks = self.swaps + stays, self.rollbacks + (not stays)
            self._heads = [new if stays else old]
            self.learner.keep(self._heads[0].folder)

    def _recorded(self, seq: TokenSequence) -> Recorded:
        begin = max(0, len(seq.prompt_ids) - self._settings.prompt_tokens)
        states = stored_states(self._target, seq, self._layers, begin)
        ids, params = seq.prompt_ids[begin:], seq.params
        return Recorded(ids, seq.output_ids, params.temperature, seq.seed, seq.finish_reason, states)


def may_record(seq: TokenSequence) -> bool:
    """Whether an answer may be learnt from: it is whole, not private, and read no image."""
    has_images = seq.vision is not None and bool(seq.vision.images)
    return seq.error is None and not seq.params.is_private and not has_images


def recipe_of(spec: DrafterSpec) -> type[HeadRecipe]:
    """What trains such heads. Raises `ConfigError` for a drafter that does not learn."""
    recipe = method_named(spec.method).recipe
    kind: Any = named(recipe) if recipe else None
    if not (isinstance(spec, HeadSpec) and isinstance(kind, type) and issubclass(kind, HeadRecipe)):
        expected, fix = "a head over the target's states", "name such a head, or none: a new one is made"
        raise ConfigError("this drafter does not learn", got=spec.name, expected=expected, fix=fix)
    return kind


def _read(spec: HeadSpec, target: Target, verifier: Verifier, place: Path) -> Drafter:
    drafter = replace(spec, model=str(place)).build()
    drafter.bind(target, verifier)
    return drafter


def _random(config: Any, target: Target, verifier: Verifier) -> Drafter:
    drafter = Eagle(head_class(config.method)(config, torch.arange(config.draft_vocab_size)))
    drafter.bind(target, verifier)
    return drafter


def _has_requests(cache: Any) -> bool:
    return cache.num_free < cache.num_slots


def _rounded(head: torch.nn.Module) -> dict[str, Tensor]:
    """The weights of a head, as a folder holds them."""
    return {n: t.to(torch.bfloat16) if t.is_floating_point() else t for n, t in head.state_dict().items()}


def _number(head: _Head | None) -> int:
    return int(head.folder.name) if head else 0
