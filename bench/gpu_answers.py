"""Tokens a second on a GPU: Paceline's drafters, transformers and vLLM; a part of `bench/gpu.py`."""

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM

from paceline import LLM, SamplingParams
from paceline.measure.suites import BUILT_IN, read_suite

if TYPE_CHECKING:
    from bench.gpu import Run

EAGLE = "head:smollm2-135m-eagle"
DRAFTERS, HEADS = ("lookup", "self-int4"), (EAGLE, "head:smollm2-135m-medusa", "head:smollm2-135m-dflash")
VLLM = """
import json, sys, time, vllm
path, prompts, tokens = json.load(sys.stdin)
llm = vllm.LLM(path, dtype="bfloat16", max_model_len=2048, max_num_seqs=1, gpu_memory_utilization=0.3)
params = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
ask = lambda ids: llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
ask(prompts[0])
begin = time.perf_counter()
for ids in prompts:
    ask(ids)
print(json.dumps(len(prompts) * tokens / (time.perf_counter() - begin)))
"""


def seconds_of(ask: Callable[[list[int]], Any], prompts: list[list[int]]) -> tuple[float, list[Any]]:
    """Of all prompts, one at a time, reading them included, after the first has been answered once; and the answers."""
    ask(prompts[0])
    begin = time.perf_counter()
    answers = [ask(ids) for ids in prompts]
    return time.perf_counter() - begin, answers


def by_transformers(run: "Run", path: str | None, config: Any, prompts: list[list[int]], tokens: int) -> float:
    """Tokens a second. path: None: random weights of a config."""
    kinds = AutoModelForCausalLM
    model: Any = kinds.from_config(config, attn_implementation="sdpa") if path is None else kinds.from_pretrained(path)
    model = model.to(run.device, torch.bfloat16).eval()
    options = {"do_sample": False, "min_new_tokens": tokens, "max_new_tokens": tokens, "pad_token_id": 0}
    ask = lambda ids: model.generate(torch.tensor([ids], device=run.device), **options).tolist()  # noqa: E731
    return len(prompts) * tokens / seconds_of(ask, prompts)[0]


def by_vllm(run: "Run", path: str | None, prompts: list[list[int]], tokens: int) -> float:
    """Tokens a second, in a process of its own."""
    if path is None or importlib.util.find_spec("vllm") is None:
        raise ModuleNotFoundError("vLLM is not installed, or has no model to read")
    given, limit = json.dumps([path, prompts, tokens]), max(run.left, 1)
    command = [sys.executable, "-c", VLLM]
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=limit, check=False)
    if done.returncode:
        raise RuntimeError(f"vLLM failed: {(done.stderr.strip() or 'silently').splitlines()[-1]}")
    return float(done.stdout.splitlines()[-1])


def measure(run: "Run") -> list[dict[str, Any]]:
    """Of greedy answers, one at a time. Those of drafters are compared with plain decoding."""
    path = run.small if isinstance(run.small, str) else None
    llm = LLM(run.small, max_num_seqs=1, **({} if path is None else {"device": run.device, "dtype": "bfloat16"}))
    prompts = [[3, 5, 7, 11] * 8] if path is None else [llm.encode(one.messages([])) for one in read_suite(BUILT_IN)]
    tokens, rows, plain = run.options.tokens, list[dict[str, Any]](), list[list[int]]()
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)

    def add(name: str, speed: float, length: float | None = None, same: str | None = None) -> None:
        over = speed / rows[0]["speed"] if rows else 1.0
        rows.append({"with": name, "speed": round(speed, 1), "over plain": round(over, 3), "tokens a pass": length,
                     "identical": same})  # fmt: skip
        print(f"{name:32}{speed:10.1f} tokens/s{over:8.2f}{length or 1:8.2f}  {same or ''}", flush=True)

    def ours(drafter: str | None) -> None:
        one = llm.using(drafter=drafter)
        seconds, told = seconds_of(lambda ids: one.generate(ids, params)[0], prompts)
        if not plain:
            plain.extend(answer.token_ids for answer in told)
        same = sum(answer.token_ids == ids for answer, ids in zip(told, plain, strict=True))
        speed, length = len(told) * tokens / seconds, len(told) * tokens / sum(answer.metrics.rounds for answer in told)
        add(drafter or "plain", speed, round(length, 3), f"{same} of {len(told)}")
        if drafter == EAGLE:
            run.aim("SmolLM2 with EAGLE, tokens/s", speed)

    ours(None)
    for drafter in (*DRAFTERS, *(() if path is None else HEADS)):
        run.guarded(drafter, lambda name=drafter: ours(name))
    others = {
        "transformers": lambda: by_transformers(run, path, llm.loaded.model.config, prompts, tokens),
        "vLLM": lambda: by_vllm(run, path, prompts, tokens),
    }
    for name, speed in others.items():
        found = run.guarded(name, speed)
        if found is not None:
            add(name, found)
    columns = {"with": "", "speed": "tokens/s", "over plain": "x", "tokens a pass": "tokens", "identical": ""}
    run.tables.append({
        "table": "gpu-answers", "model": "smollm2-135m", "columns": columns, "rows": [[*row.values()] for row in rows],
        "title": f"Greedy answers of {tokens} tokens{'' if path else ' of random weights'}, one at a time",
    })  # fmt: skip
    return rows
