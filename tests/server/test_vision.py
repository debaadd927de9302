"""Images in requests: the answer is that of the library to the same images."""

import asyncio
import base64
import io
import threading
import time

import pytest

from paceline import LLM, SamplingParams
from paceline.hf import images
from tests.server.helpers import server
from tests.vision.families import make_image, seeing

CHAT = "/v1/chat/completions"


def as_uri(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def test_a_chat_with_images():
    llm = LLM(seeing(), max_num_seqs=2)
    images, text = [make_image(1), make_image(2)], {"type": "text", "text": "which?"}
    sent = [{"type": "image_url", "image_url": {"url": as_uri(image)}} for image in images]

    async def ask():
        async with server(llm) as client:
            body = {"model": "tiny", "max_tokens": 12, "temperature": 0}
            both = [{**body, "messages": [{"role": "user", "content": [*parts, text]}]} for parts in (sent, sent[::-1])]
            return [(await client.post(CHAT, json=one)).json() for one in both]

    answers = asyncio.run(ask())
    opened = [{"type": "image", "image": image} for image in images]
    for answer, parts in zip(answers, (opened, opened[::-1]), strict=True):
        wanted = llm.chat([{"role": "user", "content": [*parts, text]}], SamplingParams(max_tokens=12))[0]
        assert answer["choices"][0]["message"]["content"] == wanted.text
        assert answer["usage"]["prompt_tokens"] == len(wanted.prompt_token_ids)
    assert answers[0]["choices"] != answers[1]["choices"], "the pictures count"


@pytest.mark.parametrize(("path", "stream"), [(CHAT, False), (CHAT, True), ("/tokenize", False)])
def test_the_time_of_a_request_holds_while_its_images_are_read(path, stream, monkeypatch):
    """And what is left of them is not read any more."""
    decode, decoded, may_end = images._Unread.decode, [], threading.Event()

    def slow(image):
        decoded.append(image)
        may_end.wait(60)
        return decode(image)

    monkeypatch.setattr(images._Unread, "decode", slow)
    content = [{"type": "image_url", "image_url": {"url": as_uri(make_image(1))}}] * 3
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], **({"stream": True} if stream else {})}

    async def ask():
        async with server(LLM(seeing(), max_num_seqs=1), request_timeout_s=1.0) as client:
            begin = time.monotonic()
            answer = await client.post(path, json=body)
            seconds = time.monotonic() - begin
            may_end.set()
            while images._decoding._taken:
                await asyncio.sleep(0.01)
            return answer, seconds

    answer, seconds = asyncio.run(ask())
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
    assert seconds < 30
    assert len(decoded) == 1
