"""Images are read beside all else: texts do not wait for them, and nothing is read for those who have gone."""

import asyncio
import threading

import pytest

from paceline import LLM, SamplingParams
from paceline.hf import image_prompts, images
from tests.async_llm.common import answer, facts, idle, serve
from tests.vision.families import make_image, seeing, user

SHORT = SamplingParams(max_tokens=6, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=6, ignore_eos=True, temperature=1.0)
CHAT, TEXT = [user(make_image(1), "what?")], [user("what?")]


class Halt:
    """Stops the reading of images at one place."""

    def __init__(self):
        self.is_there, self.may_go_on, self.count = threading.Event(), threading.Event(), 0

    def at(self, real):
        def halted(*args, **options):
            self.count += 1
            self.is_there.set()
            assert self.may_go_on.wait(30)
            return real(*args, **options)

        return halted


@pytest.fixture(params=["decoding", "processing"])
def halt(request, monkeypatch):
    made = Halt()
    monkeypatch.setattr(images, "_decoding", images._Room(1))  # which these images fill
    where = {"decoding": (images, "_rgb"), "processing": (image_prompts, "prompt_of")}[request.param]
    monkeypatch.setattr(*where, made.at(getattr(*where)))
    return made


async def reached(halt):
    while not halt.is_there.is_set():
        await asyncio.sleep(0.005)


def test_texts_do_not_wait_for_images(halt):
    """Their answers are those of the order of arrival, seeds included."""

    async def main(engine):
        waits = asyncio.create_task(answer(engine, CHAT, DRAWN))
        await reached(halt)
        async with asyncio.timeout(10):
            text = await answer(engine, TEXT, DRAWN)
            assert await engine.encode(TEXT) == text.prompt_token_ids
        assert not waits.done()
        halt.may_go_on.set()
        return [facts(await waits), facts(text)]

    try:
        got = serve(LLM(seeing(), max_num_seqs=2, seed=3), main)
    finally:
        halt.may_go_on.set()
    one_by_one = LLM(seeing(), max_num_seqs=2, seed=3).generate([CHAT, TEXT], DRAWN)
    assert got == [facts(one) for one in one_by_one]


def test_images_of_those_who_have_gone_are_not_read(monkeypatch):
    halt, chat = Halt(), [user(*map(make_image, range(4)), "what?")]
    monkeypatch.setattr(images, "_rgb", halt.at(images._rgb))

    async def main(engine):
        for work in (answer(engine, chat, SHORT), engine.encode(chat)):
            halt.is_there.clear()
            halt.may_go_on.clear()
            halt.count = 0
            waits = asyncio.create_task(work)
            await reached(halt)
            waits.cancel()
            await asyncio.wait([waits], timeout=5)  # before that nobody knows that it has gone
            await idle(engine)
            halt.may_go_on.set()
            while images._decoding._taken:
                await asyncio.sleep(0.005)
            assert halt.count == 1
        assert facts(await answer(engine, CHAT, SHORT)) == facts(engine.llm.generate([CHAT], SHORT)[0])

    serve(LLM(seeing(), max_num_seqs=1), main)


def test_one_image_is_encoded_between_two_rounds_of_others(monkeypatch):
    llm, events = LLM(seeing(), max_num_seqs=2), []
    encode, step = llm.runner.images.encode, llm.decoder.step

    def encoding(vision, given):
        events.append(("image", len(given)))
        return encode(vision, given)

    def stepped(seqs):
        events.append(("round", len(seqs)))
        return step(seqs)

    monkeypatch.setattr(llm.runner.images, "encode", encoding)
    monkeypatch.setattr(llm.decoder, "step", stepped)
    chat = [user(*map(make_image, range(3)), "what?")]

    async def main(engine):
        outputs = engine.generate(TEXT, SamplingParams(max_tokens=200, ignore_eos=True))
        await anext(outputs)
        got = facts(await answer(engine, chat, SHORT))
        await outputs.aclose()
        return got

    got = serve(llm, main)
    first, last = events.index(("image", 1)), len(events) - events[::-1].index(("image", 1))
    assert events[first:last] == [("image", 1), ("round", 1), ("image", 1), ("round", 1), ("image", 1)]
    assert got == facts(llm.plain().generate([chat], SHORT)[0])
