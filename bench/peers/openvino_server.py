"""OpenVINO GenAI's continuous batching as a server of the OpenAI API, for serve_load.py and referee.py: chats alone.

    PYTHON bench/peers/openvino_server.py MODEL --port 8002 [--lookup | --draft DRAFT]

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
        if options.draft:
            given["draft_model"] = genai.draft_model(options.draft, "CPU")
        self.lookup, self.drafts = options.lookup, bool(options.lookup or options.draft)
        self.pipeline = genai.ContinuousBatchingPipeline(options.model, scheduler, "CPU", given)
        self.tokenizer = self.pipeline.get_tokenizer()
        self.numbers, self.lock, self.work = itertools.count(), threading.Lock(), threading.Event()
        self.running: dict[int, tuple[Any, queue.Queue[list[int] | None]]] = {}
        threading.Thread(target=self._steps, daemon=True).start()

    def ask(self, body: dict[str, Any]) -> "queue.Queue[list[int] | None]":
        """The tokens of an answer as they come, None at its end."""
        config = self.pipeline.get_config()
        config.max_new_tokens, temperature = body["max_tokens"], body.get("temperature") or 0.0
        config.do_sample = temperature > 0
        if config.do_sample:
            config.temperature, config.rng_seed = temperature, body.get("seed") or 0
            config.top_k, config.top_p, config.repetition_penalty = genai.GenerationConfig().top_k, 1.0, 1.0
        if self.drafts:
            config.num_assistant_tokens = 5
        if self.lookup:
            config.max_ngram_size = 3
        prompt = self.tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True)
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
            model = {"id": "openvino", "object": "model", "owned_by": "OpenVINO GenAI"}
            self._whole({"object": "list", "data": [model]}, 200 if self.path == "/v1/models" else 404)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            pieces = engine.ask(body)
            if not body.get("stream"):
                ids = [token for fresh in iter(pieces.get, None) for token in fresh]
                message = {"role": "assistant", "content": engine.tokenizer.decode(ids)}
                choice = {"index": 0, "message": message}
                self._whole({"choices": [choice | self._end(ids, body)], "usage": self._usage(ids)}, 200)
                return
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
                self._send([{"index": 0, "delta": {"content": text[len(said) :]}, "finish_reason": None}])
                said = text
            self._send([{"index": 0, "delta": {}} | self._end(ids, body)])
            if (body.get("stream_options") or {}).get("include_usage"):
                self._send([], self._usage(ids))
            self.wfile.write(b"data: [DONE]\n\n")
            self.close_connection = True

        def _end(self, ids: list[int], body: dict[str, Any]) -> dict[str, str]:
            return {"finish_reason": "length" if len(ids) == body["max_tokens"] else "stop"}

        def _usage(self, ids: list[int]) -> dict[str, int]:
            return {"completion_tokens": len(ids)}

        def _whole(self, reply: dict[str, Any], status: int) -> None:
            body = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _send(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> None:
            piece = {"choices": choices, "usage": usage}
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
    parser.add_argument("--draft", help="draft with this model")
    parser.add_argument("--f32", action="store_true", help="compute in float32")
    options = parser.parse_args()
    ThreadingHTTPServer(("127.0.0.1", options.port), handler(Engine(options))).serve_forever()


if __name__ == "__main__":
    main()
