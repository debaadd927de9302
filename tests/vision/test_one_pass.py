"""Of a prompt with images, the text behind the last one is read in the pass that verifies the first draft."""

import pytest

from paceline import LLM, SamplingParams
from paceline.core.interfaces import DrafterInfo
from paceline.policy import Fixed
from paceline.target import LoadedModel
from tests.adversaries import Scripted
from tests.vision.families import make_image, plain_answer, seeing, user

PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)


class Unread(Scripted):
    """Right by decree, before the target has read the text."""

    info = DrafterInfo(drafts_during_prefill=True)


@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "qwen3_vl", "smolvlm", "gemma3", "paligemma"])
def test_one_pass_behind_the_images(name, monkeypatch):
    llm = LLM(seeing(name), numerics="fast", max_num_seqs=1)
    # a random model may well say a placeholder, which nobody could draft
    asked = ([user(make_image(index, 40, 24), "what is it")] for index in range(1, 20))
    chat, answer = next(
        (chat, said) for chat in asked if not llm.runner.banned_token_ids & set(said := plain_answer(name, chat, 4))
    )
    ids = llm.encode(chat)
    llm = llm.using(drafter=Unread({tuple(ids): [*ids, *answer]}, [None]), policy=Fixed(3))
    seen, real = list[str](), LoadedModel.forward

    def forward(self, token_ids, layout, *others):
        seen.append("picture" if layout.tree is None else "text and draft")
        return real(self, token_ids, layout, *others)

    monkeypatch.setattr(LoadedModel, "forward", forward)
    first = llm.generate(chat, PARAMS)[0].outputs[0]
    assert first.token_ids == answer
    assert seen == ["picture", "text and draft"]
    seen.clear()
    again = llm.generate(chat, PARAMS)[0].outputs[0]
    assert again.token_ids == answer
    assert seen == ["text and draft"]  # the image's columns are kept
    assert first.rounds[0].with_prompt == (name != "paligemma")  # its whole prompt is one block
