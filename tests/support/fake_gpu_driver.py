"""A stand-in for Triton's GPU driver on a machine without a GPU, which answers the queries of compilation and launches."""

from __future__ import annotations

from triton.backends.compiler import GPUTarget


class FakeGpuDriver:
    """Reports an H200, or a GPU of another `capability`. It answers queries and launches nothing."""

    capability = 90

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)
