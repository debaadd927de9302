"""What a head gains that learns from answers, on further prompts of the same kind, and what that costs requests.

    python -m bench.learn MODEL --head NAME --prompts FILE.jsonl [--tokens 50000] [--eval 40] [--folder DIR]

The last `--eval` prompts of the file are held back. The others are answered until the answers have `--tokens` tokens;
then the trainer has its rounds; then both heads draft for the prompts held back, within `--nodes` nodes, and every
answer is compared with plain decoding's. A folder that is there goes on from where it was stopped. With `--requests N`
so many requests come one by one, in turns with and without the trainer beside them, and their latencies are compared.

Without `--head` the first head is made from nothing, and compared with plain decoding.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from paceline import LLM, Fixed, SamplingParams
from paceline.config import parse
from paceline.core.round import tokens_per_pass
from paceline.learn.drafter import Learned
from paceline.learn.folder import LearnFolder, LearnSettings
from paceline.learn.trainer import Gate, Trainer
from paceline.measure.prompts import read_prompts
from paceline.zoo import resolve


def answer(llm, prompts, params, tokens):
    """Answer prompts until the answers have so many tokens; returns how many they have."""
    total = 0
    for begin in range(0, len(prompts), 8):
        if total >= tokens:
            break
        total += sum(len(out.outputs[0].token_ids) for out in llm.generate(prompts[begin : begin + 8], params))
        print(f"\r{total} of {tokens} tokens answered", end="", file=sys.stderr, flush=True)
    return total


def measured(llm, drafter, prompts, params, policy):
    """Tokens a pass of a drafter, and the answers."""
    outputs = llm.using(drafter=drafter, policy=policy).generate(prompts, params)
    rounds = [record for out in outputs for record in out.outputs[0].rounds]
    return tokens_per_pass(rounds), [out.outputs[0].token_ids for out in outputs]


def latencies(llm, prompts, params, count, pause_s):
    """Seconds of requests that come one by one."""
    seconds = []
    for number in range(count):
        time.sleep(pause_s)
        begin = time.perf_counter()
        llm.generate(prompts[number % len(prompts)], params)
        seconds.append(time.perf_counter() - begin)
    return seconds


def main() -> int:
    """Read options; the folder is removed at the end unless one is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--head", help="a packaged head or a folder")
    parser.add_argument("--prompts", required=True, help="prompts of one kind, as for all commands")
    parser.add_argument("--folder", help="of the drafter that learns; default: a temporary one")
    parser.add_argument("--tokens", type=int, default=50_000)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--eval", type=int, default=40)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=7)
    parser.add_argument("--requests", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="paceline-learn-") as temporary:
        return compare(asked, Path(asked.folder or temporary) / "learn")


def compare(asked: argparse.Namespace, folder: Path) -> int:
    """Measure and print; returns 1 where an answer differs."""
    spec = None if asked.head is None else parse(f"head:{asked.head}").drafter
    settings = LearnSettings(recent=2 * asked.tokens, every=1, epochs=asked.epochs, lr=asked.lr)
    prompts, params = read_prompts(asked.prompts), SamplingParams(max_tokens=asked.max_tokens)
    kept, prompts = prompts[-asked.eval :], prompts[: -asked.eval]
    policy, plain = Fixed(asked.depth, asked.nodes), LLM(resolve(asked.model), max_num_seqs=8)

    begin, learned = time.perf_counter(), Learned(spec, folder, settings, trains=False)
    total = answer(plain.using(drafter=learned, policy=policy), prompts, params, asked.tokens)
    learned.close()
    answered = time.perf_counter() - begin
    print(f"\r{total} tokens of answers in {answered:.0f} s", flush=True)
    Trainer(LearnFolder(folder), settings, Gate(is_open=True)).step()
    print(f"a round of training in {time.perf_counter() - begin - answered:.0f} s", flush=True)

    expected = measured(plain, None, kept, params, None)[1]
    heads = {"plain": None, "before": spec, "after": LearnFolder(folder).heads()[-1:]}
    rates, same = {"plain": 1.0}, True
    for name in ("before", "after"):
        if heads[name]:
            head = heads[name] if name == "before" else parse(f"head:{heads[name][0]}").drafter
            rates[name], answers = measured(plain, head.build(), kept, params, policy)
            same &= answers == expected
    for name, rate in rates.items():
        print(f"{name:8} {rate:.3f} tokens a pass on {len(kept)} prompts held back")
    if len(rates) > 2:
        print(f"gain     {rates['after'] / rates['before']:.3f}")
    print("all answers are plain decoding's" if same else "AN ANSWER DIFFERS")

    if asked.requests:
        seconds = {False: [], True: []}
        for turn in range(4):
            trains = turn % 2 == 1
            drafter = Learned(spec, folder, settings, trains)
            llm = plain.using(drafter=drafter, policy=policy)
            seconds[trains] += latencies(llm, kept, params, asked.requests // 4, 2 * settings.idle_s)
            drafter.close()
        for trains, each in seconds.items():
            cuts = statistics.quantiles(each, n=20)
            print(f"p50 {cuts[9]:.3f} s, p95 {cuts[18]:.3f} s {'beside' if trains else 'without'} the trainer")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
