from typing import ClassVar

import torch
from torch import nn

from paceline.core.draft import Draft
from paceline.core.interfaces import Drafter, DrafterInfo, DraftOptions
from paceline.core.tree import TokenTree
from paceline.methods.heads.fitting import attach_head, row_dtype
from paceline.methods.heads.parts import DraftHead, HeadConfig
from paceline.methods.spec import HeadSpec
from paceline.schema import checked


@checked
class OneConfig(HeadConfig):
    method: ClassVar[str] = "next_but_one"


class OneHead(DraftHead):
    Config = OneConfig

    def __init__(self, config, draft_ids=None):
        super().__init__(config, draft_ids)
        self.config = config
        self.fc = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, states):
        return self.output(states + self.fc(states))


class NextButOne(Drafter):
    name = "next_but_one"
    info = DrafterInfo(reads_states=True)

    def __init__(self, head):
        self._given = head

    def bind(self, target, verifier):
        self.head = attach_head(self._given, OneHead, target, hidden_size=target.loaded.hidden_size)
        self._target, self._last, self._dtype = target, [target.loaded.num_layers], row_dtype(target)
        target.watch_states(self._last)

    def draft_options(self, seq):
        return (DraftOptions(self.name, hint=0 if seq.num_cached else -1),)

    @torch.inference_mode()
    def propose(self, seqs, budgets):
        rows = []
        for seq, budget in zip(seqs, budgets, strict=True):
            rows.append([seq.token_ids[-1]])
            if budget.depth and seq.num_cached:
                state = self._target.read_states(seq.slot, seq.num_cached - 1, seq.num_cached, self._last)
                rows[-1].append(int(self.head.draft_ids[self.head(state.to(self._dtype)).argmax()]))
        return Draft(TokenTree.chain(rows), source=self.name)


@checked
class NextButOneSpec(HeadSpec):
    method = "next_but_one"
    drafter = NextButOne
    tokens = 1

    def build(self):
        return NextButOne(self.model)
