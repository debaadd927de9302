"""Plain transformers beside our plain decoding: the greedy `generate` of the checkpoint as transformers loads it."""

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import torch
from transformers import AutoModelForImageTextToText

from paceline import LLM, SamplingParams
from paceline.errors import ConfigError
from paceline.eval.check import Verdict, first_difference
from paceline.hf.chats import split_chat
from paceline.zoo import resolve

ROUNDING = {torch.float32: 1e-4}
"""Of the largest logit: how far apart two tokens may be for rounding to have chosen between them. Kernels differ, so
this is a bound by experience and not a measured one; other dtypes get `COARSE`."""
COARSE = 0.03


class Reference:
    """The model in plain transformers, in the dtype of an engine; it takes as much memory again."""

    def __init__(self, model: str, llm: LLM):
        if llm.loaded.vision is None or llm.loaded.vision.processor is None:
            raise ConfigError("the model has no processor to feed plain transformers with")
        self._processor, self._llm = llm.loaded.vision.processor, llm
        self._model = AutoModelForImageTextToText.from_pretrained(resolve(model), dtype=llm.loaded.dtype).eval()

    @torch.inference_mode()
    def compare(self, chat: Seq[Mapping[str, object]], params: SamplingParams, plain: list[int]) -> dict[str, Any]:
        """Verdict on our plain answer; gap: of the two rival tokens in the logits of plain transformers."""
        messages, images = split_chat(chat)
        text = self._processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        inputs = self._processor(text=[text], images=images, return_tensors="pt")
        count = inputs["input_ids"].shape[1]
        out = self._model.generate(
            **inputs, max_new_tokens=params.max_tokens, do_sample=False, pad_token_id=0, return_dict_in_generate=True,
            output_logits=True, eos_token_id=sorted(self._llm.loaded.eos_ids) or None,
        )  # fmt: skip
        theirs = out.sequences[0, count:].tolist()
        told: dict[str, Any] = {"num_tokens": len(plain), "verdict": Verdict.IDENTICAL.value, "gap": None}
        told["same_prompt"] = inputs["input_ids"][0].tolist() == self._llm.encode(chat)
        found = first_difference(theirs, plain)
        if found is None and told["same_prompt"]:
            return told
        gap, bound = math.inf, 0.0
        if found is not None and found.plain_token is not None and found.speculative_token is not None:
            logits = out.logits[found.position][0].double()
            gap = float(logits[found.plain_token] - logits[found.speculative_token])
            bound = ROUNDING.get(self._llm.loaded.dtype, COARSE) * float(logits.abs().max())
        near = told["same_prompt"] and gap <= bound
        told["verdict"] = (Verdict.NEAR_TIE if near else Verdict.BUG).value
        told["gap"] = gap if math.isfinite(gap) else None
        return {**told, "position": None if found is None else found.position}
