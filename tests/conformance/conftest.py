"""One appliance with a real engine and a small random model for all conformance tests, and the official client for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from tests.support.served_model import make_served_model
from tests.support.server import Server, running_server

MODEL = "tiny-llama"


@pytest.fixture(scope="session")
def served_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of random weights that can be served."""
    return make_served_model(tmp_path_factory.mktemp("models") / MODEL)


@pytest.fixture(scope="session")
def server(served_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A running appliance with a real engine."""
    with running_server(served_folder, tmp_path_factory.mktemp("data")) as running:
        yield running


@pytest.fixture
async def client(server: Server) -> AsyncIterator[AsyncOpenAI]:
    """The official client with the first key, without retries, so that a test sees the first response."""
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key=server.api_key, max_retries=0, timeout=60) as opened:
        yield opened
