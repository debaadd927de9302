"""Predicted outputs: the request brings a text that the answer is likely to repeat, such as the file that it edits.

    prediction   x = 1 ; y = 2 ; z = 3        `SamplingParams.extra_args["prediction"]`
    answer       x = 1 ; y = 7 ;              7 is not there, so it stands for the 2, and " z = 3" is drafted

The idea is that of OpenAI's "Predicted Outputs". A wrong prediction costs acceptance and nothing else.
"""

from bisect import bisect
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import ClassVar, final

from ..core.draft import Draft
from ..core.interfaces import DraftBudget, Drafter, DrafterInfo, DraftOptions
from ..core.request import Sequence
from ..core.tree import TokenTree
from ..sampling.scores import before_banned
from ..schema import checked
from .prompt_lookup import LONGEST_HINT
from .registry import DrafterSpec
from .trees import up_to_end

LONGEST = 32
"""Tokens of the answer that are compared with a place of the prediction."""
MOST_PLACES = 64
"""Places on each side of the expected one that are compared: a token may be frequent."""


@dataclass
class _Place:
    """How far an answer has come in its prediction.

    found: where each token occurs. next: the place of the token to draft. agreed: how many tokens of the answer, up to
    its last, are those before this place. num_read: tokens of the text that were compared.
    """

    found: dict[int, list[int]]
    num_read: int
    next: int = 0
    agreed: int = LONGEST_HINT


@final
class PredictedOutput(Drafter):
    """Draft what follows in the prediction of the request, and find the place again where the answer left it.

    The place is where the most of the last tokens of the answer occur, the nearest of several. A token that is not in
    the prediction replaces one of it. Requests without a prediction get no drafts; combine it with a drafter that has
    some for them.
    """

    name: ClassVar[str] = "prediction"
    info = DrafterInfo(drafts_during_prefill=True)  # it reads tokens only

    def __init__(self):
        self._places: dict[int, _Place] = {}

    def draft_options(self, seq: Sequence) -> Seq[DraftOptions]:
        """The hint is how many of the last tokens agree, up to 8, also before the first; -1 where nothing is left."""
        place = self._read(seq)
        return (DraftOptions(self.name, hint=-1 if place is None else min(place.agreed, LONGEST_HINT)),)

    def propose(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> Draft:
        rows, hints = list[list[int]](), list[int]()
        for seq, budget in zip(seqs, budgets, strict=True):
            place = self._read(seq) if budget.depth else None
            begin = len(seq.prediction) if place is None else place.next
            left = before_banned(list(seq.prediction[begin : begin + budget.depth]), self.banned_token_ids)
            rows.append([seq.token_ids[-1], *up_to_end(seq, left)])
            hints.append(-1 if place is None else min(place.agreed, LONGEST_HINT))
        return Draft(TokenTree.chain(rows), source=self.name, hints=tuple(hints))

    def release(self, slots: Seq[int]) -> None:
        for slot in slots:
            self._places.pop(slot, None)

    def _read(self, seq: Sequence) -> _Place | None:
        """The place after the last token; None where nothing is left of the prediction."""
        if not seq.prediction:
            return None
        place = self._places.get(seq.slot)
        if place is None:
            place = self._places[seq.slot] = _Place({}, len(seq.prompt_ids))
            for index, token in enumerate(seq.prediction):
                place.found.setdefault(token, []).append(index)
        for end in range(place.num_read, len(seq.token_ids)):
            place.next, place.agreed = _after(seq, place, end)
        place.num_read = len(seq.token_ids)
        return place if place.next < len(seq.prediction) else None


def _after(seq: Sequence, place: _Place, end: int) -> tuple[int, int]:
    """The next place and the tokens that agree before it, once the token at `end` of the text is there."""
    tokens, expected = seq.prediction, place.next
    if expected < len(tokens) and tokens[expected] == seq.token_ids[end]:
        return expected + 1, place.agreed + 1
    found = place.found.get(seq.token_ids[end], ())
    middle = bisect(found, expected)
    near = found[max(0, middle - MOST_PLACES) : middle + MOST_PLACES]
    if not near:
        return expected + 1, 0
    agreed = {index: _agreed(seq, index, end) for index in near}
    best = max(near, key=lambda index: (agreed[index], -abs(index - expected)))
    return best + 1, agreed[best]


def _agreed(seq: Sequence, index: int, end: int) -> int:
    """How many tokens of the answer up to `end` are those of the prediction up to `index`."""
    most = min(LONGEST, index + 1, end + 1 - len(seq.prompt_ids))
    differs = (k for k in range(1, most) if seq.prediction[index - k] != seq.token_ids[end - k])
    return next(differs, most)


@checked
class PredictedOutputSpec(DrafterSpec):
    """No options."""

    method = "prediction"
    drafter = PredictedOutput
    tokens = 16  # copying costs nothing, and predictions are mostly right
