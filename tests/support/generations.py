"""The gateway's serving layer over a fake engine in the same process, for tests of generations without HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.base.clock import Clock
from appliance.base.db import Database
from appliance.base.errors import EngineUnavailable
from appliance.base.ids import new_id
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger.records import UsageEvent
from appliance.metering.ledger.writer import Ledger
from appliance.metering.limits.admission import Admission
from appliance.metering.usage import UsageReports
from appliance.serving.engine_client import EngineClient
from appliance.serving.engine_stats import EngineStats
from appliance.serving.event_route import EventReceiver
from appliance.serving.generation import Generation
from appliance.serving.generations import Generations
from appliance.serving.model_registry import ServedModel
from appliance.serving.prepared_requests import PreparedRequest
from appliance.serving.request_limits import RequestLimits
from appliance.serving.tokenizer import ModelTokenizer
from appliance.telemetry.metrics import Metrics
from appliance.tenancy.model_policies import ModelPolicies
from appliance.tenancy.tiers import Tiers
from engine.protocol import EngineInfo, GenerationRequest, SamplingParams
from tests.support.cast import OWNER, Person
from tests.support.fake_engine import FakeEngine, connected_pair
from tests.support.ledgers import euro_prices, utc_admission, utc_ledger, utc_sums
from tests.support.served_model import make_hollow_model

MODEL = "tiny"
ADDRESS = "192.0.2.7"
"""The address from which `Serving.start` sends requests."""


class InProcessEngine:
    """The supervisor interface that a generation uses, over a fake engine in this process."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self.stats = EngineStats()
        self.unavailable: str | None = None

    @property
    def info(self) -> EngineInfo | None:
        """Return the facts of the model."""
        return self._client.info

    def check_ready(self) -> None:
        """Raise `EngineUnavailable` if the test has set `unavailable`."""
        if self.unavailable is not None:
            raise EngineUnavailable(self.unavailable)

    def submit(self, request: GenerationRequest, receiver: EventReceiver) -> None:
        """Send `request` to the engine."""
        self._client.submit(request, receiver)

    def abort(self, request_id: str) -> None:
        """End a request."""
        self._client.abort(request_id)

    def abort_answer(self, request_id: str, index: int) -> None:
        """End one answer of a request."""
        self._client.abort_answer(request_id, index)


@dataclass(slots=True, kw_only=True)
class Serving:
    """Everything between admission and ledger, over one model."""

    generations: Generations
    model: ServedModel
    engine: FakeEngine
    engine_task: asyncio.Task[None]
    client: InProcessEngine
    admission: Admission
    ledger: Ledger
    reports: UsageReports
    metrics: Metrics

    async def start(self, person: Person, prompt: list[int] | str, **sampling: Any) -> Generation:
        """Start a generation for `person`; the fake engine repeats a prompt given as text. `max_output_tokens`: the requested
        maximum, None for none, where it is not `max_tokens`."""
        ids = self.ids(prompt) if isinstance(prompt, str) else prompt
        field_names, batch = sampling.pop("field_names", {}), sampling.pop("batch", False)
        max_output_tokens = sampling.pop("max_output_tokens", sampling.get("max_tokens", len(ids)))
        options = {"max_tokens": len(ids), "seed": 1, **sampling}
        return await self.generations.start(
            PreparedRequest(
                request_id=new_id("req"),
                principal=person.principal,
                address=ADDRESS,
                model=self.model,
                endpoint="/v1/chat/completions",
                stream=True,
                prompt_token_ids=ids,
                sampling=SamplingParams(**options),
                max_output_tokens=max_output_tokens,
                field_names=field_names,
                batch=batch,
            )
        )

    def ids(self, text: str) -> list[int]:
        """Return the tokens of `text`."""
        return list(self.model.tokenizer._tokenizer.encode(text, add_special_tokens=False).ids)

    def text(self, ids: list[int]) -> str:
        """Return the text of `ids`."""
        return str(self.model.tokenizer._tokenizer.decode(ids))

    async def event(self, generation: Generation) -> UsageEvent:
        """Return the ledger's event of a generation."""
        return await self.reports.event(generation.request_id, access=OWNER)


async def text_of(generation: Generation) -> str:
    """Return the whole text of a generation."""
    text = ""
    while not generation.chunks.ended:
        text += "".join(chunk.text for chunk in await generation.chunks.take(10.0))
    return text


LIMITS = RequestLimits(
    buffer_chunks=64,
    max_waiting_requests=8,
    queue_deadline_s=None,
    deadline_s=3600.0,
    refuse_unpriced=False,
)


@asynccontextmanager
async def open_watching_serving(database: Database, clock: Clock, folder: Path, epoch_id: str) -> AsyncIterator[Serving]:
    """As `open_serving`, with the tasks that end requests whose key or tenant loses its access."""
    async with open_serving(database, clock, folder, epoch_id) as serving:
        serving.generations.start_watching()
        yield serving
        await serving.generations.stop(5.0)


@asynccontextmanager
async def open_serving(
    database: Database, clock: Clock, folder: Path, epoch_id: str, *, seats: int = 8, **options: Any
) -> AsyncIterator[Serving]:
    """Yield a serving layer whose engine runs `seats` requests at a time; at the end, everything must have settled."""
    ours, theirs = await connected_pair()
    metrics, ledger = Metrics(), utc_ledger(database, clock, epoch_id)
    admission = utc_admission(clock, utc_sums(database))
    generations = Generations(
        database,
        clock,
        metrics,
        dataclasses.replace(LIMITS, **options),
        admission=admission,
        tiers=Tiers(database, clock),
        policies=ModelPolicies(database, clock),
        ledger=ledger,
        prices=euro_prices(database, clock),
    )
    client = EngineClient(ours, on_frame=generations.note_frame)
    engine = FakeEngine(*theirs, seats=seats)
    engine_client = InProcessEngine(client)
    model = ServedModel(
        name=MODEL,
        path=folder,
        engine=engine_client,  # type: ignore[arg-type]  # all that a generation uses of a supervisor
        tokenizer=ModelTokenizer.load(make_hollow_model(folder)),
        context_len=1024,
        sampling_defaults={},
        default_max_tokens=None,
        created=clock.now(),
    )
    await ledger.start()
    engine_task = asyncio.create_task(engine.run())
    client_task = asyncio.create_task(client.run())
    try:
        async with asyncio.timeout(60):
            yield Serving(
                generations=generations,
                model=model,
                engine=engine,
                engine_task=engine_task,
                client=engine_client,
                admission=admission,
                ledger=ledger,
                reports=UsageReports(database, calendar=BillingCalendar()),
                metrics=metrics,
            )
    finally:
        assert await generations.drain(5.0), "a generation was left unsettled"
        engine_task.cancel()
        await asyncio.wait({engine_task, client_task})
        await ledger.stop()
