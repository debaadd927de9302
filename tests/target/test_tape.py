"""The stand-in for CUDA graphs: it repeats operations at their addresses, and tells which wait for the device."""

import torch

from tests.target.tape import Tape, recorded


def test_what_is_recorded_is_repeated_with_what_its_inputs_hold_now():
    tapes: list[Tape] = []
    x, work = torch.arange(4.0), []
    replay = recorded(tapes)(lambda: work.append(1) or x * 2 + len(work), x.device)
    x.fill_(7)
    assert replay().tolist() == [15.0] * 4  # numbers of Python stay what they were
    assert replay() is replay()
    assert len(tapes) == len(work) == 1


def test_a_tape_notices_what_waits_for_the_device():
    x = torch.arange(4.0)
    for work in (x.max().item, lambda: x[x > 1], lambda: bool((x > 1).any()), x.nonzero):
        with Tape() as tape:
            work()
        assert tape.waits
    with Tape() as tape:
        _ = x[torch.tensor([1, 2])] * 2
    assert not tape.waits
