"""Does lm-eval give each item of a task the same answer at every server, for example with drafts and without?

    paceline serve MODEL --drafter none --port 8000 &
    paceline serve MODEL --drafter lookup+self-int4 --port 8001 &
    python -m tests.live.lm_eval_items test.jsonl --lm-eval VENV/bin/lm_eval \\
        --base-url plain=http://localhost:8000 --base-url drafts=http://localhost:8001

The items are those of GSM8K's published file, asked as chats, greedily, through `local-chat-completions`. lm-eval is
`pip install 'lm-eval[api]'` in an environment of its own. Prints the score of each server and how many of its texts are
those of the first; exit code 1 where one is not.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path

TASK = """
task: gsm8k_file
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer.split('####')[-1].strip()}}"
generation_kwargs: {until: [], do_sample: false, temperature: 0.0, max_gen_toks: %d}
filter_list:
  - name: last-number
    filter:
      - {function: regex, group_select: -1, regex_pattern: "(-?[0-9][0-9,]*(?:[.][0-9]+)?)"}
      - {function: take_first}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true, regexes_to_ignore: [",", "[.]0*$"]}
"""


def evaluate(lm_eval: str, tasks: Path, url: str, limit: int, clients: int) -> list[dict]:
    """The items of one server as lm-eval logs them, in the order of the file."""
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        model = json.load(answer)["data"][0]["id"]
    out = tasks / model.replace("/", "_") / url.rpartition(":")[2]
    given = f"model={model},base_url={url}/v1/chat/completions,num_concurrent={clients}"
    given += ",tokenized_requests=False,timeout=3600"
    command = [lm_eval, "--model", "local-chat-completions", "--model_args", given, "--tasks", "gsm8k_file"]
    command += ["--include_path", str(tasks), "--limit", str(limit), "--apply_chat_template"]
    command += ["--log_samples", "--output_path", str(out)]
    subprocess.run(command, check=True, stdout=sys.stderr, env={"OPENAI_API_KEY": "none", **os.environ})
    lines = next(out.rglob("samples_*.jsonl")).read_text().splitlines()
    return sorted((json.loads(line) for line in lines), key=lambda item: item["doc_id"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask every server, and compare with the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="test.jsonl of GSM8K")
    parser.add_argument("--base-url", action="append", required=True, metavar="NAME=URL", help="a server, without /v1")
    parser.add_argument("--lm-eval", default="lm_eval", help="the command of the harness")
    parser.add_argument("--limit", type=int, default=20, help="items")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--clients", type=int, default=4, help="requests at once")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "task.yaml").write_text(TASK % (json.dumps(str(options.file.resolve())), options.max_tokens))
        found = {
            name: evaluate(options.lm_eval, Path(folder), url, options.limit, options.clients)
            for name, _, url in (one.partition("=") for one in options.base_url)
        }
    first = next(iter(found.values()))
    rows = {
        name: {
            "items": len(items),
            "right": sum(item["exact_match"] for item in items),
            "same": sum(a["resps"] == b["resps"] for a, b in zip(items, first, strict=True)),
        }
        for name, items in found.items()
    }
    print(json.dumps(rows))
    return 0 if all(row["same"] == len(first) for row in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
