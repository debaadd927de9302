"""Decode many sequences with few slots: a finished one makes room for the next at once."""

from collections.abc import Iterable, Iterator
from itertools import islice

from ..core.request import Sequence
from .loop import SpeculativeDecoder


def generate(decoder: SpeculativeDecoder, seqs: Iterable[Sequence]) -> Iterator[list[Sequence]]:
    """Run every sequence to its end, yielding after each round those that took part in it.

    One is taken from `seqs` when there is a slot for it, so that those to come need not be in memory yet. Closing the
    iterator early, an interrupt or an error releases every slot, so the decoder stays usable.
    """
    waiting, running = iter(seqs), list[Sequence]()
    try:
        while True:
            for seq in islice(waiting, decoder.runner.cache.num_slots - len(running)):
                running.append(seq)
                decoder.admit(seq)
            if not running:
                return
            decoder.step(running)
            took_part = running
            running = [seq for seq in running if not seq.is_finished]
            for seq in took_part:
                if seq.is_finished:
                    decoder.release(seq)
            yield took_part
    finally:
        for seq in running:
            decoder.release(seq)
