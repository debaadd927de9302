"""Answers with vLLM's offline engine on the CPU: plain, n-gram lookup, or a draft model; one engine a process."""

import os
import time
from importlib import import_module
from typing import Any

CONTEXT, CACHE_GIB = 4096, 2
LOOKUP_TOKENS, NGRAM = 4, (2, 4)
DRAFT_TOKENS = 3


class Worker:
    """The engine of one mode, stepped by hand so that every pass can be timed."""

    def __init__(self, settings: "dict[str, Any]") -> None:
        # One process: on a few cores the usual three would compete with each other.
        os.environ.update(
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_CPU_KVCACHE_SPACE=str(CACHE_GIB),
            VLLM_CPU_OMP_THREADS_BIND="nobind",
            VLLM_NO_USAGE_STATS="1",
            # The n-gram search is compiled by numba, whose OpenMP threads otherwise wait for torch's at every step.
            NUMBA_THREADING_LAYER="workqueue",
            NUMBA_NUM_THREADS=str(settings["threads"]),
        )
        vllm = import_module("vllm")
        budget = settings["num_speculative_tokens"]
        speculation = {
            "plain": None,
            "lookup": {
                "method": "ngram",
                "num_speculative_tokens": budget or LOOKUP_TOKENS,
                "prompt_lookup_min": NGRAM[0],
                "prompt_lookup_max": NGRAM[1],
            },
            "draft": {
                "method": "draft_model",
                "model": settings["draft_model"],
                "num_speculative_tokens": budget or DRAFT_TOKENS,
            },
        }
        self.modes = ["plain", "lookup"] + (["draft"] if settings["draft_model"] else [])
        self.sampling = vllm.SamplingParams
        self.engine = vllm.LLM(
            settings["model"],
            dtype=settings["dtype"],
            enforce_eager=True,
            enable_prefix_caching=False,
            max_model_len=CONTEXT,
            max_num_seqs=1,
            distributed_executor_backend="uni",
            speculative_config=speculation[settings["mode"]],
        ).llm_engine
        self.about = {"version": str(vllm.__version__), "context": str(CONTEXT), "eager": "True"}
        for mode in self.modes[1:]:
            self.about[mode] = ", ".join(f"{key}={value}" for key, value in (speculation[mode] or {}).items())
        self.asked = 0

    def run(self, mode: str, token_ids: "list[int]", max_tokens: int, temperature: float) -> "dict[str, Any]":
        """Answer one prompt, given as token ids."""
        if temperature > 0 and mode != "plain" and self.about["version"].startswith("0.32."):
            raise RuntimeError(
                "vLLM 0.32 answers with noise when it samples and speculates on a CPU (its issue 55005); "
                "ask for temperature 0, or leave this mode out"
            )
        self.asked += 1
        params = self.sampling(temperature=temperature, max_tokens=max_tokens)
        start, arrivals, final = time.perf_counter(), [], None
        self.engine.add_request(str(self.asked), {"prompt_token_ids": token_ids}, params)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                final = output.outputs[0]
                arrivals.append((time.perf_counter(), len(final.token_ids)))
        if final is None:
            raise RuntimeError("the engine finished without an answer")
        first, last = arrivals[0], arrivals[-1]
        return {
            "token_ids": list(final.token_ids),
            "num_tokens": last[1] - first[1],
            "text": final.text,
            "prefill_s": first[0] - start,
            "decode_s": last[0] - first[0],
            "num_passes": len(arrivals) - 1,
        }
