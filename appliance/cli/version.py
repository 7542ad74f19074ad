"""`gatehouse version`."""

from __future__ import annotations

import platform
import sys

from appliance.base.version import current_version
from appliance.cli.options import AsJson


def version(as_json: AsJson = False) -> None:
    """Print the version."""
    if as_json:
        from appliance.cli import output

        output.data({"version": current_version(), "python": platform.python_version(), "machine": platform.machine()})
    else:
        sys.stdout.write(f"gatehouse {current_version()}\n")
