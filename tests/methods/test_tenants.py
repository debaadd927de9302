"""What a tenant is drafted does not depend on what others asked, with every drafter that keeps something."""

from collections.abc import Callable

import pytest

from paceline import Coupled, DraftModel, Fixed, Lookahead, Ouroboros, Suffix, TokenRecycling
from paceline.core.interfaces import Drafter
from paceline.core.request import SamplingParams
from paceline.engine.loop import SpeculativeDecoder
from tests.exactness.drafters import small_draft
from tests.helpers import REPEATING, generate, loaded, prompt, runner, sequence

KEEPING: dict[str, Callable[[], Drafter]] = {
    "suffix": lambda: Suffix(answers=1000),
    "recycling": TokenRecycling,
    "lookahead": lambda: Lookahead(window=4, ngram=3, guesses=3, pool="shared"),
    "ouroboros": lambda: Ouroboros(DraftModel(small_draft()), ngram=3),
}
A, B = ({"cache_salt": tenant} for tenant in "AB")
ASKED = prompt(6, 3) + REPEATING


def drafts(make: Callable[[], Drafter], *batches: list[dict[str, object]]) -> list[object]:
    """The drafts of the last request, whose text the others share; each batch is answered at once."""
    decoder, seqs = SpeculativeDecoder(runner(loaded()), make(), Coupled(), Fixed(4, 12)), []
    for batch in batches:
        seqs = [sequence(loaded(), ASKED, SamplingParams(max_tokens=16, extra_args=owner)) for owner in batch]
        for _ in generate(decoder, seqs):
            pass
    return [(record.token_ids, record.parents, record.path) for record in seqs[-1].rounds]


@pytest.mark.parametrize("name", KEEPING)
def test_others_change_no_draft(name, monkeypatch):
    make = KEEPING[name]
    alone, again = drafts(make, [B]), drafts(make, [B], [B])
    assert drafts(make, [A], [{}], [B]) == drafts(make, [A, B]) == alone
    assert drafts(make, [B], [A], [B]) == again
    assert drafts(make, [B | {"store": False}], [B]) == alone, "a private request leaves nothing"
    monkeypatch.setattr(SamplingParams, "tenant", "")
    assert drafts(make, [A], [B]) == again != alone
