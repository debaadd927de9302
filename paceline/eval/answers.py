"""What is asked, and what each side made of it: the lines of `answers.jsonl`."""

from dataclasses import asdict, dataclass, field

from ..core.outputs import Round


@dataclass(frozen=True)
class Ask:
    """One turn of one prompt, the same for every side.

    index: place of the prompt in the run, the unit of every interval. repeat, turn: from 0. seed: of a sampled answer.
    text: what the user says in this turn. messages: the whole chat; empty for a prompt that is bare text.
    """

    index: int
    repeat: int
    turn: int
    id: str
    category: str
    topic: str
    text: str
    messages: list[dict[str, object]]
    token_ids: list[int]
    seed: int

    @property
    def has_image(self) -> bool:
        """Whether the chat shows a picture."""
        return any(isinstance(message["content"], list) for message in self.messages)

    @property
    def prompt(self) -> list[int] | list[dict[str, object]]:
        """What our engines are given: token ids, which every side has the same, or the chat with its pictures."""
        return self.messages if self.has_image else self.token_ids


@dataclass(frozen=True)
class Answer:
    """One side's answer to one `Ask`.

    num_tokens: those that came after the pass that read the prompt, which gives the first and may give more.
    seconds: of decoding, after that pass; among the requests of a batch each round's time is shared out.
    prefill_s: of reading the prompt. passes: of the model, likewise shared out; None where a peer does not tell.
    token_ids: None where a peer does not tell. verdict, reason: how it compares with the plain answer.
    """

    ask: Ask
    side: str
    token_ids: list[int] | None
    num_tokens: int
    text: str
    seconds: float
    prefill_s: float
    passes: float | None
    seed: int | None = None
    finish_reason: str | None = None
    origins: list[str] = field(default_factory=list[str])
    sources: list[str] = field(default_factory=list[str])
    rounds: list[Round] = field(default_factory=list[Round])
    verdict: str | None = None
    reason: str | None = None

    @property
    def length(self) -> int:
        """Tokens of the whole answer; a peer ends its prefill with one."""
        return self.num_tokens + 1 if self.token_ids is None else len(self.token_ids)

    def as_dict(self) -> dict[str, object]:
        """One line of `answers.jsonl`."""
        return {
            "index": self.ask.index,
            "id": self.ask.id,
            "category": self.ask.category,
            "topic": self.ask.topic,
            "turn": self.ask.turn,
            "repeat": self.ask.repeat,
            "side": self.side,
            "prompt": self.ask.text,
            "num_prompt_tokens": len(self.ask.token_ids),
            "num_tokens": self.num_tokens,
            "token_ids": self.token_ids,
            "text": self.text,
            "seconds": self.seconds,
            "prefill_s": self.prefill_s,
            "passes": self.passes,
            "seed": self.seed,
            "finish_reason": self.finish_reason,
            "verdict": self.verdict,
            "reason": self.reason,
            "origins": self.origins,
            "sources": self.sources,
            "rounds": [asdict(one) for one in self.rounds],
        }
