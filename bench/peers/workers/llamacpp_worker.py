"""Answers with llama.cpp through the xllamacpp package: plain, n-gram lookup, and a draft model or head."""

import base64
import json
import urllib.error
import urllib.request
from array import array
from importlib import import_module
from pathlib import Path
from typing import Any

CONTEXT = 4096
_GGML = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_ALL = 1 << 20  # more than any vocabulary has
_LETTERS = "root ::= [a-z]+"


class Worker:
    """One in-process server for each mode; they map the same file, so the weights are in memory once."""

    def __init__(self, settings: "dict[str, Any]") -> None:
        self.xllamacpp = import_module("xllamacpp")
        kinds = {"plain": None, "lookup": "NGRAM_SIMPLE"}
        if settings["draft_model"]:
            kinds["draft"] = kind_of(settings["draft_model"])
        self.servers = {mode: self._server(settings, kind) for mode, kind in kinds.items()}
        self.modes = list(self.servers)
        budget = settings["num_speculative_tokens"]
        self.about = {
            "version": f"xllamacpp {import_module('importlib.metadata').version('xllamacpp')}",
            "context": str(CONTEXT),
            "lookup": "ngram_simple" + (f", size_m={budget}" if budget else ""),
        }
        if settings["draft_model"]:
            self.about["draft n_max"] = str(budget or "default")

    def _server(self, settings: "dict[str, Any]", kind: "str | None") -> Any:
        params = self.xllamacpp.CommonParams()
        params.model.path = settings["model"]
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
        params.n_ctx, params.n_parallel, params.verbosity = CONTEXT, 1, 1  # 1: errors only
        if cache := settings.get("cache_dtype"):
            kinds = self.xllamacpp.ggml_type
            params.cache_type_k = params.cache_type_v = getattr(kinds, f"GGML_TYPE_{_GGML[cache]}")
            if cache == "float32":  # flash attention would read it as float16
                params.flash_attn_type = self.xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        budget = settings["num_speculative_tokens"]
        if kind is not None:
            types = self.xllamacpp.common_speculative_type
            params.speculative.types = [getattr(types, f"COMMON_SPECULATIVE_TYPE_{kind}")]
        if kind and kind.startswith("DRAFT"):
            draft = params.speculative.draft
            draft.mparams.path = settings["draft_model"]
            draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = settings["threads"]
            if budget:
                draft.n_max = budget
        elif kind and budget:
            params.speculative.ngram_simple.size_m = budget
        return self.xllamacpp.Server(params)

    def run(self, mode: str, token_ids: "list[int]", max_tokens: int, temperature: float) -> "dict[str, Any]":
        """Answer one prompt, given as token ids; the times are the server's own."""
        return answer_of(self._asked(mode, body_of(token_ids, max_tokens, temperature)))

    def logprobs(self, token_ids: "list[int]") -> str:
        """Those of all tokens after the last of these, by id: float32 in base64.

        The server keeps back a token that ends within a letter, and what it knows of it, so the next one is bound to
        be a letter from a to z. That binds the choice alone: the probabilities come from the logits.
        """
        body = body_of(token_ids, 1, 0.0) | {"cache_prompt": True, "n_probs": _ALL, "grammar": _LETTERS}
        (known,) = self._asked("plain", body)["completion_probabilities"]
        found = array("f", [float("nan")]) * len(known["top_logprobs"])
        for one in known["top_logprobs"]:
            found[one["id"]] = one["logprob"]
        return base64.b64encode(found.tobytes()).decode()

    def _asked(self, mode: str, body: "dict[str, Any]") -> "dict[str, Any]":
        # The package's own call answers without token ids; the server behind it gives them.
        address = f"{self.servers[mode].listening_address}/completion"
        asked = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise RuntimeError(error.read().decode(errors="replace")) from error


def kind_of(path: str) -> str:
    """How a draft in a GGUF file is run, by its architecture, which is the first entry."""
    with Path(path).open("rb") as file:
        begin = file.read(256)
    heads = {b"eagle3": "DRAFT_EAGLE3", b"dflash": "DRAFT_DFLASH"}
    _, _, after = begin.partition(b"general.architecture")
    return next((kind for name, kind in heads.items() if after[12:].startswith(name)), "DRAFT_SIMPLE")


def body_of(token_ids: "list[int]", max_tokens: int, temperature: float) -> "dict[str, Any]":
    """The body for llama-server's /completion."""
    return {
        "prompt": token_ids,
        "n_predict": max_tokens,
        "temperature": temperature,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "cache_prompt": False,
        "return_tokens": True,
    }


def answer_of(reply: "dict[str, Any]") -> "dict[str, Any]":
    """The answer that /completion gave; the first token comes from the prompt's pass, where the clock starts."""
    times = reply["timings"]
    decoded = max(int(times["predicted_n"]) - 1, 0)
    return {
        "token_ids": reply.get("tokens") or None,
        "num_tokens": decoded,
        "text": reply["content"],
        "prefill_s": times["prompt_ms"] / 1000,
        "decode_s": times["predicted_ms"] / 1000,
        "num_passes": max(decoded - times.get("draft_n_accepted", 0), 0),
    }
