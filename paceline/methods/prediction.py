"""Predicted outputs: a request has a text that the answer is likely to repeat, such as the file that it edits.

    prediction   x = 1 ; y = 2 ; z = 3        `SamplingParams.extra_args["prediction"]`
    answer       x = 1 ; y = 7 ;              7 is not in it, so it replaces the 2, and " z = 3" is drafted

As in OpenAI's "Predicted Outputs". A wrong prediction only costs acceptance.
"""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from ..core.draft import Draft
from ..core.interfaces import DraftBudget, Drafter, DrafterInfo, DraftOptions
from ..core.request import TokenSequence
from ..core.tree import TokenTree
from ..sampling.scores import before_banned
from ..schema import checked
from .heads.trees import up_to_end
from .lookup import LONGEST_HINT
from .spec import DrafterSpec

MAX_MATCH = 32
"""How many tokens of the answer are compared with the prediction at each place."""
MAX_PLACES = 64
"""How many places on each side of the expected one are compared, since a token may be frequent."""


@dataclass
class _Place:
    """The position of an answer in its prediction.

    occurrences: the places of each token in the prediction.
    num_read: how many tokens of the text were compared.
    next: the place of the next token to draft.
    num_matched: how many last tokens of the answer equal those before this place.
    """

    occurrences: dict[int, list[int]]
    num_read: int
    next: int = 0
    num_matched: int = LONGEST_HINT


@final
class PredictedOutput(Drafter):
    """Draft what follows in the prediction of the request; if the answer deviates from it, find the place again.

    The place is where most of the answer's last tokens match, the nearest of several. A token that is not in the
    prediction replaces one of it. Requests without a prediction get no drafts; combine it with another drafter for
    them.
    """

    name: ClassVar[str] = "prediction"
    info = DrafterInfo(drafts_during_prefill=True)  # it reads tokens only

    def __init__(self):
        self._places: dict[int, _Place] = {}

    def draft_options(self, seq: TokenSequence) -> Sequence[DraftOptions]:
        """The hint is the number of matched last tokens, at most 8, and 8 at the start; -1 at the prediction's end."""
        place = self._read(seq)
        return (DraftOptions(self.name, hint=-1 if place is None else min(place.num_matched, LONGEST_HINT)),)

    def propose(self, seqs: Sequence[TokenSequence], budgets: Sequence[DraftBudget]) -> Draft:
        rows, hints = list[list[int]](), list[int]()
        for seq, budget in zip(seqs, budgets, strict=True):
            place = self._read(seq) if budget.depth else None
            begin = len(seq.prediction) if place is None else place.next
            left = before_banned(list(seq.prediction[begin : begin + budget.depth]), self.banned_token_ids)
            rows.append([seq.token_ids[-1], *up_to_end(seq, left)])
            hints.append(-1 if place is None else min(place.num_matched, LONGEST_HINT))
        return Draft(TokenTree.chain(rows), source=self.name, hints=tuple(hints))

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._places.pop(slot, None)

    def _read(self, seq: TokenSequence) -> _Place | None:
        """The place after the last token; None at the end of the prediction, or without one."""
        if not seq.prediction:
            return None
        place = self._places.get(seq.slot)
        if place is None:
            place = self._places[seq.slot] = _Place({}, len(seq.prompt_ids))
            for index, token in enumerate(seq.prediction):
                place.occurrences.setdefault(token, []).append(index)
        for end in range(place.num_read, len(seq.token_ids)):
            place.next, place.num_matched = _after(seq, place, end)
        place.num_read = len(seq.token_ids)
        return place if place.next < len(seq.prediction) else None


def _after(seq: TokenSequence, place: _Place, end: int) -> tuple[int, int]:
    """The next place, and how many tokens match before it, after the token at `end` of the text."""
    tokens, expected = seq.prediction, place.next
    if expected < len(tokens) and tokens[expected] == seq.token_ids[end]:
        return expected + 1, place.num_matched + 1
    occurrences = place.occurrences.get(seq.token_ids[end], ())
    middle = bisect(occurrences, expected)
    near = occurrences[max(0, middle - MAX_PLACES) : middle + MAX_PLACES]
    if not near:
        return expected + 1, 0
    matched = {index: _count_matching(seq, index, end) for index in near}
    best = max(near, key=lambda index: (matched[index], -abs(index - expected)))
    return best + 1, matched[best]


def _count_matching(seq: TokenSequence, index: int, end: int) -> int:
    """How many last tokens of the answer up to `end` equal those of the prediction up to `index`."""
    most = min(MAX_MATCH, index + 1, end + 1 - len(seq.prompt_ids))
    differs = (k for k in range(1, most) if seq.prediction[index - k] != seq.token_ids[end - k])
    return next(differs, most)


@checked
class PredictedOutputSpec(DrafterSpec):
    """No options."""

    method = "prediction"
    drafter = PredictedOutput
    tokens = 16  # copying costs nothing, and predictions are mostly right
