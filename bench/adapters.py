"""What LoRA adapters cost: a pass with one and without, and how drafts fare with the answers of one.

    python bench/adapters.py smollm2-135m [--adapter DIR] [-d lookup -d self-int4] [--prompts FILE] [--threads 1]

Without --adapter one of random weights is made, of --rank 16 at all linear layers of attention and MLP. Passes with it
and without it are taken in turns; a cell is the median in milliseconds, with --threads 1 of the processor's time, which
other programs disturb less than the clock's. Drafts are chains or trees of `Fixed(4, 8)` on the prompts, greedy;
printed are tokens a pass. Exit code 1 if an answer is not the one of plain decoding with its adapter. The last line is
JSON.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

from paceline import LLM, Fixed, SamplingParams
from paceline.core.tree import TokenTree
from paceline.measure.prompts import EXAMPLES, read_prompts, user_prompt

ROWS, CONTEXT, NAME = (1, 8), 100, "one"
LINEARS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj")


def make(folder: Path, llm: LLM, rank: int) -> Path:
    """A random adapter in peft's format, weak enough for the model to go on writing text."""
    made, tensors, names = torch.Generator().manual_seed(0), {}, set[str]()
    linear: Any
    for path, linear in llm.loaded.model.named_modules():
        if (name := path.rpartition(".")[2]) in LINEARS and ".experts." not in path:
            a, b = (
                torch.randn(rank, linear.in_features, generator=made),
                torch.randn(linear.out_features, rank, generator=made),
            )
            for letter, factor in ("A", a * linear.in_features**-0.5), ("B", b * 2e-2):
                tensors[f"base_model.model.{path}.lora_{letter}.weight"] = factor
            names.add(name)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(names)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def passes(llm: LLM, turns: int) -> dict[int, list[float]]:
    """Median ms of a pass without and with the adapter, by rows."""
    runner, clock = llm.runner, time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    adapters = None, runner.adapters.get(NAME)
    slots = [runner.cache.allocate() for _ in adapters]
    for slot, adapter in zip(slots, adapters, strict=True):
        runner.cache.adapters[slot] = adapter
        runner.extend_cache(slot, range(5, 5 + CONTEXT))
    found = dict[int, list[float]]()
    for rows in ROWS:
        tree, times = TokenTree.chain([[*range(5, 5 + rows)]]), [list[float](), list[float]()]
        for _ in range(turns):
            for own, slot in zip(times, slots, strict=True):
                begin = clock()
                runner.forward([slot], tree)
                own.append(1e3 * (clock() - begin))
        found[rows] = [statistics.median(own) for own in times]
    for slot in slots:
        runner.cache.release(slot)
    return found


def tokens_a_pass(llm: LLM, drafter: str, prompts, asked, wanted) -> tuple[list[float], bool]:
    """Without and with the adapter, and whether the answers are those wanted."""
    drafting, found, is_right = llm.using(drafter=drafter, policy=Fixed(4, 8)), list[float](), True
    for params, want in zip(asked, wanted, strict=True):
        parts = [result.outputs[0] for result in drafting.generate(prompts, params)]
        is_right &= [part.token_ids for part in parts] == want
        found.append(sum(len(part.token_ids) for part in parts) / sum(len(part.rounds) for part in parts))
    return found, is_right


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--adapter", type=Path)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("-d", "--drafter", action="append", default=[])
    parser.add_argument("--prompts", type=Path, help="default: the built-in ones")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--threads", type=int, default=0)
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    llm = LLM(given.model)
    with TemporaryDirectory() as folder:
        llm.add_adapter(NAME, given.adapter or make(Path(folder), llm, given.rank))
    adapter, found = llm.runner.adapters.get(NAME), dict[str, object]()
    print(f"an adapter of rank {adapter.rank}, {adapter.num_bytes / 1e6:.1f} MB")
    print("rows of a pass   without      with")
    for rows, (without, own) in passes(llm, given.turns).items():
        print(f"{rows:<14}{without:10.2f}{own:10.2f}  ms, {own / without - 1:+.1%}")
        found[f"{rows} rows"] = [round(without, 3), round(own, 3)]
    texts = [user_prompt(llm.loaded, one.prompt) for one in EXAMPLES]
    prompts = (read_prompts(given.prompts) if given.prompts else texts)[: given.num_prompts]
    extras = (None, {"adapter": NAME}) if given.drafter else ()
    asked = [SamplingParams(0.0, max_tokens=given.max_tokens, extra_args=extra) for extra in extras]
    wanted, is_right = [[one.token_ids for one in llm.generate(prompts, params)] for params in asked], True
    if given.drafter:
        print("tokens a pass    without      with")
    for drafter in given.drafter:
        (without, own), is_same = tokens_a_pass(llm, drafter, prompts, asked, wanted)
        is_right &= is_same
        print(f"{drafter:<14}{without:10.2f}{own:10.2f}" + ("" if is_same else "  another answer than plain decoding"))
        found[drafter] = [round(without, 3), round(own, 3)]
    print(json.dumps(found))
    sys.exit(not is_right)


if __name__ == "__main__":
    main()
