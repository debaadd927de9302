"""A peer as one of the sides of a benchmark."""

from collections.abc import Sequence
from dataclasses import replace

from paceline.errors import ConfigError
from paceline.measure.run import Ask, BenchOptions, Side, TimedAnswer

from .base import Peer


class PeerSide(Side):
    """Another engine in one of its modes; it answers one prompt at a time.

    eos_ids: the model's end tokens, which some systems emit and others do not.
    """

    is_peer = True

    def __init__(self, peer: Peer, mode: str, eos_ids: frozenset[int]):
        super().__init__(f"{peer.name}:{mode}")
        self.peer, self.mode, self.eos_ids = peer, mode, eos_ids

    def answer(self, asks: Sequence[Ask], options: BenchOptions) -> list[TimedAnswer]:
        """Ask the peer, with its own count of tokens and its own clock. Raises `ConfigError` for an image."""
        if any(ask.question.image for ask in asks):
            raise ConfigError("peers are asked about text alone", got="a prompt with an image", fix="leave --peer out")
        answers = []
        for ask in asks:
            got = self.peer.run(self.mode, ask.token_ids, options.max_tokens, options.temperature)
            passes = None if got.num_passes is None else float(got.num_passes)
            answers.append(
                TimedAnswer(
                    ask, self.name, got.token_ids, got.num_tokens, got.text, got.decode_s, got.prefill_s, passes
                )
            )
        return answers

    def judge(self, plain: TimedAnswer, mine: TimedAnswer, options: BenchOptions) -> TimedAnswer:
        """`mine` with whether it is our plain answer, by tokens where the peer gives them, an end token apart."""
        if mine.token_ids is None or plain.token_ids is None:
            same = mine.text.strip() == plain.text.strip()
        else:
            ours, theirs = (self._without_end(ids) for ids in (plain.token_ids, mine.token_ids))
            same = ours == theirs
        return replace(mine, verdict="identical" if same else "different")

    def _without_end(self, token_ids: list[int]) -> list[int]:
        end = len(token_ids)
        while end and token_ids[end - 1] in self.eos_ids:
            end -= 1
        return token_ids[:end]
