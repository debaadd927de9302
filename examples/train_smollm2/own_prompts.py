"""Prompts that a chat model writes itself, sampled from behind the user's tag of its template (arXiv 2406.08464).

    python examples/train_smollm2/own_prompts.py smollm2-135m 1600 --out own.jsonl

A third begins freely; the others begin as the texts below, for kinds of prompts that data sets of instructions lack.
"""

import argparse
import json
from pathlib import Path

from paceline import LLM, SamplingParams

BEGINNINGS = [
    "", "", "", "", "Translate German to English: ", "Summarize: ", "Question: ", "What is ", "Who ", "When did ",
    "Write ", "Explain ", "Read the following text and answer the question below.\n\n",
]  # fmt: skip
MARK = "<user>"


def main() -> None:
    """Sample the prompts, and write those that ended."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model")
    options.add_argument("count", type=int)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--max-tokens", type=int, default=256)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    llm = LLM(given.model, max_num_seqs=64, max_model_len=given.max_tokens + 128)
    template = llm.loaded.tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False)
    before = template[: template.index(MARK)]
    begun = [BEGINNINGS[i % len(BEGINNINGS)] for i in range(given.count)]
    params = [
        SamplingParams(temperature=1.0, top_p=0.95, max_tokens=given.max_tokens, seed=given.seed * given.count + i)
        for i in range(given.count)
    ]
    texts = set[str]()
    for beginning, answer in zip(begun, llm.generate([before + text for text in begun], params), strict=True):
        if answer.outputs[0].finish_reason == "stop":  # the user's turn ended
            texts.add(beginning + answer.outputs[0].text.strip())
    texts = {text for text in texts if len(text) > 20}
    with given.out.open("w") as file:
        for text in sorted(texts):
            file.write(json.dumps({"source": "own", "prompt": text}) + "\n")
    print(f"{len(texts)} prompts in {given.out}")


if __name__ == "__main__":
    main()
