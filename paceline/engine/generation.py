"""Decode many sequences with few slots: as soon as one is finished, the next gets its slot."""

import weakref
from collections.abc import Callable, Generator, Iterable
from inspect import GEN_CLOSED, getgeneratorstate
from itertools import islice

from ..core.request import Sequence
from .loop import SpeculativeDecoder

RoundStream = Generator[list[Sequence], None, None]


def generate(decoder: SpeculativeDecoder, seqs: Iterable[Sequence]) -> RoundStream:
    """Run every sequence to its end; yields the sequences of each round after it.

    A sequence is taken from `seqs` when there is a slot for it. All slots are released when the iterator is closed, and
    after an interrupt or an error. If an interrupt prevents that, the next call releases them.
    """
    rounds = _rounds(decoder, seqs, lambda: (run := made()) is not None and getgeneratorstate(run) != GEN_CLOSED)
    made = weakref.ref(rounds)
    return rounds


def _rounds(decoder: SpeculativeDecoder, seqs: Iterable[Sequence], is_used: Callable[[], bool]) -> RoundStream:
    waiting, running, cache = iter(seqs), list[Sequence](), decoder.runner.cache
    cache.reclaim()
    try:
        while True:
            # If none is running, one is taken even without a free slot, so that `admit` raises.
            for seq in islice(waiting, cache.num_free or int(not running)):
                running.append(seq)
                decoder.admit(seq, is_used)
            if not running:
                return
            decoder.step(running)
            if (error := next((seq.error for seq in running if seq.error is not None), None)) is not None:
                raise error
            took_part = running
            running = [seq for seq in running if not seq.is_finished]
            for seq in took_part:
                if seq.is_finished:
                    decoder.release(seq)
            yield took_part
    finally:
        for seq in running:
            decoder.release(seq)
