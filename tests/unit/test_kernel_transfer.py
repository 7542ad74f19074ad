"""What goes to the device: values, types and places of arrays that travel together."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kernels.transfer import ALIGNED_BYTES, send, send_together

CPU = torch.device("cpu")


def test_arrays_that_travel_together_keep_values_types_and_shapes() -> None:
    arrays: list[np.ndarray[Any, Any]] = [
        np.array([7], np.int64),
        np.arange(21, dtype=np.float32).reshape(7, 3),
        np.array([[2**31 - 1], [-(2**31)]], np.int32),
        np.array([[-(2**63)], [2**63 - 1]], np.int64),
        np.arange(12, dtype=np.int32).reshape(3, 4).T,  # not one piece of memory
    ]
    sent = send_together(arrays, CPU)
    for array, tensor in zip(arrays, sent, strict=True):
        assert torch.equal(tensor, torch.from_numpy(np.ascontiguousarray(array)))
        assert tensor.dtype == torch.from_numpy(array).dtype
        assert tensor.data_ptr() % ALIGNED_BYTES == sent[0].data_ptr() % ALIGNED_BYTES
    assert len({tensor.untyped_storage().data_ptr() for tensor in sent}) == 1, "one copy"


def test_lists_are_sent_as_the_type_that_is_asked_for() -> None:
    assert send([[1, 2], [3, 4]], torch.int32, CPU).tolist() == [[1, 2], [3, 4]]
