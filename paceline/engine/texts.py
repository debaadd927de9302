"""What an `LLM` does with texts that it reads and does not continue: embeddings and scores."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from ..schema import checked_names
from ..target.prompts import Prompt, as_list
from .adapters import HoldsAdapters, LoRARequest
from .batch import answer_all
from .embeddings import EmbeddingOutput, PoolingParams, open_embedding, reading_params
from .loop import SpeculativeDecoder
from .scores import Method, ScoringOutput, open_score, pairs_of
from .stats import EngineStats


class ReadsTexts(HoldsAdapters):
    """The part of an `LLM` with `embed` and `score`."""

    decoder: SpeculativeDecoder
    _stats: EngineStats

    @checked_names
    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        pooling: Literal["last", "mean"] | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        use_tqdm: bool = False,
        return_exceptions: bool = False,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[EmbeddingOutput]:
        """The embedding of one text or many: the model's last hidden states, pooled. Nothing is decoded.

        prompts: as in `generate`. The texts that a model was trained for may need an instruction or an end token: what
            its tokenizer adds is added, and nothing else.
        pooling_params: or its fields, pooling, normalize and dimensions.
        return_exceptions, lora_request: see `generate`.
        In native passes the bits depend on the text alone. Raises what `generate` raises, and `ConfigError` for a
        model whose files name a pooling that is not known here.
        """
        params = PoolingParams.given(pooling_params, pooling=pooling, normalize=normalize, dimensions=dimensions)
        many = as_list(prompts)
        each = self.adapted([reading_params(params.extra_args)] * len(many), lora_request)
        openings = [
            partial(open_embedding, self, prompt, replace(params, extra_args=own.extra_args))
            for prompt, own in zip(many, each, strict=True)
        ]
        return answer_all(self.decoder, openings, self._stats, len(openings), use_tqdm, return_exceptions)

    @checked_names
    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        method: Method | None = None,
        instruction: str | None = None,
        use_tqdm: bool = False,
        return_exceptions: bool = False,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[ScoringOutput]:
        """How well documents answer a query, 0 to 1: one query and many documents, or as many of each.

        text_1: queries. text_2: documents. method: "yes_no" (default for Qwen3-Reranker) or "likelihood", see
        `engine.scores`. instruction: for "yes_no", what is looked for. return_exceptions, lora_request: see `generate`.
        """
        pairs = pairs_of(text_1, text_2)
        each = self.adapted([reading_params(None)] * len(pairs), lora_request)
        openings = [
            partial(open_score, self, *pair, method, instruction, extra_args=own.extra_args)
            for pair, own in zip(pairs, each, strict=True)
        ]
        return answer_all(self.decoder, openings, self._stats, len(openings), use_tqdm, return_exceptions)
