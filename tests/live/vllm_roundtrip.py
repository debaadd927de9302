"""Does vLLM accept as many drafted tokens as Paceline? Greedy, in float32, a chain of k.

    python -m tests.live.vllm_roundtrip TARGET DRAFT --vllm-python ~/vllm/bin/python --prompts HumanEval.jsonl.gz

DRAFT is an exported EAGLE-3, P-EAGLE or Medusa head, or a draft model. vLLM's first token of an answer comes without
a draft, so Paceline is asked to go on behind it; from there on both draft at the same places of the same text, and
the mean acceptance lengths must agree within --tolerance. What can make them differ although all is well: rounding
that changes a token, and the last round of an answer, which is left out here.
The last line is JSON; exit code 1 if they disagree. How to get vLLM for a CPU: bench/README.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

PROMPTS = [
    "The first thing to know about the moon is",
    "def fibonacci(n):\n",
    "Here is a recipe for bread. Ingredients:",
    "Once upon a time there was a small dragon who",
    "To solve the equation 3x + 5 = 20, first",
    "The capital of France is Paris. The capital of Italy is",
    "Dear Sir or Madam, I am writing to",
    "In 1969, two astronauts",
]
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def vllm_side(task: dict) -> dict:
    """Runs in vLLM's interpreter, which need not have Paceline."""
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    speculative = {"method": task["method"], "model": task["draft"], "num_speculative_tokens": task["k"]}
    if task["parallel"]:  # P-EAGLE
        speculative["parallel_drafting"] = True
    llm = LLM(
        model=task["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=task["max_model_len"],
        max_num_seqs=1,
        disable_log_stats=False,
        speculative_config=speculative,
    )
    params = SamplingParams(temperature=0.0, max_tokens=task["max_tokens"], ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in task["prompts"]], params)
    counted = {metric.name.removeprefix("vllm:"): metric for metric in llm.get_metrics()}
    return {
        "answers": [list(output.outputs[0].token_ids) for output in outputs],
        "drafts": counted["spec_decode_num_drafts"].value,
        "accepted": counted["spec_decode_num_accepted_tokens"].value,
        "per_position": list(counted["spec_decode_num_accepted_tokens_per_pos"].values),
    }


def our_side(task: dict, firsts: list[int]) -> dict:
    """The same prompts, each with vLLM's first token behind it."""
    from paceline import LLM, DraftModel, Eagle, Fixed, Medusa, SamplingParams

    drafter = {
        "eagle3": partial(Eagle, tree="chain", ngrams=False),
        "medusa": partial(Medusa, top_k=1, ngrams=False),
        "draft_model": DraftModel,
    }
    llm = LLM(
        task["model"], drafter=drafter[task["method"]](task["draft"]), policy=Fixed(task["k"]), dtype="float32",
        numerics="fast", device="cpu", max_num_seqs=1, max_model_len=task["max_model_len"],
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=task["max_tokens"] - 1, ignore_eos=True)
    prompts = [[*ids, first] for ids, first in zip(task["prompts"], firsts, strict=True)]
    results = [llm.generate([ids], params)[0] for ids in prompts]
    rounds = [one for result in results for one in result.rounds if one.num_drafted == task["k"]]
    return {
        "answers": [[first, *result.token_ids] for first, result in zip(firsts, results, strict=True)],
        "drafts": len(rounds),
        "accepted": sum(one.num_accepted for one in rounds),
        "per_position": [sum(one.num_accepted > place for one in rounds) for place in range(task["k"])],
    }


def in_vllm(python: str, task: dict) -> dict:
    """Run `vllm_side` in another interpreter; its log goes to stderr."""
    with tempfile.TemporaryDirectory() as folder:
        question, answer = Path(folder) / "task.json", Path(folder) / "result.json"
        question.write_text(json.dumps(task))
        command = [python, str(Path(__file__).resolve()), "--vllm-side", str(question), str(answer)]
        subprocess.run(command, check=True, stdout=sys.stderr, env={**ENVIRONMENT, **os.environ})
        return json.loads(answer.read_text())


def summary(side: dict) -> dict[str, object]:
    """Rates of one side. mean_acceptance_length: tokens a round, the target's own counted."""
    drafts = max(side["drafts"], 1)
    return {
        "mean_acceptance_length": round(1 + side["accepted"] / drafts, 4),
        "per_position": [round(count / drafts, 4) for count in side["per_position"]],
        "rounds": side["drafts"],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask both and compare."""
    if sys.argv[1:2] == ["--vllm-side"]:
        Path(sys.argv[3]).write_text(json.dumps(vllm_side(json.loads(Path(sys.argv[2]).read_text()))))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="the target's folder")
    parser.add_argument("draft", type=Path, help="a folder that `paceline export --to vllm` wrote, or a draft model's")
    parser.add_argument("--vllm-python", required=True, help="the interpreter that has vLLM")
    parser.add_argument("--prompts", type=Path, help="a file of prompts; default: a few of its own")
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("-k", type=int, default=3)
    parser.add_argument("--tolerance", type=float, default=0.03, help="of the mean acceptance length, relative")
    options = parser.parse_args(arguments)
    from transformers import AutoTokenizer

    from paceline.measure.prompts import read_prompts

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    given = PROMPTS if options.prompts is None else read_prompts(options.prompts, options.num_prompts)
    texts = [
        one if isinstance(one, str) else tokenizer.apply_chat_template(one, tokenize=False, add_generation_prompt=True)
        for one in given[: options.num_prompts]
    ]
    room = options.max_model_len - options.max_tokens - options.k - 1
    prompts = [ids for text in texts if len(ids := tokenizer(text, add_special_tokens=False)["input_ids"]) <= room]
    config = json.loads((options.draft / "config.json").read_text())
    is_head = any("Eagle" in name for name in config["architectures"])
    method = "eagle3" if is_head else "medusa" if config.get("model_type") == "medusa" else "draft_model"
    task = {
        "model": str(options.model.resolve()),
        "draft": str(options.draft.resolve()),
        "method": method,
        "parallel": "mask_token_id" in config,
        "prompts": prompts,
        "k": options.k,
        "max_tokens": options.max_tokens,
        "max_model_len": options.max_model_len,
    }
    theirs = in_vllm(options.vllm_python, task)
    ours = our_side(task, [answer[0] for answer in theirs["answers"]])
    sides = {"vllm": summary(theirs), "paceline": summary(ours)}
    lengths = [float(side["mean_acceptance_length"]) for side in sides.values()]  # type: ignore[arg-type]
    apart = abs(lengths[0] - lengths[1]) / lengths[0]
    same = sum(a == b for a, b in zip(theirs["answers"], ours["answers"], strict=True))
    agrees = apart <= options.tolerance
    print(json.dumps({**sides, "relative_difference": round(apart, 4), "agrees": agrees,
                      "identical_answers": same, "answers": len(prompts)}))  # fmt: skip
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
