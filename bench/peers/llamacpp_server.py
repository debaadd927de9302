"""llama.cpp as a server of the OpenAI API, for serve_load.py. Runs where the package xllamacpp is installed.

PYTHON bench/peers/llamacpp_server.py FILE.gguf --port 8001 [--lookup]
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
    options = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path, params.hostnames, params.port = options.file, ["127.0.0.1"], options.port
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    params.n_parallel, params.n_ctx = options.clients, options.clients * options.context
    params.verbosity = 1  # errors only
    if options.lookup:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
