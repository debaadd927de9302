"""The options of a request (`SamplingParams`) and the state of one unfinished answer (`TokenSequence`)."""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Annotated, Any, NamedTuple, cast

from pydantic import AfterValidator, BeforeValidator, Field
from torch import Tensor

from ..errors import ConfigError
from ..schema import Integer, Number, brief, check_text, checked, scalar
from .reading import Reading
from .round import Origin, Round
from .structured import Listed, StructuredOutputs
from .vision import VisionPrompt

MAX_ANSWERS = 4096
"""The most answers to one prompt. Each has its own state and copy of the prompt's tokens from the start."""

SEED_BITS = 32
"""Of a seed that is drawn at random: short enough to be typed again."""

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]
"""(token ids so far [1, length], scores [1, V]) -> scores [1, V]: the convention of transformers.

It is called once for every token of an answer, in order, as in plain decoding; never for a rejected draft. What it
raises ends the answer. One that keeps a state needs an object for each request.
"""


Bias = Annotated[float, Field(allow_inf_nan=True, lt=math.inf), BeforeValidator(scalar)]
"""Added to a token's logit; -inf for a token that must never come."""
_NotEmpty = Annotated[str, Field(min_length=1), AfterValidator(check_text)]
_Texts = _NotEmpty | Listed[_NotEmpty] | None
_Count = Annotated[Integer, Field(ge=0)]
_CountOrAll = Annotated[Integer, Field(ge=-1)]


def _is_prediction(value: Any) -> bool:
    if isinstance(value, str):
        return value == value.encode(errors="ignore").decode()  # no lone surrogates
    return isinstance(value, list | tuple) and all(type(token) is int for token in cast("Sequence[object]", value))


_DRAFTING: dict[str, tuple[Callable[[Any], bool], str]] = {
    "num_speculative_tokens": (lambda value: type(value) is int and value >= 0, "an integer of at least 0"),
    "method": (lambda value: isinstance(value, str), "the name of a drafter, or none"),
    "prediction": (_is_prediction, "a text or a list of token ids"),
    "cache_salt": (lambda value: isinstance(value, str) and value != "", "a text that is not empty"),
    "store": (lambda value: isinstance(value, bool), "true or false"),
    "adapter": (
        lambda value: value != "" if isinstance(value, str) else hasattr(value, "low_rank"),
        "the name of an adapter",
    ),
    "account": (lambda value: isinstance(value, str), "a text"),
    "priority": (lambda value: type(value) is int, "an integer; lower ones are answered first"),
}
"""The keys of `SamplingParams.extra_args` that have a meaning here: a check of the value, and what is expected."""


class RequestOutputKind(Enum):
    """The content of a chunk of `LLM.stream`."""

    CUMULATIVE = 0  # the answer so far
    DELTA = 1  # what came since the last chunk
    FINAL_ONLY = 2  # the whole answer, in a single chunk


@checked
class SamplingParams:
    """How to choose tokens and when to stop; the names are vLLM's. Raises `ConfigError` for what is out of range.

    The order of application is: structured_outputs, allowed_token_ids, logit_bias, bad_words, min_tokens, repetition,
    presence and frequency penalties, no_repeat_ngram_size, logits_processors, temperature, top_k, top_p, min_p.
    """

    temperature: Annotated[Number, Field(ge=0)] = 0.0  # 0: greedy
    top_k: _CountOrAll = 0  # 0 or -1: off
    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[Number, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[Number, Field(gt=0)] = 1.0  # 1: off; over prompt and answer, as in transformers
    presence_penalty: Number = 0.0  # over the answer, as in the OpenAI API
    frequency_penalty: Number = 0.0
    no_repeat_ngram_size: _Count = 0
    logit_bias: dict[int | Integer, Bias] | None = None  # int reads the keys of JSON, which are texts
    allowed_token_ids: Annotated[Listed[Integer], Field(min_length=1)] | None = None  # no other token is ever chosen
    bad_words: _Texts = ()
    min_tokens: _Count = 0
    max_tokens: _Count | None = 256  # None: as many as fit; the context has the last word; 0: prompt_logprobs alone
    stop: _Texts = ()
    stop_token_ids: Listed[Integer] | None = ()
    include_stop_str_in_output: bool = False  # also the text of a stop token
    ignore_eos: bool = False
    seed: Integer | None = None  # None: drawn at random; the result says which
    n: Annotated[Integer, Field(ge=1, le=MAX_ANSWERS)] = 1
    logprobs: _CountOrAll | None = None  # of each emitted token and of the k most likely (-1: all), before processors
    prompt_logprobs: _CountOrAll | None = None  # the same of each prompt token, without the prefix cache
    logits_processors: Listed[LogitsProcessor] = ()
    structured_outputs: StructuredOutputs | None = None  # the form of the answer, see `StructuredOutputsParams`
    detokenize: bool = True  # False: the text is empty
    skip_special_tokens: bool = True  # in the text
    spaces_between_special_tokens: bool = True  # those that the tokenizer puts; few put any
    output_kind: RequestOutputKind = RequestOutputKind.DELTA  # of a stream
    extra_args: dict[str, Any] | None = None  # "num_speculative_tokens": drafts of at most so many tokens, 0: none;
    # "method": one of `LLM.drafters` alone, or "none"; "prediction": a text or token ids that the answer is likely to
    # repeat, for `PredictedOutput`; "cache_salt": see `tenant`; "store": False: see `is_private`; "adapter": the name
    # of one of `LLM.adapters`, or itself; "priority" and "account": see there; "shown_special_tokens": ids that
    # `skip_special_tokens` keeps; and what drafters and processors of your own read in `Sequence.params.extra_args`

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words", "stop_token_ids"):
            value = getattr(self, name) or ()
            object.__setattr__(self, name, (value,) if isinstance(value, str) else value)
        object.__setattr__(self, "top_k", max(self.top_k, 0))
        if self.min_tokens > self.most_tokens:
            got = f"{brief(self.min_tokens)} and {brief(self.max_tokens)}"
            raise ConfigError("SamplingParams.min_tokens is above max_tokens", got=got, expected="min <= max")
        if self.max_tokens == 0 and (self.prompt_logprobs is None or self.n > 1):
            fix = "0 reads a prompt for its prompt_logprobs, with n=1"
            raise ConfigError("SamplingParams.max_tokens has a wrong value", got=0, expected="at least 1", fix=fix)
        if self.n > 1 and self.temperature == 0:
            fix = "sample with a temperature above 0, or leave n at 1"
            raise ConfigError("SamplingParams.n asks for several greedy answers, which are all the same", fix=fix)
        for name, (fits, expected) in _DRAFTING.items():
            if name in (self.extra_args or {}) and not fits(value := (self.extra_args or {})[name]):
                message = f'SamplingParams.extra_args["{name}"] has a wrong value'
                raise ConfigError(message, got=brief(value), expected=expected)
        if self.stop and not self.detokenize:
            fix = "use stop_token_ids, or leave detokenize=True"
            raise ConfigError("SamplingParams.stop needs the text, and detokenize=False leaves it out", fix=fix)

    @property
    def most_tokens(self) -> int:
        """`max_tokens` as a number; very large where it is None."""
        return sys.maxsize if self.max_tokens is None else self.max_tokens

    @property
    def most_drafted(self) -> int:
        """The most tokens in a row that may be drafted for this request, see `extra_args`."""
        return 0 if self.method == "none" else (self.extra_args or {}).get("num_speculative_tokens", sys.maxsize)

    @property
    def method(self) -> str | None:
        """The drafter of this request, see `extra_args`; None: whichever the policy takes."""
        return (self.extra_args or {}).get("method")

    @property
    def prediction(self) -> str | Sequence[int]:
        """The likely answer, see `extra_args`; empty where none is given."""
        return (self.extra_args or {}).get("prediction", "")

    @property
    def tenant(self) -> str:
        """Whose request this is ("cache_salt" in `extra_args`, vLLM's name): one tenant's text never serves another.

        That holds for the prefix cache and for all that drafters keep from one request to the next.
        """
        return (self.extra_args or {}).get("cache_salt", "")

    @property
    def adapter(self) -> Any:
        """The LoRA adapter that answers, or its name, see `extra_args`; "" for the model itself."""
        return (self.extra_args or {}).get("adapter", "")

    @property
    def shown_special_tokens(self) -> Sequence[int]:
        """The special tokens that the text has in spite of `skip_special_tokens`, see `extra_args`."""
        return (self.extra_args or {}).get("shown_special_tokens", ())

    @property
    def priority(self) -> int:
        """Requests of a lower priority are answered first ("priority" in `extra_args`, as in vLLM)."""
        return (self.extra_args or {}).get("priority", 0)

    @property
    def account(self) -> str:
        """Who shares slots fairly with others ("account" in `extra_args`): a server's API keys."""
        return (self.extra_args or {}).get("account", "")

    @property
    def is_private(self) -> bool:
        """Whether drafters keep nothing of this request once it has ended ("store" is False in `extra_args`)."""
        return not (self.extra_args or {}).get("store", True)

    @property
    def owner(self) -> dict[str, Any]:
        """The `extra_args` of another request of the same tenant, as private as this one."""
        return {"store": not self.is_private} | ({"cache_salt": self.tenant} if self.tenant else {})

    @cached_property
    def needs_history(self) -> bool:
        """True iff the distribution of a token depends on which tokens came before it, beyond the model itself."""
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1
        return any((*penalties, self.no_repeat_ngram_size, self.bad_words, self.logits_processors))


def params_of(options: object, count: int, default: SamplingParams | None = None) -> list[SamplingParams]:
    """The sampling options of each of `count` prompts. Raises `ConfigError` for anything else or another number.

    options: options for all of them, a list with one for each, or None, which takes the default.
    """
    each = cast("Sequence[object]", options) if isinstance(options, list | tuple) else [options] * count
    if len(each) != count:
        raise ConfigError("params and prompts differ in number", got=len(each), expected=count)
    each_params, default = list[SamplingParams](), default or SamplingParams()
    for params in each:
        if not isinstance(params, SamplingParams | None):
            fix = "SamplingParams(**options) makes them of a dict" if isinstance(params, dict) else None
            got = brief(cast("object", params))
            raise ConfigError("params are no SamplingParams", got=got, expected="SamplingParams(...)", fix=fix)
        each_params.append(params or default)
    return each_params


def either(sampling_params: object, params: object) -> object:
    """One of two names of the same argument. Raises `ConfigError` where both are given."""
    if sampling_params is not None and params is not None:
        raise ConfigError("sampling_params and params are the same", fix="give one of them")
    return sampling_params if params is None else params


def prioritized(params: list[SamplingParams], priority: Sequence[int] | None) -> list[SamplingParams]:
    """The options with these priorities in `extra_args`. Raises `ConfigError` for another number of them."""
    if priority is None:
        return params
    if len(priority) != len(params):
        raise ConfigError("priority and prompts differ in number", got=len(priority), expected=len(params))
    extras = [{**(one.extra_args or {}), "priority": own} for one, own in zip(params, priority, strict=True)]
    return [replace(one, extra_args=extra) for one, extra in zip(params, extras, strict=True)]


class Logprob(NamedTuple):
    """The natural-log probability of one token, its rank (1 is the most probable) and its text, as in vLLM.

    The text of bytes that are no UTF-8, such as half a character, is written `bytes:\\xf0\\x9f`, as in the OpenAI API.
    """

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass(frozen=True)
class TokenLogprob(Mapping[int, Logprob]):
    """Natural-log probabilities of the target at one position, before processors: of its token and of the top tokens.

    As a mapping it is vLLM's: `Logprob` by token id, the position's own token first.

    rank: the rank of the position's own token; 1 is the most probable.
    texts: the texts of these tokens by id; empty without a tokenizer.
    """

    token_id: int
    logprob: float
    top: dict[int, float]
    rank: int = 1
    texts: dict[int, str] = field(default_factory=dict[int, str], repr=False)

    def __getitem__(self, token: int) -> Logprob:
        if token == self.token_id:
            return Logprob(self.logprob, self.rank, self.texts.get(token))
        return Logprob(self.top[token], list(self.top).index(token) + 1, self.texts.get(token))

    def __iter__(self) -> Iterator[int]:
        return iter(dict.fromkeys([self.token_id, *self.top]))

    def __len__(self) -> int:
        return len(self.top) + (self.token_id not in self.top)


@dataclass
class TokenSequence:
    """One unfinished answer. Between rounds the cache holds `token_ids[:-1]`; the last token is the next input."""

    # set when admitted
    prompt_ids: list[int]
    params: SamplingParams
    seed: int  # 64-bit, signed
    eos_ids: frozenset[int]
    max_length: int  # prompt and answer together: the context
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    stops: Any = None  # a `sampling.Detokenizer`, which looks for stop strings
    vision: VisionPrompt | None = None  # the images of the prompt
    grammar: Any = None  # a `sampling.Grammar`, which decides what tokens are allowed
    prediction: tuple[int, ...] = ()  # the predicted output
    adapter: Any = None  # a `target.lora.Adapter` that acts on its rows
    reading: Reading | None = None  # what the request wants of the passes that read its prompt
    slot: int = -1  # set by the runner
    has_deferred_tokens: bool = (
        False  # whether the last chunk of the prompt is left to the first pass, see `engine.first_pass`
    )
    num_cached_tokens: int = 0  # how many tokens the prefix cache had when the sequence was admitted
    queue_s: float = 0.0  # the seconds before its first round, which that round's record has
    vision_s: float = 0.0
    prefill_s: float = 0.0
    # grows with every round
    token_ids: list[int] = field(default_factory=list[int])
    origins: list[Origin] = field(default_factory=list[Origin])
    sources: list[str] = field(default_factory=list[str])  # the drafter of each token, "" for the target's own
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    rounds: list[Round] = field(default_factory=list[Round])
    finish_reason: str | None = None  # "stop" or "length"; "abort" where its request was aborted
    stop_reason: str | int | None = None  # the stop string or token id that ended it; None for end of text
    had_budget: bool = False  # whether a drafter was asked to draft for it
    no_draft_reason: str | None = None  # once it has ended without a single draft, if the reason is known
    error: Exception | None = None  # why this sequence cannot continue

    def __post_init__(self) -> None:
        if not self.token_ids:
            self.token_ids = list(self.prompt_ids)

    @property
    def output_ids(self) -> list[int]:
        """Tokens emitted so far."""
        return self.token_ids[len(self.prompt_ids) :]

    @property
    def num_output(self) -> int:
        """How many tokens were emitted so far."""
        return len(self.token_ids) - len(self.prompt_ids)

    @property
    def num_cached(self) -> int:
        """How many tokens the target's cache holds between rounds."""
        return len(self.token_ids) - 1

    @property
    def ends_when_read(self) -> bool:
        """Whether nothing is decoded."""
        return self.reading is not None and self.reading.ends

    @property
    def is_finished(self) -> bool:
        """True once nothing more will be emitted."""
        return self.finish_reason is not None

    @property
    def remaining(self) -> int:
        """How many tokens may still be emitted."""
        return min(self.params.most_tokens - self.num_output, self.max_length - len(self.token_ids))

    @property
    def most_drafted(self) -> int:
        """How many tokens in a row may be drafted: the target adds one to them, and the request may want fewer."""
        return min(self.remaining - 1, self.params.most_drafted)

    def would_end(self, token: int, ahead: int) -> bool:
        """Whether `token` would end the answer as its `ahead`-th next token, counted from 1."""
        if self.num_output + ahead < self.params.min_tokens:
            return False
        return (token in self.eos_ids and not self.params.ignore_eos) or token in (self.params.stop_token_ids or ())

    def ends_with(self, path: list[int]) -> bool:
        """Whether the last token of a drafted path ends the answer, given that none before it does."""
        if self.would_end(path[-1], len(path)):
            return True
        if self.grammar is not None and self.grammar.is_complete([*self.output_ids, *path]):
            return True
        enough = self.num_output + len(path) >= self.params.min_tokens
        return enough and self.stops is not None and self.stops.would_stop(path)

    @property
    def is_ended_by_token(self) -> bool:
        """Whether the last token ended the answer and is not part of its text."""
        return self.finish_reason == "stop" and self.would_end(self.token_ids[-1], 0)

    def append(self, token: int, origin: Origin, source: str, logprob: TokenLogprob | None = None) -> bool:
        """Append one token and test every reason to stop: a token, a text, a complete form, the length.

        Returns whether the answer is finished.
        """
        self.token_ids.append(token)
        self.origins.append(origin)
        self.sources.append(source)
        if logprob is not None:
            self.logprobs.append(logprob)
        if self.would_end(token, 0):
            self.finish_reason = "stop"
            self.stop_reason = None if token in self.eos_ids and not self.params.ignore_eos else token
        elif self.stops is not None and self.stops.feed(token) and self.num_output >= self.params.min_tokens:
            self.finish_reason, self.stop_reason = "stop", self.stops.stop_hit
        elif self.grammar is not None and self.grammar.is_complete(self.output_ids):
            self.finish_reason = "stop"
        if self.finish_reason is None and self.remaining <= 0:
            self.finish_reason = "length"
        return self.is_finished
