"""A prompt that begins with the text of the BOS token gets no second one, whichever way it takes."""

import asyncio
import copy
import logging

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from paceline import LLM
from paceline.hf.image_prompts import _tell, read_chat
from paceline.measure.prompts import PromptLine
from paceline.target import make_runner, wrap_model
from paceline.target.prompts import TemplatedChat
from paceline.train.prepare import encode_line
from tests.methods.tokenizers_made import byte_level, sentencepiece
from tests.server.helpers import server
from tests.tiny import tiny_model
from tests.vision.families import make, make_image

TEXT = "<s>The town lies"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture
def told(caplog):
    """What the log says, once for a process."""
    _tell.cache_clear()
    caplog.set_level(logging.WARNING, "paceline")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "paceline"]


def llm_of(tokenizer) -> LLM:
    return LLM(wrap_model(tiny_model("llama", vocab_size=len(tokenizer)), tokenizer))


def ways(llm: LLM) -> dict[str, list[int]]:
    """The token ids of a text on every way from text to token ids."""

    async def served():
        async with server(llm) as client:
            tokens = (await client.post("/tokenize", json={"prompt": TEXT})).json()["tokens"]
            body = {"model": "tiny", "prompt": TEXT, "max_tokens": 1}
            used = (await client.post("/v1/completions", json=body)).json()["usage"]["prompt_tokens"]
        assert used == len(tokens)
        return tokens

    chat = [{"role": "user", "content": TEXT.removeprefix("<s>")}]
    trained = encode_line(make_runner(llm.loaded, 1, None, None), PromptLine("", 1, {}, (TEXT,), is_bare=True))
    assert trained is not None
    return {
        "generate": llm.generate(TEXT)[0].prompt_token_ids,
        "vLLM's": llm.encode({"prompt": TEXT}),
        "a chat": llm.encode(TemplatedChat(chat, {"chat_template": "<s>" + TEMPLATE})),
        "a chat without": llm.encode(TemplatedChat([{**chat[0], "content": TEXT}], {"chat_template": TEMPLATE})),
        "training": trained.token_ids,
        "the server": asyncio.run(served()),
    }


def test_no_second_one(told):
    own = sentencepiece()
    expected = own.encode(TEXT, add_special_tokens=False)
    assert expected.count(own.bos_token_id) == 1
    assert own.encode(TEXT) == [own.bos_token_id, *expected], "the tokenizer alone puts a second one"
    llm = llm_of(own)
    assert ways(llm) == dict.fromkeys(ways(llm), expected)
    (line,) = told()
    assert "<s>" in line
    assert llm.encode("The town")[0] == own.bos_token_id
    assert llm.encode("<s><s>a")[:3].count(own.bos_token_id) == 2  # as written


def test_a_tokenizer_that_adds_none(told):
    own = PreTrainedTokenizerFast(tokenizer_object=byte_level().backend_tokenizer, bos_token="<image>")
    for text in ("<image>The town", "<image><image>", "The town"):
        assert llm_of(own).encode(text) == own.encode(text, add_special_tokens=False)
    assert not told()


@pytest.mark.parametrize("images", [[], [make_image(1)]], ids=["text", "image"])
@pytest.mark.parametrize("name", ["gemma3", "paligemma"])
def test_chats_with_images(name, images, told):
    """Gemma's template writes the token, PaliGemma's processor puts it between images and text."""
    model, processor = make(name)
    processor, content = copy.deepcopy(processor), "abc"
    own = processor.tokenizer
    if name == "gemma3":
        processor.chat_template = "<s>" + processor.chat_template
        begun = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", own.bos_token_id)])
        own.backend_tokenizer.post_processor = begun
    else:
        processor.chat_template, content = None, "<s>abc"
    vision = wrap_model(model, processor=processor).vision
    assert vision is not None
    parts = [*({"type": "image"} for _ in images), {"type": "text", "text": content}]
    ids, _ = read_chat(vision, [{"role": "user", "content": parts}], images)
    assert ids.count(own.bos_token_id) == 1
    assert len(told()) == (name == "paligemma" and bool(images))
