"""What Triton's compiler and its launches ask of a card that is not there."""

from __future__ import annotations

from triton.backends.compiler import GPUTarget


class FakeGpuDriver:
    """An H200, unless another capability is said, that is asked what it is, and nothing else."""

    capability = 90

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)
