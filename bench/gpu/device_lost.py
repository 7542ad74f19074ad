"""The end of a process that has lost the device: another one goes on with the other rows of its part. Imports no torch."""

from __future__ import annotations

STATUS = 4
"""The exit status of such a process."""


class DeviceLost(SystemExit):
    """The device computes nothing for this process any more; the message says since which rows."""
