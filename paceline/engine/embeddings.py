"""Embeddings of texts: their last hidden states, pooled. A request ends when its text is read."""

from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field
from torch import Tensor
from torch.nn.functional import normalize

from ..core.request import RequestOutputKind, SamplingParams
from ..errors import ConfigError
from ..hf.pooling import Pooling, declared
from ..schema import Integer, checked
from ..target import LoadedModel
from ..target.prompts import Prompt
from ..target.readings import LastState, MeanState
from .request import Request


@checked
class PoolingParams:
    """How an embedding is made of a text's last hidden states. Raises `ConfigError` for what is out of range.

    None: as the model's files say (see `hf.pooling`); where they say nothing, the last token's state, of length 1.
    """

    pooling: Pooling | None = None  # "last": the state of the last token; "mean": the mean of those of all tokens
    normalize: bool | None = None  # to length 1
    dimensions: Annotated[Integer, Field(ge=1)] | None = None  # the first so many numbers, for models trained for that
    extra_args: dict[str, Any] | None = None  # "cache_salt" and "adapter", as in `SamplingParams`

    @classmethod
    def given(cls, params: "PoolingParams | None", **fields: Any) -> "PoolingParams":
        """Parameters, or those of these fields. Raises `ConfigError` for both."""
        if params is not None and any(value is not None for value in fields.values()):
            raise ConfigError("pooling_params and its fields are both given", fix="give one of them")
        return cls(**fields) if params is None else params


@dataclass(frozen=True)
class Embedding:
    """An embedding, float32."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """How many numbers it has."""
        return len(self.embedding)

    def __repr__(self) -> str:
        return f"Embedding(hidden_size={self.hidden_size})"


@dataclass(frozen=True, kw_only=True)
class EmbeddingOutput:
    """The embedding of one text: `outputs.embedding`, as in vLLM.

    pooling, normalize: how it was made. numerics: "invariant", its bits depend on the text alone, or "fast", roundings
        depend on how the text was read, too.
    num_cached_tokens: tokens of the text that the prefix cache had.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: Embedding
    pooling: str
    normalize: bool
    numerics: str
    num_cached_tokens: int = 0
    finished: bool = True


def reading_params(extra_args: dict[str, Any] | None) -> SamplingParams:
    """The parameters of a request that ends when its text is read."""
    kind = RequestOutputKind.FINAL_ONLY
    return SamplingParams(max_tokens=1, detokenize=False, extra_args=extra_args, output_kind=kind)


def open_embedding(
    llm: Any, prompt: Prompt, params: PoolingParams, request_id: str | None = None, **options: Any
) -> Request:
    """As `LLM.open_request`, for a request that ends with an `EmbeddingOutput`."""
    return as_embedding(llm.open_request(prompt, reading_params(params.extra_args), request_id, **options), params)


def as_embedding(request: Request, params: PoolingParams) -> Request:
    """Let a new request end with the embedding of its prompt. Raises `ConfigError`, see `resolved`."""
    (seq,), runner = request.seqs, request.decoder.runner
    how = resolved(params, runner.loaded)
    count = len(seq.prompt_ids)
    reading = seq.reading = LastState(count) if how.pooling == "last" else MeanState(count)

    def output() -> EmbeddingOutput:
        return EmbeddingOutput(
            request_id=request.request_id,
            prompt_token_ids=list(seq.prompt_ids),
            outputs=Embedding(shaped(reading.pooled(), how).tolist()),
            pooling=str(how.pooling),
            normalize=bool(how.normalize),
            numerics=numerics_of(runner.loaded),
            num_cached_tokens=seq.num_cached_tokens,
        )

    request.read_output = output
    return request


def resolved(params: PoolingParams, loaded: LoadedModel) -> PoolingParams:
    """The parameters with what the model's files say. Raises `ConfigError` for a pooling that is not known here."""
    known = declared(loaded.files, loaded.model) if params.pooling is None or params.normalize is None else None
    if params.dimensions is not None and params.dimensions > loaded.hidden_size:
        expected = f"at most {loaded.hidden_size}, the width of the model"
        raise ConfigError("an embedding has fewer dimensions", got=params.dimensions, expected=expected)
    if known is None:
        return params
    is_normal = known.normalize if params.normalize is None else params.normalize
    return replace(params, pooling=params.pooling or known.pooling or "last", normalize=is_normal)


def numerics_of(loaded: LoadedModel) -> str:
    """How strictly what is read of a text depends on the text alone: in torch, roundings depend on its chunks."""
    return "invariant" if loaded.is_native else "fast"


def shaped(state: Tensor, how: PoolingParams) -> Tensor:
    """The first `dimensions` numbers of a pooled state, of length 1 where `normalize` says so."""
    cut = state[: how.dimensions]
    return normalize(cut, dim=0) if how.normalize else cut
