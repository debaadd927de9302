"""Self-drafts of few bits: how much of what they draft stands, by how their weights were made.

    python bench/draft_quant.py MODEL --prepared ANSWERS [--draft NAME=FOLDER ...] [--weights NAME=BITS:FILE ...]
                                [--layers N ...] [--model NAME=FOLDER ...]

Rounding: `nearest` (least and largest weight of a group), `fitted` (least squared error), `hqq` (torchao's HQQ).
--draft: trained weights (`paceline train qat`). --weights: a safetensors file of weights as another library left them,
dequantised, by transformers' names; they are put into our format through the grid that they lie on. --layers: draft
models of so many of the target's own layers, untrained; --model: trained ones (`paceline train distill`). Draft models
read the text themselves, all other rows the target's own keys and values. Of a target that sees, answers about pictures
are read as the engine reads them; its draft models are `vlm_drafters.py`'s.

Everything is measured on held-out answers of the target (`--held-out`, the share that `train.held_out` kept), in rounds
of four tokens, as the draft runs:

    1 - TV            share of sampled drafts that stand, mean over answer tokens
    greedy            share of places where both rank the same token first
    tokens a pass     expected of rounds of four: sampled from 1 - TV along the answer; greedy on the answers at T = 0
    own context       with --own: 1 - TV of the draft as a model by itself, over its own keys and values
    decoded           with --decode N: tokens a pass of real greedy decoding of N held-out prompts, 32 tokens each
"""

import argparse
import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline import LLM, Fixed, SamplingParams, SelfQuantized
from paceline.heads import load_head
from paceline.modules.int4_draft import Int4Draft, Int4DraftConfig
from paceline.quant import Int4Linear, dequantize_int4, dequantize_int8, quantize_int8
from paceline.quant.fake import torchao_modules
from paceline.quant.int4 import codes_on, fitted_grid, grid_of, params_of
from paceline.runner import load_model
from paceline.train.data import Answer, Answers
from paceline.train.losses import compared, kl
from paceline.train.recipes.distill import detached, fewer_layers
from paceline.train.recipes.rounds import Rounds, read_rounds, read_text, rounds_of
from paceline.train.recipes.sighted import Read, Reader, plain_halves
from paceline.train.recipes.space_model import layers_of_model, linears_of, plain_model, windows_of
from paceline.zoo import resolve

WINDOW = 4
Grid = Callable[[Tensor, int, int], tuple[Tensor, Tensor]]


def hqq_grid(weight: Tensor, group_size: int, bits: int) -> tuple[Tensor, Tensor]:
    """The grid that torchao's HQQ chooses, its zero point in our terms."""
    _, primitives = torchao_modules()
    _, scale, zero, _ = primitives._choose_qparams_and_quantize_affine_hqq(
        weight, nbits=bits, group_size=group_size, compute_dtype=torch.float32, device="cpu", raw_output=True
    )
    scale = scale.bfloat16().float()
    return scale, (((1 << bits - 1) - zero) * scale).bfloat16().float()


def grid_through(weight: Tensor, group_size: int, bits: int) -> tuple[Tensor, Tensor]:
    """The grid that dequantised weights lie on: of the steps that divide a group's range, the one that misses least."""
    groups = weight.float().view(len(weight), -1, group_size)
    low, high = groups.amin(-1), groups.amax(-1)
    least = torch.full_like(low, torch.inf)
    best = grid_of(weight, group_size, bits)
    for steps in range(1, 1 << bits):
        scale = ((high - low) / steps).clamp_min(1e-6).bfloat16().float()
        zero = (low + (1 << bits - 1) * scale).bfloat16().float()
        stands_for = (codes_on(weight, scale, zero, bits).view_as(groups) - 8) * scale[..., None] + zero[..., None]
        error = (stands_for - groups).square().sum(-1)
        better = error < 0.98 * least  # a coarser grid goes before a finer one that holds it
        best = torch.where(better, scale, best[0]), torch.where(better, zero, best[1])
        least = torch.where(better, error, least)
    return best


GRIDS: dict[str, Grid] = {"nearest": grid_of, "fitted": fitted_grid, "hqq": hqq_grid}


@dataclass
class Text:
    """A held-out answer with the target's logits [M, V] at its rows, and its keys and values. read: with pictures."""

    answer: Answer
    read: Read
    rounds: Rounds
    taught: Tensor
    cache: object


def read_answers(plain: PreTrainedModel, answers: Answers, most: int, reader: Reader | None) -> list[Text]:
    """One by one, cut to `most` tokens. reader: of a target that sees."""
    texts = list[Text]()
    for index, answer in enumerate(answers.all):
        batch = answers.batch([index], (), most)
        read = Read(batch.token_ids, batch.is_answer) if reader is None else reader.target(batch)
        logits, cache = read_text(plain, read.ids, 0, read.rows, windows_of(plain))
        rounds = rounds_of(batch.is_answer, WINDOW, torch.zeros(1, dtype=torch.long))
        texts.append(Text(answer, read, rounds, rounds.take(logits), cache))
    return texts


@torch.no_grad()
def measure(student: nn.Module, texts: list[Text], windows: dict[str, int | None], alone: bool) -> dict[str, float]:
    """The numbers of the table, but for the decoded ones. alone: the student reads the text by itself."""
    stands, same, apart, sampled, greedy = [], [], [], [], []
    for text in texts:
        if alone:
            said = text.rounds.take(read_text(student, text.read.ids, 0, text.read.rows, windows)[0])
        else:
            fed, cache = text.read.ids.gather(1, text.rounds.column.clamp_min(0)), detached(text.cache)
            said = read_rounds(student, fed, text.rounds, cache, windows, text.read.offsets)[text.rounds.counts]
        stood, agrees = compared(text.taught, said)
        stands.append(stood)
        same.append(agrees.float())
        apart.append(kl(text.taught, said)[None] * len(said))
        whole = len(said) // WINDOW * WINDOW
        sampled.append(stood[:whole].view(-1, WINDOW).cumprod(1).sum(1))
        if text.answer.temperature == 0:
            greedy.append(agrees[:whole].view(-1, WINDOW).long().cumprod(1).sum(1).float())
    tokens = sum(map(len, stands))
    return {
        "1 - TV": float(torch.cat(stands).mean()),
        "greedy": float(torch.cat(same).mean()),
        "KL": float(torch.cat(apart).sum()) / tokens,
        "tokens a pass, sampled": 1 + float(torch.cat(sampled).mean()),
        "tokens a pass, greedy": 1 + float(torch.cat(greedy).mean()) if greedy else float("nan"),
    }


def rounded(
    plain: nn.Module, bits: int, group_size: int, grid: Grid, found: dict[str, Tensor] | None = None
) -> Int4Draft:
    """The draft of these grids; found: weights of another library in the place of the model's own."""
    layers = layers_of_model(plain)
    known = zip(*linears_of(plain, ()), strict=True)
    fits = [(name, size) for name, size in known if Int4Linear.fits(layers[0].get_submodule(name), group_size)]
    names = tuple(name for name, _ in fits)
    draft = Int4Draft(Int4DraftConfig(bits, group_size, len(layers), names, tuple(size for _, size in fits)))
    for index, layer in enumerate(layers):
        for name in names:
            weight = layer.get_submodule(name).weight if found is None else found[f"model.layers.{index}.{name}.weight"]
            scale, zero = grid(weight.detach().float(), group_size, bits)
            draft.put(index, name, codes_on(weight.detach(), scale, zero, bits), params_of(scale, zero))
    return draft


def student_of(plain: nn.Module, draft: Int4Draft | None) -> nn.Module:
    """The model with the draft's weights, or (None) with those of INT8."""
    shared = {id(p): p for p in plain.parameters()}
    model = copy.deepcopy(plain, shared)
    for index, layer in enumerate(layers_of_model(model)):
        for name in linears_of(plain, ())[0] if draft is None else draft.config.linears:
            old = layer.get_submodule(name)
            made = nn.Linear(old.in_features, old.out_features, bias=False, device="meta")
            if draft is None:
                weight = dequantize_int8(*quantize_int8(old.weight.detach()))
            else:
                weight = dequantize_int4(*draft.packable(index, name), draft.config.group_size)
            made.weight, made.bias = nn.Parameter(weight, requires_grad=False), old.bias
            layer.set_submodule(name, made)
    return model


def decoded(llm: LLM, texts: list[Text], count: int) -> float:
    """Tokens a pass of real greedy decoding."""
    params = SamplingParams(max_tokens=32, ignore_eos=True)
    asked = [one.chat.messages if one.chat else list(one.prompt_ids) for one in (text.answer for text in texts[:count])]
    rounds = [r for prompt in asked for r in llm.generate([prompt], params)[0].rounds]
    return sum(r.num_emitted for r in rounds) / len(rounds)


def settings(args: argparse.Namespace, plain: nn.Module) -> Iterator[tuple[str, int, int, Int4Draft | None]]:
    """Name, bits, group size and draft of each row."""
    if "int8" in args.rows:
        yield "INT8, nearest", 8, 0, None
    for bits, group_size in ((4, 32), (4, 64), (3, 32), (2, 32)):
        for name, grid in GRIDS.items():
            if f"{name}-{bits}-{group_size}" in args.rows or name in args.rows:
                yield name, bits, group_size, rounded(plain, bits, group_size, grid)
    for given in args.weights:
        name, _, place = given.partition("=")
        bits, _, file = place.partition(":")
        with safe_open(file, "pt") as tensors:
            found = {key: tensors.get_tensor(key) for key in tensors.keys()}  # noqa: SIM118 - no dict
        yield name, int(bits), 32, rounded(plain, int(bits), 32, grid_through, found)
    for given in args.draft:
        name, _, folder = given.partition("=")
        draft = load_head(Path(folder))
        assert isinstance(draft, Int4Draft)
        yield name, draft.config.bits, draft.config.group_size, draft


def small_models(args: argparse.Namespace, plain: PreTrainedModel) -> Iterator[tuple[str, PreTrainedModel]]:
    """Draft models: name and model."""
    for count in args.layers:
        yield "untrained", fewer_layers(plain, count, "spaced")
    for given in args.model_folder:
        name, _, folder = given.partition("=")
        yield name, plain_model(folder, torch.device("cpu"))


def show(about: dict[str, object], told: dict[str, float]) -> None:
    """One row."""
    print(json.dumps({**about, **{key: round(value, 3) for key, value in told.items()}}), flush=True)


def main(given: list[str] | None = None) -> None:
    """Measure every row on the same answers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--prepared", nargs="+", required=True)
    parser.add_argument(
        "--rows", nargs="*", default=["int8", *GRIDS], help="int8, nearest, hqq, or nearest-2-32 and so on"
    )
    parser.add_argument("--draft", nargs="*", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--weights", nargs="*", default=[], metavar="NAME=BITS:FILE")
    parser.add_argument("--layers", nargs="*", type=int, default=[], metavar="N")
    parser.add_argument("--model", nargs="*", default=[], metavar="NAME=FOLDER", dest="model_folder")
    parser.add_argument("--held-out", type=float, default=0.03)
    parser.add_argument("--answers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=384, help="an answer and its prompt are cut there")
    parser.add_argument("--own", action="store_true")
    parser.add_argument("--decode", type=int, default=0, metavar="N")
    args = parser.parse_args(given)
    folder = resolve(args.model)
    plain, whole = plain_halves(folder, torch.device("cpu"))
    reader = None if whole is None else Reader(load_model(folder, "float32", "cpu"))
    held_out = Answers.read(args.prepared).split(args.held_out)[1].fitting(args.tokens // 2).limited(args.answers)
    with torch.no_grad():
        texts = read_answers(plain, held_out, args.tokens, reader)
    about = {"answers": len(texts), "tokens": sum(len(text.taught) for text in texts), "sha256": held_out.hash()[:16]}
    print(json.dumps(about), flush=True)
    for name, bits, group_size, draft in settings(args, plain):
        student = student_of(plain, draft)
        told = measure(student, texts, windows_of(plain), alone=False)
        if args.own:
            told["own context"] = measure(student, texts, windows_of(plain), alone=True)["1 - TV"]
        if args.decode and draft is not None:
            drafter = SelfQuantized(weights=draft, lm_head="shared")
            llm = LLM(
                folder, dtype="float32", drafter=drafter, policy=Fixed(WINDOW), max_batch_size=1, max_model_len=1024
            )
            told["decoded"] = decoded(llm, texts, args.decode)
        show({"name": name, "bits": bits, "group_size": group_size}, told)
    for name, small in small_models(args, plain):
        show(
            {"name": name, "layers": len(layers_of_model(small))}, measure(small, texts, windows_of(small), alone=True)
        )


if __name__ == "__main__":
    main()
