"""Prompts that a chat model writes itself, and its answers to these and other prompts, in large batches on a GPU.

    python examples/train_smollm2/gpu_answers.py smollm2-135m PROMPTS.jsonl --own 40000 --out answers
    paceline train eagle train --config examples/train_smollm2/eagle.yaml --out runs/eagle 'answers=[answers]'

It writes what `own_prompts.py` and `paceline train METHOD prepare` write, several times as fast: prompts of like length
begin together, and all of their tokens are computed and chosen on the device. It knows models of Llama's form alone.
An interrupted run leaves a folder that can be used. One process writes 60 thousand tokens a second on an H100, three,
with a third of the prompts and a --seed each, 80 thousand.
"""

import argparse
import json
import random
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from own_prompts import BEGINNINGS, MARK, around_answers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from paceline.hf.image_prompts import encode
from paceline.target import LoadedModel, load_model
from paceline.zoo import resolve

COLUMNS = 640_000  # of a batch: 15 GB of keys and values for SmolLM2-135M
MOST_LIKELY = 512  # tokens among which those of top_p are looked for
EVERY = 16  # steps between looks at which texts have ended


class Batch:
    """Texts that are written together, with their keys and values; prompts are padded on the left."""

    def __init__(self, whole: Any, prompts: list[list[int]], more: int):
        self.whole, self.model, config, device = whole, whole.model, whole.config, whole.device
        self.heads, self.width = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
        longest = max(map(len, prompts))
        self.padding = torch.tensor([longest - len(ids) for ids in prompts], device=device)
        shape = len(prompts), self.heads, longest + more, self.width
        new = lambda: torch.zeros(shape, dtype=whole.dtype, device=device)  # noqa: E731
        self.cache = [(new(), new()) for _ in range(config.num_hidden_layers)]
        self.filled = 0
        self.ids = torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts], device=device)

    def keep(self, rows: Tensor) -> None:
        """Forget all texts but these."""
        self.padding = self.padding[rows]
        for i, (keys, values) in enumerate(self.cache):
            self.cache[i] = keys[rows], values[rows]

    def logits(self, ids: Tensor) -> Tensor:
        """Logits [B, V] after these tokens [B, N], of each text the next ones."""
        (rows, count), begin, model = ids.shape, self.filled, self.model
        end = self.filled = begin + count
        columns = torch.arange(end, device=ids.device)
        positions = (columns[begin:] - self.padding[:, None]).clamp_min(0)
        hidden = model.embed_tokens(ids)
        cos, sin = (x[:, None] for x in model.rotary_emb(hidden, positions))
        seen = (columns >= self.padding[:, None])[:, None, None] & (columns <= columns[begin:, None])
        if count > 1:  # a padded row sees itself, or it would see nothing
            seen = seen | (columns == columns[begin:, None])
        bias = torch.zeros((), dtype=hidden.dtype, device=ids.device).where(seen, float("-inf"))
        for layer, (keys, values) in zip(model.layers, self.cache, strict=True):
            attention, x = layer.self_attn, layer.input_layernorm(hidden)
            split = lambda y: y.view(rows, count, -1, self.width).transpose(1, 2)  # noqa: E731
            query, key = (turned(split(p(x)), cos, sin) for p in (attention.q_proj, attention.k_proj))
            keys[:, :, begin:end], values[:, :, begin:end] = key, split(attention.v_proj(x))
            k, v = keys[:, :, :end], values[:, :, :end]
            if count == 1:  # the query heads of a key head are rows of one product
                query = query.reshape(rows, self.heads, -1, self.width)
                weights = (query @ k.transpose(2, 3) * self.width**-0.5 + bias).softmax(-1)
                x = (weights @ v).reshape(rows, 1, -1)
            else:
                k, v = (y.repeat_interleave(query.shape[1] // self.heads, 1) for y in (k, v))
                x = nn.functional.scaled_dot_product_attention(query, k, v, attn_mask=bias)
                x = x.transpose(1, 2).reshape(rows, count, -1)
            hidden = hidden + attention.o_proj(x)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.whole.lm_head(model.norm(hidden[:, -1]))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions."""
    one, two = x.chunk(2, -1)
    return x * cos + torch.cat([-two, one], -1) * sin


def chosen(logits: Tensor, is_sampled: Tensor, top_p: float) -> Tensor:
    """The likeliest token of each row, or a sampled one. [B, V], [B] -> [B]."""
    scores = logits.float()
    if top_p < 1:
        best = scores.topk(MOST_LIKELY).values
        p = (best - scores.logsumexp(-1, keepdim=True)).exp()
        least = best.masked_fill(p.cumsum(-1) - p >= top_p, float("inf")).amin(-1, keepdim=True)
        scores = scores.masked_fill(scores < least, float("-inf"))
    noise = -torch.empty_like(scores).exponential_().log()
    return (scores + noise.where(is_sampled[:, None], 0.0)).max(-1).indices


@torch.inference_mode()
def written(
    model: Any, prompts: list[list[int]], is_sampled: list[bool], ends: Iterable[int], most: int, top_p: float = 1.0
) -> Iterator[tuple[int, list[int]]]:
    """The number of each prompt and what follows it, with the token that ended it, or `most` tokens."""
    groups, done = list[list[int]]([[]]), 0
    for i in sorted(range(len(prompts)), key=lambda i: len(prompts[i])):
        if (len(groups[-1]) + 1) * (len(prompts[i]) + most) > COLUMNS:
            groups.append([])
        groups[-1].append(i)
    random.Random(0).shuffle(groups)  # an interrupted run has prompts of all lengths
    last, began = torch.tensor(sorted(ends), device=model.device), time.monotonic()
    stop = set(last.tolist())
    for rows in groups if prompts else ():
        done += len(rows)
        batch, texts = Batch(model, [prompts[i] for i in rows], most), dict[int, list[int]]((i, []) for i in rows)
        sampled = torch.tensor([is_sampled[i] for i in rows], device=model.device)
        ids, made = batch.ids, list[Tensor]()
        ended = torch.zeros(len(rows), dtype=torch.bool, device=model.device)
        for step in range(most):
            ids = chosen(batch.logits(ids), sampled, top_p)[:, None]
            made.append(ids[:, 0])
            ended |= torch.isin(ids[:, 0], last)
            if step % EVERY == EVERY - 1 or step == most - 1:
                alive = (~ended).nonzero()[:, 0]
                if step == most - 1 or len(alive) < 0.8 * len(rows):
                    for i, more in zip(rows, torch.stack(made, 1).tolist(), strict=True):
                        texts[i] += more
                    rows, made = [rows[i] for i in alive.tolist()], []
                    if not rows:
                        break
                    batch.keep(alive)
                    ids, sampled, ended = ids[alive], sampled[alive], ended[alive]
        for i, text in texts.items():
            yield i, text[: next((n + 1 for n, one in enumerate(text) if one in stop), most)]
        print(f"{done} of {len(prompts)} texts in {time.monotonic() - began:.0f} s", flush=True)


def own_prompts(model: Any, target: LoadedModel, count: int, most: int) -> list[str]:
    """Texts sampled from behind the user's tag, of which some begin with one of `BEGINNINGS`; those that ended."""
    tokenizer: Any = target.tokenizer
    before = tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False)
    before = before[: before.index(MARK)]
    begun = [BEGINNINGS[i % len(BEGINNINGS)] for i in range(count)]
    starts = [encode(tokenizer, before + text) for text in begun]
    found = list(written(model, starts, [True] * count, target.eos_ids, most, top_p=0.95))
    ended = [(i, ids) for i, ids in found if ids[-1] in target.eos_ids]
    texts = {begun[i] + tokenizer.decode(ids, skip_special_tokens=True).strip() for i, ids in ended}
    return sorted(text for text in texts if len(text) > 20)


def answer(
    model: Any, target: LoadedModel, asked: list[tuple[str, str]], longest: int, most: int, folder: Path
) -> None:  # fmt: skip
    """Append answers to prompts, given as source and text, to the folder's answers.jsonl.

    Each prompt is answered greedily and by sampling; those of its own, which are many, one way or the other.
    """
    tokenizer: Any = target.tokenizer
    chats = [[{"role": "user", "content": text}] for _, text in asked]
    ids = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    todo = [
        (i, is_sampled)
        for i, (source, _) in enumerate(asked)
        for is_sampled in (False, True)
        if len(ids[i]) <= longest and (not source.startswith("own") or i % 2 == is_sampled)
    ]
    found = written(model, [ids[i] for i, _ in todo], [sampled for _, sampled in todo], target.eos_ids, most)
    with (folder / "answers.jsonl").open("a+") as file:
        file.seek(0)
        for index, (n, text) in enumerate(found, start=sum(1 for _ in file)):
            i, is_sampled = todo[n]
            line = {
                "index": index, "source": asked[i][0], "temperature": float(is_sampled), "prompt_ids": ids[i],
                "answer_ids": text, "finish_reason": "stop" if text[-1] in target.eos_ids else "length",
            }  # fmt: skip
            file.write(json.dumps(line) + "\n")


def main() -> None:
    """Write prompts, then answers, then prompts around answers and their answers."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model")
    options.add_argument("prompts", type=Path)
    options.add_argument("--own", type=int, default=20_000, help="prompts of its own to begin")
    options.add_argument("--long", type=int, default=4_000, help="prompts with long texts, which are its answers")
    options.add_argument("--max-tokens", type=int, default=256)
    options.add_argument("--prompt-tokens", type=int, default=800)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--device", default="cuda")
    options.add_argument("--out", type=Path, required=True)
    given = options.parse_args()
    if given.out.exists():
        options.error(f"{str(given.out)!r} is there already; name a new folder")
    torch.manual_seed(given.seed)
    target = load_model(resolve(given.model), "bfloat16", "cpu")
    model: Any = AutoModelForCausalLM.from_pretrained(resolve(given.model), dtype=torch.bfloat16).to(given.device)
    if model.config.model_type != "llama":
        options.error(f"{given.model} is a {model.config.model_type}, expected a llama; use `paceline train prepare`")
    given.out.mkdir(parents=True)
    record = {"target": target.name, "fingerprint": target.fingerprint}
    (given.out / "prepare.json").write_text(json.dumps(record) + "\n")
    asked = [(one["source"], one["prompt"]) for one in map(json.loads, given.prompts.open())]
    asked += [("own", text) for text in own_prompts(model, target, given.own, given.max_tokens)]
    answer(model, target, asked, given.prompt_tokens, given.max_tokens, given.out)
    around = around_answers(given.out, target.tokenizer, given.long, given.seed)
    long = [("own/long", text) for text in around]
    answer(model, target, long, given.prompt_tokens, given.max_tokens, given.out)


if __name__ == "__main__":
    main()
