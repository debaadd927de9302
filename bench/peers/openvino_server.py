"""OpenVINO GenAI's continuous batching as a server of the OpenAI API, for serve_load.py: streamed greedy chats alone.

    PYTHON bench/peers/openvino_server.py MODEL --port 8002 [--lookup]

Runs where the package openvino-genai is installed. MODEL: an OpenVINO folder, or a GGUF file of Llama or Qwen.
"""

import argparse
import itertools
import json
import queue
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import openvino_genai as genai  # pyright: ignore[reportMissingImports]


class Engine:
    """A pipeline that a thread of its own steps while there is something to answer."""

    def __init__(self, options: argparse.Namespace):
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_seqs = options.cache_gib, options.clients
        given: dict[str, Any] = {"INFERENCE_NUM_THREADS": options.threads}
        if options.lookup:
            given["prompt_lookup"] = True
        if options.f32:
            given["INFERENCE_PRECISION_HINT"] = "f32"
        self.lookup = options.lookup
        self.pipeline = genai.ContinuousBatchingPipeline(options.model, scheduler, "CPU", given)
        self.tokenizer = self.pipeline.get_tokenizer()
        self.numbers, self.lock, self.work = itertools.count(), threading.Lock(), threading.Event()
        self.running: dict[int, tuple[Any, queue.Queue[list[int] | None]]] = {}
        threading.Thread(target=self._steps, daemon=True).start()

    def ask(self, messages: list[dict[str, str]], max_tokens: int) -> "queue.Queue[list[int] | None]":
        """The tokens of an answer as they come, None at its end."""
        config = self.pipeline.get_config()
        config.max_new_tokens, config.do_sample = max_tokens, False
        if self.lookup:
            config.num_assistant_tokens, config.max_ngram_size = 5, 3
        prompt = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        pieces: queue.Queue[list[int] | None] = queue.Queue()
        with self.lock:
            number = next(self.numbers)
            self.running[number] = (self.pipeline.add_request(number, prompt, config), pieces)
        self.work.set()
        return pieces

    def _steps(self) -> None:
        while True:
            self.work.wait()
            with self.lock:
                if not self.running:
                    self.work.clear()
                    continue
                self.pipeline.step()
                for number, (handle, pieces) in list(self.running.items()):
                    while handle.can_read():
                        for one in handle.read().values():
                            pieces.put(list(one.generated_ids))
                    if handle.get_status() != genai.GenerationStatus.RUNNING:
                        pieces.put(None)
                        del self.running[number]


def handler(engine: Engine) -> type[BaseHTTPRequestHandler]:
    """What answers requests."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

        def do_GET(self) -> None:
            body = json.dumps({"object": "list", "data": [{"id": "openvino", "object": "model"}]}).encode()
            self.send_response(200 if self.path == "/v1/models" else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            pieces = engine.ask(body["messages"], body["max_tokens"])
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            ids, said = list[int](), ""
            while (fresh := pieces.get()) is not None:
                ids += fresh
                text = engine.tokenizer.decode(ids)
                if text.endswith("\ufffd"):  # half a character
                    continue
                self._send({"content": text[len(said) :]}, None)
                said = text
            self._send({}, "stop")
            self.wfile.write(b"data: [DONE]\n\n")
            self.close_connection = True

        def _send(self, delta: dict[str, str], finish_reason: str | None) -> None:
            piece = {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}
            self.wfile.write(f"data: {json.dumps(piece)}\n\n".encode())
            self.wfile.flush()

    return Handler


def main() -> None:
    """Serve until it is ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clients", type=int, default=16, help="answers decoded side by side")
    parser.add_argument("--cache-gib", type=int, default=2)
    parser.add_argument("--lookup", action="store_true", help="prompt lookup")
    parser.add_argument("--f32", action="store_true", help="compute in float32")
    options = parser.parse_args()
    ThreadingHTTPServer(("127.0.0.1", options.port), handler(Engine(options))).serve_forever()


if __name__ == "__main__":
    main()
