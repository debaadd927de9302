"""Decode many sequences with few slots: a finished one makes room for the next at once."""

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq

from ..core.request import Sequence
from .loop import SpeculativeDecoder


def generate(decoder: SpeculativeDecoder, seqs: Seq[Sequence]) -> Iterator[list[Sequence]]:
    """Run every sequence to its end, yielding after each round those that took part in it.

    Closing the iterator early, an interrupt or an error releases every slot, so the decoder stays usable.
    """
    waiting, running = deque(seqs), list[Sequence]()
    try:
        while waiting or running:
            while waiting and len(running) < decoder.runner.cache.num_slots:
                running.append(waiting.popleft())
                decoder.admit(running[-1])
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
