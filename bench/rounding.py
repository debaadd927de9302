"""How far rounding moves a model's distribution: several engines, each against transformers in float32.

    python -m bench.rounding smollm2-135m
    python -m bench.rounding FILE.gguf --peer llama.cpp=PYTHON --peer-cache float16 bfloat16

All read the same texts, the built-in prompts with the answers of plain decoding. Paceline computes as it loads the
model, transformers in the same dtype, float32 over the same weights: those of a GGUF file as its blocks say. For a file
in blocks there is also Paceline with inputs of 16 bits, and with a cache in float32, where only the inputs of matrices
are rounded. llama.cpp reads the file too, once for each dtype of its cache. Printed is the mean over the answers'
tokens of KL(float32 || other), in nats, with its standard error, and how often the most likely token is the same. The
last line is JSON.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from bench.peers import PeerOptions, open_peer
from bench.peers.isolated import LLAMA_CPP, IsolatedPeer
from paceline import LLM, SamplingParams
from paceline.hf.load import open_checkpoint
from paceline.hf.twin import in_float32
from paceline.measure.prompts import EXAMPLES, user_prompt
from paceline.measure.record import measured_on
from paceline.quant.blocks import BlockLinear
from paceline.target import with_activations
from paceline.target.loaded import LoadedModel
from paceline.target.prefill import reference_logits
from paceline.zoo import resolve

_LEAST = -100.0  # llama.cpp gives probabilities in float32, where smaller ones are zero
_Job: TypeAlias = tuple[list[int], range]
"""A text, and places in it."""
_Side: TypeAlias = Callable[[list[int], range], Tensor]
"""The logits, or log-probabilities, after these places of a text [places, V]."""


def divergence(exact: Tensor, other: Tensor) -> Tensor:
    """KL(exact || other) in nats of each row of logits [T, V]."""
    p, q = (torch.log_softmax(one.double(), -1) for one in (exact, other))
    return (p.exp() * (p - q)).sum(-1)


def compare(
    name: str,
    num_prompts: int,
    max_tokens: int,
    every: int = 1,
    peer: str | None = None,
    peer_caches: Sequence[str] = ("float16",),
) -> dict[str, Any]:
    """Mean divergence and agreement of all sides, over every so many tokens of all answers.

    peer: llama.cpp, as `bench.peers` takes it, for a GGUF file. peer_caches: dtypes of its cache.
    """
    path = str(resolve(name))
    loaded, jobs = _texts(path, num_prompts, max_tokens, every)
    dtype = str(loaded.dtype).removeprefix("torch.")
    sides: dict[str, AbstractContextManager[_Side]] = {
        "paceline": nullcontext(_ours(loaded)),
        "transformers": _transformers(path, dtype),
    }
    if any(isinstance(one, BlockLinear) for one in loaded.model.modules()):
        sides["paceline, int16"] = nullcontext(_ours(with_activations(loaded, "int16")))
        sides["paceline, float32 cache"] = nullcontext(_ours(_rounds_inputs_only(loaded)))
    for cache in peer_caches if peer else ():
        sides[f"llama.cpp, {cache} cache"] = _llama_cpp(str(peer), path, cache)
    with _transformers(path, "float32") as exact:
        right = [exact(*job) for job in jobs]
    found = dict[str, Any]()
    for title, opened in sides.items():
        with opened as side:
            rows = [side(*job) for job in jobs]
        kl = torch.cat([divergence(a, b) for a, b in zip(right, rows, strict=True)])
        same = torch.cat([a.argmax(-1) == b.argmax(-1) for a, b in zip(right, rows, strict=True)])
        found[title] = {
            "mean_kl": float(kl.mean()),
            "standard_error": float(kl.std() / len(kl) ** 0.5),
            "same_top": float(same.double().mean()),
        }
    tokens = sum(len(places) for _, places in jobs)
    return {"model": Path(name).name, "dtype": f"torch.{dtype}", "prompts": len(jobs), "tokens": tokens, **found}


def _texts(path: str, num_prompts: int, max_tokens: int, every: int) -> tuple[LoadedModel, list[_Job]]:
    """The model, and texts with the places before the tokens that are compared."""
    llm = LLM(path, max_num_seqs=1)
    prompts = [user_prompt(llm.loaded, one.prompt) for one in EXAMPLES[:num_prompts]]
    results = llm.generate(prompts, SamplingParams(max_tokens=max_tokens))
    texts = [([*one.prompt_token_ids, *one.token_ids][:-1], len(one.token_ids)) for one in results]
    return llm.loaded, [(text, range(len(text) - count, len(text), every)) for text, count in texts]


def _ours(loaded: LoadedModel) -> _Side:
    return lambda text, places: reference_logits(loaded, text, len(text) - places[0])[:: places.step].float()


def _rounds_inputs_only(loaded: LoadedModel) -> LoadedModel:
    """The same blocks, with everything else in float32, and the inputs of matrices rounded as ever."""
    model = in_float32(loaded.model)
    for one in model.modules():
        if isinstance(one, BlockLinear):
            one.input_bits = 8
    return loaded.with_model(model)


@contextmanager
def _transformers(path: str, dtype: str) -> Iterator[_Side]:
    model: Any = open_checkpoint(path, dtype, "cpu", False)[0].eval()

    @torch.inference_mode()
    def logits(text: list[int], places: range) -> Tensor:
        return model(torch.tensor([text])).logits[0, places[0] :: places.step].float()

    yield logits


@contextmanager
def _llama_cpp(spec: str, path: str, cache: str) -> Iterator[_Side]:
    with open_peer(spec, path, PeerOptions(threads=torch.get_num_threads(), cache_dtype=cache)) as peer:
        assert isinstance(peer, IsolatedPeer)

        def logits(text: list[int], places: range) -> Tensor:
            rows = [torch.from_numpy(peer.logprobs(text[: place + 1]).copy()) for place in places]
            return torch.stack(rows).clamp_min(_LEAST)

        yield logits


def main() -> None:
    """Print a line for each, and the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--num-prompts", type=int, default=len(EXAMPLES))
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="compare every Nth token of the answers")
    parser.add_argument("--peer", metavar="llama.cpp=PYTHON", help="also measure llama.cpp on a GGUF file")
    parser.add_argument("--peer-cache", nargs="+", default=["float16"], choices=("bfloat16", "float16", "float32"))
    options = parser.parse_args()
    if options.peer and options.peer.partition("=")[0] != LLAMA_CPP.name:
        parser.error(f"--peer is llama.cpp=PYTHON, not {options.peer!r}")
    found = compare(
        options.model, options.num_prompts, options.max_tokens, options.every, options.peer, options.peer_cache
    )
    for side, one in found.items():
        if isinstance(one, dict):
            print(
                f"{side:<26} mean KL {one['mean_kl']:.2e} ± {one['standard_error']:.1e} nats, "
                f"same most likely token {one['same_top']:.2%}"
            )
    print(json.dumps({**found, "provenance": measured_on()}))


if __name__ == "__main__":
    main()
