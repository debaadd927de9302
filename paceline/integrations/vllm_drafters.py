"""Prompt lookup and suffix decoding for use inside vLLM, with the cost model.

    vllm serve MODEL --speculative-config '{"method": "custom_class", "num_speculative_tokens": 8,
                                            "model": "paceline.integrations.vllm_drafters.Suffix"}'

vLLM 0.32 calls this interface experimental: a drafter gets the token ids of each request and returns chains, not
trees. vLLM verifies the drafts by its own rule, so Paceline's guarantee does not apply.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..core.draft import Draft
from ..core.interfaces import DraftBudget, Drafter, DrafterInfo, DraftOptions
from ..core.request import SamplingParams, TokenSequence
from ..core.round import Round
from ..methods import lookup as prompt_lookup
from ..methods.suffix import drafter as suffix
from ..policy import CostModel
from ..verify import Coupled

_PLAIN_STEPS = 5  # that are timed before anything is drafted
_NODES = 4  # of a tree for each token of the chain that is taken out of it


@dataclass
class _Text:
    """A request of vLLM, known by its tokens alone. drafted, hint, accepted: of the last step. is_new: it has none."""

    seq: TokenSequence
    tokens: NDArray[np.int32]
    drafted: list[int] = field(default_factory=list[int])
    hint: int = 0
    accepted: int = 0
    is_new: bool = True


class Proposer:
    """vLLM's "custom_class" interface: `load_model`, and `propose` once per step. Subclasses name the drafter."""

    kind: ClassVar[type[Drafter]]

    def __init__(self, vllm_config: Any, clock: Callable[[], float] = time.perf_counter):
        self.most = vllm_config.speculative_config.num_speculative_tokens
        self.max_length = vllm_config.model_config.max_model_len
        ends = getattr(vllm_config.model_config.hf_config, "eos_token_id", None)
        self.eos_ids = frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])
        self.drafter, self.policy, self._clock = self.kind(), CostModel(self.most, clock=clock), clock
        target: Any = SimpleNamespace(banned_token_ids=frozenset[int]())
        self.drafter.bind(target, Coupled())
        chains: Any = SimpleNamespace(
            info=DrafterInfo(drafts_during_prefill=True), draft_options=self._options, seconds=self.drafter.seconds
        )
        self.policy.bind(chains, lambda rows: statistics.median(self._plain))
        self._texts, self._planned = list[_Text](), list[_Text]()
        self._plain, self._slots = deque[float](maxlen=2 * _PLAIN_STEPS), 0
        self._ended = self._draft_s = 0.0

    def load_model(self, target_model: Any) -> None:
        """Nothing to do: the drafter reads token ids only."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.integer[Any]],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """The draft of each row, [] for none.

        sampled_token_ids: the tokens that each row gained in this step, [] while its prompt is being read.
        num_tokens_no_spec: [B], the length of each text, these tokens included. token_ids_cpu: [B, T], the texts.
        """
        begin = self._clock()
        rows = [row for row, fresh in enumerate(sampled_token_ids) if len(fresh)]
        before, self._texts = self._texts, []
        for row in rows:
            tokens = token_ids_cpu[row, : num_tokens_no_spec[row]]
            self._texts.append(self._text(before, tokens, len(sampled_token_ids[row])))
        reads = len(rows) < len(sampled_token_ids) or any(text.is_new for text in self._texts)
        self._learn(begin - self._ended, reads)
        gone = [text.seq.slot for text in before]  # those that go on were taken out
        self.drafter.release(gone)
        self.policy.release(gone)
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        for row, draft in zip(rows, self._drafts(), strict=True):
            drafts[row] = draft
        self._ended = self._clock()
        self._draft_s = self._ended - begin
        return drafts

    def _options(self, seq: TokenSequence) -> Sequence[DraftOptions]:
        """Those of the drafter, whose trees are cut to chains."""
        return [replace(option, branches=1) for option in self.drafter.draft_options(seq)]

    def _text(self, before: list[_Text], tokens: NDArray[np.int32], num_fresh: int) -> _Text:
        """The known text that has grown to these tokens, or a new one. Rows move between steps and have no ids."""
        was = len(tokens) - num_fresh
        for place, text in enumerate(before):
            if len(text.tokens) == was and np.array_equal(text.tokens, tokens[:was]):
                del before[place]
                text.seq.token_ids += tokens[was:].tolist()
                text.tokens, text.accepted, text.is_new = tokens.copy(), num_fresh - 1, False
                return text
        self._slots += 1
        ids = tokens.tolist()
        seq = TokenSequence(ids[:was], SamplingParams(max_tokens=None), 0, self.eos_ids, self.max_length, token_ids=ids)
        seq.slot = self._slots
        return _Text(seq, tokens.copy())

    def _learn(self, step_s: float, reads: bool) -> None:
        """Report the outcome of the last plan to the policy, unless the batch has changed."""
        if not reads and not any(text.drafted for text in self._texts):
            self._plain.append(step_s)
        if [id(text) for text in self._texts] != [id(text) for text in self._planned]:
            return
        most = max((len(text.drafted) for text in self._texts), default=0)
        for text in self._texts:
            length = len(text.drafted)
            record = Round(
                self.drafter.name,
                num_drafted=length,
                num_accepted=min(text.accepted, length),
                num_emitted=text.accepted + 1,
                token_ids=(0, *text.drafted),
                parents=tuple(range(-1, length)),
                path=tuple(range(1, min(text.accepted, length) + 1)),
                hint=text.hint,
                batch=len(self._texts),
                num_rows=1 + most,
                with_prompt=reads,
                draft_s=self._draft_s,
                verify_s=step_s,
            )
            self.policy.observe(text.seq, record)

    def _drafts(self) -> list[list[int]]:
        """A draft for each text, within the policy's budget."""
        seqs, self._planned = [text.seq for text in self._texts], []
        for text in self._texts:
            text.drafted = []
        if not seqs or len(self._plain) < _PLAIN_STEPS:
            return [[] for _ in seqs]
        self._planned = list(self._texts)
        budgets = list[DraftBudget]()
        for seq, wish in zip(seqs, self.policy.budgets(seqs), strict=True):
            depth = max(0, min(wish.depth, self.most, seq.remaining - 1))
            budgets.append(replace(wish, depth=depth, nodes=_NODES * depth))
        draft = self.drafter.propose(seqs, budgets)
        for row, text in enumerate(self._texts):
            text.drafted = best_path(draft, row) if budgets[row].depth else []
            text.hint = 0 if draft.hints is None else draft.hints[row]
        return [text.drafted for text in self._texts]


class Lookup(Proposer):
    """`paceline.PromptLookup` for vLLM."""

    kind = prompt_lookup.PromptLookup


class Suffix(Proposer):
    """`paceline.Suffix` for vLLM, which drafts the most likely path of its tree."""

    kind = suffix.Suffix


def best_path(draft: Draft, row: int) -> list[int]:
    """The tokens of the path that takes the most likely child at each node, the root left out."""
    tree = draft.tree.rows[row]
    sure = None if draft.confidence is None else draft.confidence[row].tolist()
    path, node = list[int](), 0
    while True:
        below = tree.children[node]
        if not below:
            return path
        node = below[0] if sure is None else max(below, key=sure.__getitem__)
        path.append(tree.token_ids[node])
