"""Runs the appliance as a process of its own for tests, and tells on standard output where it listens."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

from appliance.app import Started, serve
from appliance.base.logging import configure_logging
from appliance.base.settings import Settings, load_settings
from appliance.serving import fleet
from appliance.serving.model_folder import ModelFolder


def main() -> None:
    """Serve until told to stop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fake-engine-step-s", type=float, help="serve a stand-in engine that takes this long per token")
    parser.add_argument("--truths", type=Path, help="the stand-in engine writes into this folder what it counts itself")
    parser.add_argument("--options", type=json.loads, default={})
    arguments = parser.parse_args()
    if arguments.fake_engine_step_s is not None:
        _use_fake_engine(arguments.fake_engine_step_s, arguments.truths)
    settings = load_settings(options=arguments.options, environ={})
    configure_logging(settings.log_level, json=False)
    asyncio.run(serve(settings, on_listening=_tell))


def _tell(started: Started) -> None:
    first = started.first_start
    told = {
        "url": f"http://{started.host}:{started.port}",
        "api_key": first.api_key if first else None,
        "tenant_id": first.tenant_id if first else None,
    }
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


def _use_fake_engine(step_s: float, truths: Path | None) -> None:
    witness = [] if truths is None else ["--truths", str(truths)]
    module = "tests.support.fake_engine" if truths is None else "tests.crash.witness_engine"

    def command(folder: ModelFolder, settings: Settings, fd: int) -> list[str]:
        assert folder.path.is_dir()
        assert settings.models
        return [sys.executable, "-m", module, "--fd", str(fd), "--step-s", str(step_s), *witness]

    fleet.engine_command = command


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main()
