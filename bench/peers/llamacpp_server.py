"""llama.cpp as a server of the OpenAI API, for serve_load.py and referee.py. Runs where xllamacpp is installed.

PYTHON bench/peers/llamacpp_server.py FILE.gguf --port 8001 [--lookup | --draft DRAFT.gguf]
"""

import argparse
import threading

import xllamacpp  # pyright: ignore[reportMissingImports]


def main() -> None:
    """Serve until it is ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="the model as GGUF")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clients", type=int, default=16, help="answers decoded side by side")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each client")
    parser.add_argument("--lookup", action="store_true", help="draft by n-grams (ngram_simple)")
    parser.add_argument("--ngram", type=int, help="tokens that must match; llama.cpp's own default is 12")
    parser.add_argument("--draft", help="draft with this model, a GGUF file")
    parser.add_argument("--no-cache", action="store_true", help="read every prompt from its first token")
    options = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path, params.hostnames, params.port = options.file, ["127.0.0.1"], options.port
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    params.n_parallel, params.n_ctx = options.clients, options.clients * options.context
    params.verbosity, params.endpoint_metrics = 1, True  # 1: errors only
    params.cache_prompt = not options.no_cache
    types = xllamacpp.common_speculative_type
    if options.lookup:
        params.speculative.types = [types.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        if options.ngram:
            params.speculative.ngram_simple.size_n = options.ngram
    if options.draft:
        params.speculative.types = [types.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        draft = params.speculative.draft
        draft.mparams.path = options.draft
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = options.threads
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
