"""Answers with transformers' generate: plain, prompt lookup, and assisted by a draft model."""

import time
from importlib import import_module
from typing import Any

LOOKUP_TOKENS = 10  # transformers has no default of its own; this is what its documentation shows


class _Clock:
    """A streamer that notes when tokens come out, and how many."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.prompt_seen = False
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, value: Any) -> None:
        if not self.prompt_seen:  # the first call holds the prompt
            self.prompt_seen = True
            return
        self.times.append(time.perf_counter())
        self.counts.append(value.numel())

    def end(self) -> None:
        pass


class Worker:
    """One target and at most one draft, loaded once for all modes."""

    def __init__(self, settings: "dict[str, Any]") -> None:
        self.torch = import_module("torch")
        transformers = import_module("transformers")
        self.torch.set_num_threads(settings["threads"])
        self.budget = settings["num_speculative_tokens"]
        dtype = getattr(self.torch, settings["dtype"])

        def load(path: str) -> Any:
            model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=False).eval()
            ends = model.generation_config.eos_token_id
            pad = ends[0] if isinstance(ends, list) else ends
            # A checkpoint may ship penalties and top-p; every system is asked for the same distribution.
            model.generation_config = transformers.GenerationConfig(eos_token_id=ends, pad_token_id=pad)
            return model

        self.model = load(settings["model"])
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(settings["model"], trust_remote_code=False)
        self.draft = load(settings["draft_model"]) if settings["draft_model"] else None
        if self.draft is not None and self.budget:
            self.draft.generation_config.num_assistant_tokens = self.budget
            self.draft.generation_config.num_assistant_tokens_schedule = "constant"
        self.modes = ["plain", "lookup"] + (["draft"] if self.draft is not None else [])
        self.about = {
            "version": transformers.__version__,
            "torch": self.torch.__version__,
            "attention": str(self.model.config._attn_implementation),
            "lookup": f"prompt_lookup_num_tokens={self.budget or LOOKUP_TOKENS}",
        }
        if self.draft is not None:
            self.about["draft"] = f"num_assistant_tokens={self.budget}, constant" if self.budget else "default schedule"

    def run(self, mode: str, token_ids: "list[int]", max_tokens: int, temperature: float) -> "dict[str, Any]":
        """Answer one prompt, given as token ids."""
        prompt = self.torch.tensor([token_ids])
        options: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            options = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        if mode == "lookup":
            options["prompt_lookup_num_tokens"] = self.budget or LOOKUP_TOKENS
        elif mode == "draft":
            options["assistant_model"] = self.draft
        clock = _Clock()
        with self.torch.inference_mode():
            output = self.model.generate(
                prompt,
                attention_mask=self.torch.ones_like(prompt),
                max_new_tokens=max_tokens,
                streamer=clock,
                **options,
            )
        total = time.perf_counter() - clock.start
        ids = output[0, prompt.shape[1] :].tolist()
        prefill = clock.times[0] - clock.start
        return {
            "token_ids": ids,
            "num_tokens": len(ids) - clock.counts[0],
            "text": self.tokenizer.decode(ids, skip_special_tokens=True),
            "prefill_s": prefill,
            "decode_s": total - prefill,
            "num_passes": len(clock.counts) - 1,
        }
