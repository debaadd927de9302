"""What a peer is: another inference system that answers the same prompts with the same weights."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import PacelineError


class PeerFailed(PacelineError):
    """A peer that was running and died, hung, or answered with an error."""


@dataclass(frozen=True)
class PeerAnswer:
    """One answer and its times, counted alike for every peer.

    A peer's clock starts when it takes the prompt. `prefill_s` lasts until the first token is out, and `decode_s` from
    there to the last one. `num_tokens` are the tokens that came out *during* `decode_s`: all but the first in plain
    decoding, and all but the first batch where a system already speculates in its first pass, so that
    `num_tokens / decode_s` is decode tokens a second whatever the system. An end token counts where the peer emits it.

    token_ids: of the whole answer, first token included; None where the peer gives only text.
    text: without special tokens.
    prefill_s, decode_s: seconds.
    num_passes: passes of the target during `decode_s`; None where the peer does not tell.
    """

    token_ids: list[int] | None
    num_tokens: int
    text: str
    prefill_s: float
    decode_s: float
    num_passes: int | None


@dataclass(frozen=True)
class PeerOptions:
    """What every peer is given.

    draft_model: folder of a draft model; None leaves the mode "draft" out.
    num_speculative_tokens: tokens drafted a round; None takes the peer's own default.
    threads: CPU threads of the peer.
    dtype: "bfloat16", "float16" or "float32", where the peer lets it be chosen.
    cache_dtype: likewise; None: its default.
    peer_model, peer_draft_model: the same weights in the peer's own format (a GGUF file, an OpenVINO folder), for peers
        that do not read the Hugging Face folder.
    """

    draft_model: str | None = None
    num_speculative_tokens: int | None = None
    threads: int = 2
    dtype: str = "bfloat16"
    cache_dtype: str | None = None
    peer_model: str | None = None
    peer_draft_model: str | None = None


class Peer(ABC):
    """Another system, started once and asked prompt by prompt at batch 1. Also a context manager."""

    name: str
    modes: tuple[str, ...]
    """What `run` takes, "plain" first where the peer has it; known after `start`."""

    @abstractmethod
    def start(self) -> None:
        """Load the models. Raises `ConfigError` that says what is missing and how to get it."""

    @abstractmethod
    def run(self, mode: str, token_ids: Sequence[int], max_tokens: int, temperature: float) -> PeerAnswer:
        """Answer one prompt. Raises `PeerFailed`.

        token_ids: the prompt encoded, chat template included.
        temperature: 0 is greedy; above it, sampling without top-k and top-p.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop the peer and free what it holds; safe at any time, and twice."""

    @abstractmethod
    def describe(self) -> dict[str, str]:
        """Versions, files and settings for the result's provenance; complete after `start`."""

    def __enter__(self) -> "Peer":
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
