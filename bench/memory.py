"""Peak memory of plain decoding and of each drafter, every one in a process of its own.

    python bench/memory.py smollm2-135m --drafter none --drafter self-int4

`resident` is what stays after a generation; `peak` the highest ever, loading and quantising included. MB = 10^6 bytes.
The last line is JSON.
"""

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path


def measure(model: str, drafter: str) -> dict[str, object]:
    """Load, generate 64 tokens, read the process's memory."""
    from paceline import LLM, SamplingParams
    from paceline.config import parse
    from paceline.methods import SelfQuantized

    built, policy, verifier = parse(drafter, policy="fixed").build()
    llm = LLM(model, drafter=built, policy=policy, verifier=verifier, max_num_seqs=1)
    llm.generate("Once upon a time", SamplingParams(max_tokens=64, ignore_eos=True))
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    row: dict[str, object] = {
        "drafter": drafter,
        "resident_mb": round(int(fields["VmRSS"].split()[0]) * 1024 / 1e6),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6),
        "kv_cache_mb": round(llm.runner.cache.num_bytes / 1e6, 1),
    }
    if isinstance(built, SelfQuantized) and built.report is not None:
        row["int4_copy_mb"] = round(built.report.num_bytes / 1e6, 1)
        row["lm_head"] = built.report.lm_head
    return row


def main() -> None:
    """One child process per drafter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--drafter", action="append", required=True)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.model, options.drafter[0])))
        return
    rows = []
    for drafter in options.drafter:
        command = [sys.executable, __file__, options.model, "--drafter", drafter, "--child"]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        rows.append(json.loads(out.splitlines()[-1]))
        print(rows[-1], flush=True)
    print(json.dumps({"model": options.model, "rows": rows}))


if __name__ == "__main__":
    main()
