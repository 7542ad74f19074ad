"""Decoding 8-bit floats on a CPU: the same values as torch's own conversion."""

from __future__ import annotations

import pytest
import torch

from kernels.torch.fp8_decode import decode_fp8, decode_kv


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_e4m3_value_is_decoded_as_by_torch(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = codes[~codes.float().isnan()]
    torch.testing.assert_close(decode_fp8(codes, dtype), codes.to(dtype), rtol=0, atol=0)


def test_keys_and_values_have_scales_of_their_own() -> None:
    slots = torch.randn(3, 2, 4, 8).to(torch.float8_e4m3fn)
    decoded = decode_kv(slots, torch.float32, torch.tensor([2.0, 0.5]))
    torch.testing.assert_close(decoded[:, 0], slots[:, 0].float() * 2.0, rtol=0, atol=0)
    torch.testing.assert_close(decoded[:, 1], slots[:, 1].float() * 0.5, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_scales_are_not_rounded_before_the_product(dtype: torch.dtype) -> None:
    slots, scales = torch.randn(3, 2, 4, 8).to(torch.float8_e4m3fn), torch.tensor([0.0123, 0.3333])
    expected = (slots.float() * scales[:, None, None]).to(dtype)
    torch.testing.assert_close(decode_kv(slots, dtype, scales), expected, rtol=0, atol=0)
