"""A saved tiny model that chats, engines on it, and questions."""

import pytest

from paceline import LLM, Fixed, PromptLookup
from paceline.measure.run import PLAIN, BenchOptions, BenchRun, EngineSide
from paceline.measure.suites import Question
from tests.cli.helpers import save
from tests.tiny import tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    return save(tmp_path_factory.mktemp("bench"), tiny_model("llama", max_position_embeddings=512))


@pytest.fixture
def engine(model):
    def build(verifier=None, batch=1, **options):
        return LLM(model, drafter=PromptLookup(), policy=Fixed(4), verifier=verifier, max_num_seqs=batch, **options)

    return build


@pytest.fixture
def measure():
    def run(llm, questions, more=(), **options):
        how = BenchOptions(**{"max_tokens": 12, **options})
        made = BenchRun(EngineSide(PLAIN, llm.plain()), [EngineSide("lookup", llm), *more], how)
        made.measure(questions)
        return made

    return run


@pytest.fixture
def questions() -> list[Question]:
    turns = [("a", "w5 w9 w5 w9"), ("b", "w8 w8 w8"), ("a", "w31 w7 w31"), ("b", "w64 w22 w64 w22")]
    return [Question(str(i), category, (text,)) for i, (category, text) in enumerate(turns)]
