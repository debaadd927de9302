"""The adapters and the second model of a soak, and what they answer without a server."""

import argparse
import json
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from paceline import LLM, SamplingParams
from paceline.zoo import resolve
from tests import lora
from tests.live.nonsense import COMPLETION


def plain_answers(options: argparse.Namespace, folder: Path) -> None:
    """Print what `LLM.plain()` says to the completions of `named`, without a server, as JSON."""
    answers = list[str]()
    for weights in (None, *([options.second] if options.second else [])):
        adapters = {} if weights else {name: str(folder / name) for name in adapter_names(options)}
        llm = LLM(options.model, weights=weights, adapters=adapters, max_num_seqs=1, max_model_len=2048).plain()
        for name in ["second"] if weights else ["first", *adapters]:
            extra = {"extra_args": {"adapter": name}} if name in adapters else {}
            for _, body in named(name):
                params = SamplingParams(**{key: body[key] for key in ("seed", "temperature", "max_tokens")}, **extra)
                answers.append(llm.generate(body["prompt"], params)[0].text)
    print(json.dumps(answers))


def named(model: str) -> list[tuple[str, dict[str, Any]]]:
    """Completions, greedy and sampled, of a model or an adapter."""
    texts = "The Danube is a river that", "One, two, three,", "def area(width, height):\n"
    return [
        (COMPLETION, {"model": model, "prompt": text, "seed": seed, "temperature": seed % 3 / 2, "max_tokens": 24})
        for seed, text in enumerate(texts * 2)
    ]


def adapter_names(options: argparse.Namespace) -> list[str]:
    """The names of the random adapters."""
    return [f"adapter{number}" for number in range(options.adapters)]


def write_adapters(options: argparse.Namespace, folder: Path) -> None:
    """Random adapters of several ranks for the model, each of which changes its answers."""
    model = AutoModelForCausalLM.from_pretrained(resolve(options.model), dtype="float32")
    for seed, name in enumerate(adapter_names(options)):
        lora.save(folder / name, model, rank=4 << seed % 3, seed=seed, strength=0.2)
