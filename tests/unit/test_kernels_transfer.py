"""Copies to the device: values, types, and writes to several tensors at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.device_words import DeviceWords
from kernels.transfer import send

CPU = torch.device("cpu")


@pytest.mark.parametrize("is_host", [True, False])
def test_one_write_changes_only_the_given_words_of_several_tensors(*, is_host: bool) -> None:
    pieces = {"longs": (torch.int64, (3,)), "floats": (torch.float32, (2, 3)), "ints": (torch.int32, (5,))}
    words = DeviceWords(pieces, CPU)
    longs, floats, ints = (words.tensor(name) for name in pieces)
    if not is_host:
        words.on_host = None  # as on a GPU
    assert all(each.data_ptr() % 16 == longs.data_ptr() % 16 for each in (floats, ints)), "where kernels take pointers to"
    places = [words.places("longs")[1], words.places("floats")[1, [0, 2]].reshape(-1), [words.first("ints") + 4]]
    values = [
        np.array([-(2**40)]).view(np.int32),
        np.array([0.5, -np.inf], np.float32).view(np.int32),
        np.array([-1], np.int32),
    ]
    words.write(np.concatenate(places), np.concatenate(values))
    assert longs.tolist() == [0, -(2**40), 0]
    assert floats.tolist() == [[0, 0, 0], [0.5, 0, -float("inf")]]
    assert ints.tolist() == [0, 0, 0, 0, -1]


def test_lists_are_sent_in_the_requested_dtype() -> None:
    assert send([[1, 2], [3, 4]], torch.int32, CPU).tolist() == [[1, 2], [3, 4]]
