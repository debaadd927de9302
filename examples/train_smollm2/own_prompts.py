"""Prompts that a chat model writes itself, sampled from behind the user's tag of its template (arXiv 2406.08464).

    python examples/train_smollm2/own_prompts.py smollm2-135m 1600 --out own.jsonl [--answers RUN/answers-0 --long 400]

A third begins freely; the others begin as the texts below, for kinds of prompts that data sets of instructions lack.
With --answers, a folder of answers that `paceline train METHOD prepare` wrote, there are also --long prompts around
answers of 60 words and more: one text to summarise, or three of them and the question that one of them answers.
"""

import argparse
import json
import random
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from paceline import LLM, SamplingParams

BEGINNINGS = [
    "", "", "", "", "Translate German to English: ", "Summarize: ", "Question: ", "What is ", "Who ", "When did ",
    "Write ", "Explain ", "Read the following text and answer the question below.\n\n",
]  # fmt: skip
MARK = "<user>"
PROSE = "own", "self_instruct", "gpteacher/roleplay"  # sources whose answers are neither code nor sums


def around_answers(folder: Path, tokenizer: PreTrainedTokenizerBase, count: int, seed: int) -> list[str]:
    """Prompts with long texts, which are the answers of a folder; none where it has fewer than three long answers.

    The tokens of a prompt are the template around its question. Before the question stand as many as in an empty
    message, less the two that end it; behind it comes the tag of the assistant, which decodes to "assistant".
    """
    rows = [json.loads(line) for line in (folder / "answers.jsonl").open()]
    rows = [row for row in rows if row["source"].startswith(PROSE)]
    start = len(tokenizer.apply_chat_template([{"role": "user", "content": ""}], return_dict=False)) - 2
    decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=True).strip()  # noqa: E731
    known = [
        (decode(row["prompt_ids"][start:]).removesuffix("assistant").strip(), decode(row["answer_ids"])) for row in rows
    ]
    known = [(asked, text) for asked, text in known if len(text.split()) >= 60]
    draw, made = random.Random(seed), list[str]()
    for i in range(count if len(known) > 2 else 0):
        chosen = draw.sample(known, 3)
        texts = "\n".join(text for _, text in draw.sample(chosen, 3))
        made.append(f"{texts}\n{chosen[0][0]}" if i % 2 and len(chosen[0][0]) < 200 else f"Summarize: {chosen[0][1]}")
    return made


def main() -> None:
    """Sample the prompts, and write those that ended."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model")
    options.add_argument("count", type=int)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--max-tokens", type=int, default=256)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--answers", type=Path, help="a folder of answers, for prompts with long texts")
    options.add_argument("--long", type=int, default=400, help="how many prompts with long texts, with --answers")
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
    answers = llm.generate([before + text for text in begun], params, use_tqdm=True)
    for beginning, answer in zip(begun, answers, strict=True):
        if answer.outputs[0].finish_reason == "stop":  # the user's turn ended
            texts.add(beginning + answer.outputs[0].text.strip())
    texts = {text for text in texts if len(text) > 20}
    with given.out.open("w") as file:
        for text in sorted(texts):
            file.write(json.dumps({"source": "own", "prompt": text}) + "\n")
        long = around_answers(given.answers, llm.tokenizer, given.long, given.seed) if given.answers else []
        for text in long:
            file.write(json.dumps({"source": "own/long", "prompt": text}) + "\n")
    print(f"{len(texts) + len(long)} prompts in {given.out}")


if __name__ == "__main__":
    main()
