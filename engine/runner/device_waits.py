"""Waits of the thread that runs the steps for a GPU, and the limit for them: a kernel that never ends would keep it for ever.

CUDA's wait for an event has no limit and cannot be interrupted, and a loop that queries the event would hold Python's lock
(ADR 55). So the thread only counts its waits, and another one watches the count. That one calls nothing of the device.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from engine.runner.kernel_trials import DeviceHangs

POLL_S = 1.0
HANG_POLLS = 60
"""A minute: a step takes at most a second or so, several where other programs use the card, and the gateway kills an engine
that has sent nothing for two minutes. Polls are counted, so that time in which the process was suspended does not count."""


class DeviceWaits:
    """The waits of one thread."""

    def __init__(self) -> None:
        self._begun = self._ended = 0
        self._polled, self._num_polls = 0, 0  # the wait of the last poll, and how many polls found it under way

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Wait until the device has passed an event. Raises torch's errors of the device."""
        self._begun += 1
        try:
            event.synchronize()
        finally:
            self._ended = self._begun

    def poll(self) -> bool:
        """Whether the device hangs: the last HANG_POLLS calls and this one have found the same wait. Another thread calls this
        every POLL_S."""
        begun = self._begun
        self._num_polls = self._num_polls + 1 if self._ended < begun == self._polled else 0
        self._polled = begun
        return self._num_polls >= HANG_POLLS


STEP_WAITS = DeviceWaits()
"""Those of the process's only thread that runs steps. Waits of the plain runner, within operations of torch, are not among
them."""


def watch_steps(on_hang: Callable[[DeviceHangs], None]) -> None:
    """Watch `STEP_WAITS` until the process ends. `on_hang` is called once, in another thread, while the wait goes on."""
    threading.Thread(target=_watch, args=(on_hang,), name="device-waits", daemon=True).start()


def _watch(on_hang: Callable[[DeviceHangs], None]) -> None:
    while not STEP_WAITS.poll():
        time.sleep(POLL_S)
    on_hang(DeviceHangs(f"the GPU has not finished a step within {HANG_POLLS * POLL_S:.0f} s"))
