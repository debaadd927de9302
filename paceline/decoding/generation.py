"""Decode many sequences with few slots: a finished one makes room for the next at once."""

import weakref
from collections.abc import Callable, Generator, Iterable
from inspect import GEN_CLOSED, getgeneratorstate
from itertools import islice

from ..core.request import Sequence
from .loop import SpeculativeDecoder

RoundStream = Generator[list[Sequence], None, None]


def generate(decoder: SpeculativeDecoder, seqs: Iterable[Sequence]) -> RoundStream:
    """Run every sequence to its end, yielding after each round those that took part in it.

    One is taken from `seqs` when there is a slot for it. Closing the iterator early, an interrupt or an error releases
    every slot; where an interrupt comes in the middle of that, the next call does, by the generator that has ended.
    """
    rounds = _rounds(decoder, seqs, lambda: (run := made()) is not None and getgeneratorstate(run) != GEN_CLOSED)
    made = weakref.ref(rounds)
    return rounds


def _rounds(decoder: SpeculativeDecoder, seqs: Iterable[Sequence], is_used: Callable[[], bool]) -> RoundStream:
    waiting, running, cache = iter(seqs), list[Sequence](), decoder.runner.cache
    cache.reclaim()
    try:
        while True:
            # with none running one is taken in any case: where there is no slot, `admit` says so
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
