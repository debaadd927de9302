"""Torch's threads between the passes of the native library."""

import pytest
import torch

from paceline.system.hardware import one_thread


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_few_numbers_are_left_to_the_calling_thread():
    with one_thread(torch.empty(8, 49_152)):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_many_numbers_keep_all_threads():
    with one_thread(torch.empty(64, 152_000)):
        assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_an_error_gives_the_threads_back():
    with pytest.raises(KeyError), one_thread(torch.empty(8)):
        raise KeyError
    assert torch.get_num_threads() == 2
