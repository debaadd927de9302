"""What a cache in INT8 or FP8 costs and saves: time of a pass behind long texts, memory, and how far answers move.

    python -m bench.kv_cache MODEL [--context 8192 32768] [--rows 1 8] [--data DIR --texts 2 --length 4096]

Passes are measured behind synthetic columns, which may be more than the model's context; a cell is the least of the
turns' medians in milliseconds: with --threads 1 those of its processor, which other programs disturb less than the
clock's. --data: the folder of Spec-Bench, whose prompts for summaries and RAG are laid end to end to texts of this
length; printed is KL(auto || other) in nats over the second half of each text, and how often the most likely token is
the same. The last line is JSON.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from itertools import chain, pairwise

import torch

CACHES = ("auto", "int8", "fp8")


def passes(models, contexts, rows, turns):
    """{context: {"MB": {cache: ...}, rows: {cache: ms}}}."""
    from paceline.core.tree import TokenTree
    from paceline.target import ModelRunner

    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    found = {}
    for context in contexts:
        length, found[context] = context + max(rows), {"MB": {}}
        runners = {name: ModelRunner(replace(model, context=length), 1, length) for name, model in models.items()}
        for name, runner in runners.items():
            slot = runner.cache.allocate()
            runner.extend_cache(slot, range(5, 69))
            runner.cache.ensure(length)
            with torch.inference_mode():
                for held in (*runner.cache.keys, *runner.cache.values):
                    for begin, end in pairwise((*range(64, length, 64), length)):
                        held[0, :, begin:end] = held[0, :, : end - begin]
            runner.cache.lengths[slot] = context
            found[context]["MB"][name] = runner.cache.num_bytes / 1e6
        for count in rows:
            tree, best = TokenTree.chain([[*range(5, 5 + count)]]), {}
            for _ in range(turns):
                for name, runner in runners.items():
                    times = []
                    for _ in range(5):
                        begin = clock()
                        runner.forward([0], tree)
                        times.append(1e3 * (clock() - begin))
                    best.setdefault(name, []).append(statistics.median(times))
            found[context][count] = {name: min(each) for name, each in best.items()}
    return found


def long_texts(model, data, count, length):
    """Token ids of prompts laid end to end."""
    from paceline.measure.suites import read_suite

    kinds = ("summarization", "rag")
    prompts = [one.turns[0] for one in read_suite("spec_bench", data) if one.category in kinds]
    ids = [model.tokenizer.encode(prompt + "\n\n", add_special_tokens=False) for prompt in prompts]
    whole = [token for part in ids for token in part]
    return [whole[i * length : (i + 1) * length] for i in range(count)]


def logits_of(model, text):
    """Logits [M, V] after each token of a text, chunk by chunk."""
    from paceline.core.reading import Reading
    from paceline.target import ModelRunner

    class Rows(Reading):
        wants_logits = True

        def restart(self):
            self.taken = []

        def take(self, rows):
            self.taken.append(rows)

    runner, reading = ModelRunner(model, 1, len(text) + 2), Rows(0, len(text))
    runner.chunk = 128
    reading.restart()
    for _ in chain(runner.prefill_chunks(runner.admit(text), [*text, text[-1]], reading=reading), [None]):
        while reading.taken:
            yield reading.taken.pop(0)


def errors(models, texts):
    """{cache: {"mean_kl", "same_top"}} over the second halves of texts."""
    from bench.rounding import divergence

    kl, same = {name: [] for name in CACHES[1:]}, {name: [] for name in CACHES[1:]}
    for text in texts:
        read = 0
        for chunks in zip(*(logits_of(models[name], text) for name in CACHES), strict=True):
            read += len(chunks[0])
            for name, other in zip(CACHES[1:], chunks[1:], strict=True):
                if read > len(text) // 2:
                    kl[name].append(divergence(chunks[0], other))
                    same[name].append(chunks[0].argmax(-1) == other.argmax(-1))
    return {
        name: {"mean_kl": float(torch.cat(kl[name]).mean()), "same_top": float(torch.cat(same[name]).double().mean())}
        for name in CACHES[1:]
    }


def main() -> None:
    """Print a line for each measurement, and the line of JSON."""
    from paceline.measure.record import measured_on
    from paceline.target import load_model
    from paceline.target.load import with_kv_cache
    from paceline.zoo import resolve

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--context", type=int, nargs="*", default=[8192, 32768])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--data", help="the folder of Spec-Bench")
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("--length", type=int, default=4096)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    plain = load_model(resolve(given.model))
    models = {name: plain if name == "auto" else with_kv_cache(plain, name) for name in CACHES}
    times = passes(models, given.context, given.rows, given.turns)
    print("context  rows " + "".join(name.rjust(9) for name in CACHES))
    for context, cells in times.items():
        for count, by_cache in cells.items():
            print(f"{context:7,}  {count!s:>4} " + "".join(f"{by_cache[name]:9.1f}" for name in CACHES), flush=True)
    moved = errors(models, long_texts(plain, given.data, given.texts, given.length)) if given.data else {}
    for name, one in moved.items():
        print(f"{name}: mean KL {one['mean_kl']:.2e} nats, same most likely token {one['same_top']:.2%}")
    print(json.dumps({"model": given.model, "passes": times, "errors": moved, "provenance": measured_on()}))


if __name__ == "__main__":
    main()
