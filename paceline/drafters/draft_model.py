"""A smaller model of the same tokenizer drafts a chain.

Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318).
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import ClassVar, final

import torch

from ..core.draft import Draft
from ..core.interfaces import DraftBudget, Drafter, Outlook, Target, Verifier
from ..core.outputs import TargetOutput, VerifyOutput
from ..core.request import Sequence
from ..errors import IncompatibleModels
from ..quant import Weights, check_weights
from ..runner import LoadedModel, ModelRunner, load_model, with_weights
from ..sampling import DraftSampler
from ..zoo import resolve
from .chain import draft_chains

_PENDING = 8
"""More tokens than this are prefilled; fewer ride along with the first drafting pass."""


@final
class DraftModel(Drafter):
    """Draft with another model: a folder, a hub id, a name that `paceline models` lists, or one already loaded.

    dtype, device: of the draft; None keeps the checkpoint's and takes the target's device. weights: "int8" or "int4"
    rounds the draft's weights when it is loaded: a faster draft that is right a little less often.
    """

    name: ClassVar[str] = "draft_model"

    def __init__(
        self,
        model: str | LoadedModel,
        dtype: str | torch.dtype | None = None,
        device: str | None = None,
        weights: Weights | None = None,
    ):
        self._model, self._dtype, self._device = model, dtype, device
        self._weights: Weights | None = check_weights(weights)
        self._runner: ModelRunner | None = None

    def bind(self, target: Target, verifier: Verifier) -> None:
        """Load the draft; raise `IncompatibleModels` unless its tokenizer is the target's."""
        assert isinstance(target, ModelRunner)
        if isinstance(self._model, LoadedModel):
            loaded = self._model
        else:
            loaded = load_model(resolve(self._model), self._dtype, self._device or target.loaded.device)
        check_same_tokenizer(target.loaded, loaded)
        if loaded.model is target.loaded.model:
            raise IncompatibleModels("the draft is the target itself", fix="draft with a smaller model, or none")
        if self._weights is not None:
            loaded, _ = with_weights(loaded, self._weights)
        self._runner = ModelRunner(loaded, target.cache.num_slots, min(target.max_length, loaded.context))
        self._sampler = DraftSampler(coupled=verifier.exact)
        self._vocab_size = target.vocab_size

    @property
    def runner(self) -> ModelRunner:
        """The draft's own runner, once bound."""
        assert self._runner is not None, "bind() comes first"
        return self._runner

    def seconds(self) -> Mapping[str, tuple[float, float]]:
        """A pass of the draft over one token, and its reading."""
        return {self.name: (self.runner.pass_seconds(1), self.runner.read_seconds())}

    def outlook(self, seq: Sequence) -> Seq[Outlook]:
        """Pending are the tokens before the last one that the draft has not read; -1 once its context is full."""
        if self.runner.max_length <= len(seq.token_ids):
            return (Outlook(self.name, hint=-1),)
        return (Outlook(self.name, pending=seq.num_cached - self.runner.cache.lengths[seq.slot]),)

    def propose(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> Draft:
        """Catch up with what was emitted, then draft; rows that outgrew the draft's own context propose nothing."""
        runner, pending, limits = self.runner, [], []
        for seq, budget in zip(seqs, budgets, strict=True):
            room = runner.max_length - len(seq.token_ids)
            limits.append(replace(budget, depth=max(0, min(budget.depth, room))))
            if limits[-1].depth == 0:
                pending.append([])
                continue
            cached = runner.cache.lengths[seq.slot]
            if len(seq.token_ids) - cached > _PENDING:
                runner.prefill(seq.slot, seq.token_ids[cached:-1])
                cached = runner.cache.lengths[seq.slot]
            pending.append(seq.token_ids[cached:])
        return draft_chains(runner, self._sampler, seqs, limits, pending, self._vocab_size, self.name)

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOutput, verdict: VerifyOutput) -> None:
        """Forget rejected tokens: what stays cached is a prefix of the text, its last token never included."""
        for seq in seqs:
            cached = self.runner.cache.lengths[seq.slot]
            self.runner.cache.truncate(seq.slot, min(cached, seq.num_cached))

    def release(self, slots: Seq[int]) -> None:
        """Empty these slots."""
        for slot in slots:
            self.runner.cache.lengths[slot] = 0


def check_same_tokenizer(target: LoadedModel, draft: LoadedModel) -> None:
    """Compare the token strings themselves, so that vocabularies padded to different sizes still match."""
    if target.tokenizer is None or draft.tokenizer is None:
        if target.vocab_size != draft.vocab_size:
            raise IncompatibleModels(
                "the vocabularies differ in size and there is no tokenizer to compare",
                got=f"draft {draft.vocab_size}, target {target.vocab_size}",
            )
        return
    ours, theirs = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    differing = [token for token, index in theirs.items() if ours.get(token, index) != index]
    missing = [token for token in theirs if token not in ours]
    if differing or len(missing) > 0.01 * len(theirs):
        example = (differing or missing)[0]
        raise IncompatibleModels(
            f"{draft.name} and {target.name} have different tokenizers",
            got=f"{len(differing)} tokens under other ids, {len(missing)} unknown ones, for example {example!r}",
            expected="the same token strings under the same ids",
            fix="take a draft of the target's own family",
        )
