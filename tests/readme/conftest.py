"""What the tests of the documentation share."""

import pytest

from paceline.target import LoadedModel, load_model

_READ: dict[str, LoadedModel] = {}


@pytest.fixture(autouse=True)
def read_once(monkeypatch):
    """Engines on one model share it, since reading and packing the default one takes seconds."""

    def load(*given):
        key = repr(given)
        if key not in _READ:
            _READ[key] = load_model(*given)
        return _READ[key]

    monkeypatch.setattr("paceline.target.open_model.load_model", load)
