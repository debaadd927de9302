"""How well a document answers a query, by the probabilities of a causal model. A request ends when its text is read.

likelihood   the query's probability as the question that the document gives rise to, by tokens (their geometric mean)
yes_no       the probability of "yes", and not "no", to the question of Qwen3-Reranker's template

Query likelihood: Ponte and Croft 1998; with language models and this prompt, UPR (Sachan et al., arXiv 2204.07496).
Qwen3-Reranker: arXiv 2506.05176; the template is that of its model card.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

from transformers import PreTrainedTokenizerBase

from ..errors import ConfigError
from ..hf.image_prompts import encode, writable
from ..schema import brief, validate
from ..target import LoadedModel
from ..target.prompts import tokenizer_of
from ..target.readings import Continuation, NextLogits
from .embeddings import numerics_of, reading_params
from .request import Request

Method: TypeAlias = Literal["likelihood", "yes_no"]
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_PASSAGE = "Passage: {document}\nPlease write a question based on this passage.\nQuestion:"
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_PAIR = "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
_BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@dataclass(frozen=True)
class Score:
    """A probability, 0 to 1."""

    score: float


@dataclass(frozen=True, kw_only=True)
class ScoringOutput:
    """The score of a query and a document: `outputs.score`, as in vLLM. Scores of different queries do not compare.

    method, numerics: how it was made; numerics as in `EmbeddingOutput`.
    num_cached_tokens: tokens of the text that the prefix cache had.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: Score
    method: Method
    numerics: str
    num_cached_tokens: int = 0
    finished: bool = True


class Pair:
    """A query and a document as the text that is read for their score. Raises `ConfigError`, see `method_of`.

    method: how it is scored. token_ids: of the text. reading: what the score is made of.
    """

    def __init__(self, loaded: LoadedModel, query: str, document: str, method: str | None, instruction: str | None):
        if bad := [text for text in (query, document) if not isinstance(text, str)]:
            raise ConfigError("scores are of texts", got=brief(bad[0]), expected="a text")
        query, document = writable(query), writable(document)
        self.method: Method = method_of(loaded, method)
        tokenizer = tokenizer_of(loaded)
        if self.method == "yes_no":
            pair = _PAIR.format(instruction=instruction or INSTRUCTION, query=query, document=document)
            parts = [tokenizer.encode(part, add_special_tokens=False) for part in (_BEFORE, pair, _BEHIND)]
            self.token_ids = [token for part in parts for token in part]
            self.reading = NextLogits(len(self.token_ids), [_token(tokenizer, word) for word in ("yes", "no")])
        else:
            if instruction is not None:
                fix = 'leave it out; it is for method="yes_no"'
                raise ConfigError("query likelihood takes no instruction", got=brief(instruction), fix=fix)
            before, asked = _begun(tokenizer, _PASSAGE.format(document=document)), f" {query.strip()}"
            self.token_ids = before + tokenizer.encode(asked, add_special_tokens=False)
            self.reading = Continuation(self.token_ids, len(before) - 1)
            if not query.strip() or len(before) == len(self.token_ids):
                raise ConfigError("the query is empty", expected="at least one token")

    @property
    def number(self) -> float:
        """The score, once the text is read."""
        if isinstance(self.reading, NextLogits):
            yes, no = self.reading.logits.tolist()
            return 1 / (1 + math.exp(min(no - yes, 700.0)))
        return math.exp(sum(self.reading.logprobs) / len(self.reading.logprobs))


def open_score(
    llm: Any, query: str, document: str, method: Method | None = None, instruction: str | None = None,
    request_id: str | None = None, extra_args: dict[str, Any] | None = None, **options: Any,
) -> Request:  # fmt: skip
    """As `LLM.open_request`, for a request that ends with a `ScoringOutput`."""
    with llm.tokenizing:
        pair = Pair(llm.loaded, query, document, method, instruction)
    return as_score(llm.open_request(pair.token_ids, reading_params(extra_args), request_id, **options), pair)


def as_score(request: Request, pair: Pair) -> Request:
    """Let a new request for the tokens of a pair end with its score."""
    (seq,) = request.seqs
    seq.reading = pair.reading

    def output() -> ScoringOutput:
        return ScoringOutput(
            request_id=request.request_id,
            prompt_token_ids=list(seq.prompt_ids),
            outputs=Score(pair.number),
            method=pair.method,
            numerics=numerics_of(request.decoder.runner.loaded),
            num_cached_tokens=seq.num_cached_tokens,
        )

    request.read_output = output
    return request


def pairs_of(text_1: str | Sequence[str], text_2: str | Sequence[str]) -> list[tuple[str, str]]:
    """One query with each document, or as many queries as documents. Raises `ConfigError` for other numbers."""
    one, two = ([text] if isinstance(text, str) else list(text) for text in (text_1, text_2))
    one = one * len(two) if len(one) == 1 else one
    if len(one) != len(two):
        raise ConfigError("text_1 and text_2 differ in number", got=f"{len(one)} and {len(two)}", fix="give one text_1")
    return list(zip(one, two, strict=True))


def method_of(loaded: LoadedModel, method: str | None) -> Method:
    """The given method, or the one that a model was trained for.

    Raises `ConfigError` for the name of a reranker whose template is not known here.
    """
    if method is not None:
        return validate(cast("Any", Method), method, "method")
    if "rerank" not in loaded.name.lower():
        return "likelihood"
    if "qwen3-reranker" in loaded.name.lower():
        return "yes_no"
    fix = 'choose: method="likelihood" or "yes_no"'
    raise ConfigError("the template of this reranker is not known", got=loaded.name, expected="Qwen3-Reranker", fix=fix)


def _token(tokenizer: PreTrainedTokenizerBase, word: str) -> int:
    ids = tokenizer.encode(word, add_special_tokens=False)
    if len(ids) != 1:
        raise ConfigError(f"{word!r} is no token of this model", got=brief(ids), fix='give method="likelihood"')
    return ids[0]


def _begun(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens of a text that goes on: with what the tokenizer puts before it, and not with what it puts behind."""
    whole, bare = encode(tokenizer, text), tokenizer.encode(text, add_special_tokens=False)
    begins = (begin for begin in range(len(whole)) if whole[begin : begin + len(bare)] == bare)
    return whole[: next(begins, 0) + len(bare)]
