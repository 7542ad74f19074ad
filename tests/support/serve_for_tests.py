"""Runs the appliance for tests in a process of its own and reports its address; or runs a command."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from appliance.app import Started, serve
from appliance.base.logging import configure_logging
from appliance.base.settings import Settings, load_settings
from appliance.cli import main as cli
from appliance.serving import model_builder
from appliance.serving.model_folder import ModelFolder


def run(connection: Connection, options: dict[str, Any], fake_engine_step_s: float | None, records: Path | None) -> None:
    """Serve until stopped. With `fake_engine_step_s`, a fake engine takes that long per token, and writes its own counts to the
    folder `records` if given."""

    def listening(started: Started) -> None:
        first = started.first_start
        connection.send(
            {
                "url": f"http://{started.host}:{started.port}",
                "api_key": first.api_key if first else None,
                "tenant_id": first.tenant_id if first else None,
            }
        )

    if fake_engine_step_s is not None:
        _use_fake_engine(fake_engine_step_s, records)
    settings = load_settings(options=options, environ={})
    configure_logging(settings.log_level, json=False)
    asyncio.run(serve(settings, on_listening=listening))


def _use_fake_engine(step_s: float, records: Path | None) -> None:
    extra_arguments = [] if records is None else ["--records", str(records)]
    module = "tests.support.fake_engine" if records is None else "tests.support.recording_engine"

    def engine_command(folder: ModelFolder, settings: Settings, fd: int, *, on_gpu: bool = False) -> list[str]:
        assert folder.path.is_dir()
        assert settings.models
        return [sys.executable, "-m", module, "--fd", str(fd), "--step-s", str(step_s), *extra_arguments]

    model_builder.engine_command = engine_command


def run_command(arguments: Sequence[str], environ: Mapping[str, str], stdout: Path, stderr: Path) -> int:
    """Run `gatehouse` with these arguments and variables, and its output in two files; return its exit status."""
    os.environ.update(environ)
    for path, descriptor in ((stdout, sys.stdout.fileno()), (stderr, sys.stderr.fileno())):
        with path.open("wb") as file:
            os.dup2(file.fileno(), descriptor)
    return cli.main(arguments)
