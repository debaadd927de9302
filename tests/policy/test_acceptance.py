"""What is kept between rounds of `Acceptance` is what would be computed anew."""

import random

from paceline.policy.acceptance import Acceptance
from tests.policy.test_estimates import chain


def test_reading_between_rounds_changes_nothing():
    read, unread, chance = Acceptance(6), Acceptance(6), random.Random(0)
    for _ in range(60):
        slot, accepted, hint = chance.randrange(2), chance.randrange(5), chance.randrange(2)
        for one in (read, unread):
            one.observe(slot, chain(accepted, 4, hint=hint), 4)
        for slot in range(3):
            read.expected(slot, "m", hint)
        if chance.random() < 0.1:
            for one in (read, unread):
                one.release(0)
    unread._priors.clear()
    for slot in range(3):
        for hint in range(3):
            assert read.expected(slot, "m", hint) == unread.expected(slot, "m", hint)
        read.release(slot)
        unread.release(slot)
        unread._priors.clear()
        assert read.expected(slot, "m", 0) == unread.expected(slot, "m", 0)
