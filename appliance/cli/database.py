"""`gatehouse db`: migrate the schema, check the invariants of the ledger, and rebuild usage sums."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from appliance.base.texts import counted
from appliance.cli import output
from appliance.cli.connection import check_has_tables, hold_claim, open_database, read_control
from appliance.cli.failure import CommandFailed, WrongUsage
from appliance.cli.options import DEFAULTS, CommonOptions

if TYPE_CHECKING:
    from appliance.base.settings import Settings
    from appliance.metering.invariants.finding import Finding

T = TypeVar("T")

app = typer.Typer(help="Migrate the database, and check the ledger's invariants.", no_args_is_help=True)


@app.command("upgrade")
def upgrade(
    revision: Annotated[str, typer.Argument(metavar="REVISION", help="A revision; `head` is the newest.")] = "head",
    options: CommonOptions = DEFAULTS,
) -> None:
    """Upgrade the schema to a revision. The appliance does this itself at startup."""
    from appliance.base import migrations

    settings = options.settings()
    _refuse_while_running(settings)
    settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    _migrate(settings, lambda: migrations.upgrade(settings.database_url, revision))
    _print_revision(settings, as_json=options.as_json)


@app.command("downgrade")
def downgrade(
    revision: Annotated[str, typer.Argument(metavar="REVISION", help="The revision to go back to; `base` removes all tables.")],
    yes: Annotated[
        bool, typer.Option("--yes", help="Confirm that you have a backup: data that only newer tables hold is lost.")
    ] = False,
    options: CommonOptions = DEFAULTS,
) -> None:
    """Downgrade the schema to a revision. Data that only newer tables hold is lost, so --yes is required.

    Refused while the journal of a killed appliance has records that are not in the tables yet: the older version might not be
    able to read them.
    """
    from appliance.base import migrations

    settings = options.settings()
    _refuse_while_running(settings)
    if not yes:
        raise WrongUsage("a downgrade loses data that only newer tables hold: make a backup, then add --yes")

    def step() -> None:
        _refuse_while_journal_is_ahead(settings.database_url)
        migrations.downgrade(settings.database_url, revision)

    _migrate(settings, step)
    _print_revision(settings, as_json=options.as_json)


@app.command("check")
def check(options: CommonOptions = DEFAULTS) -> None:
    """Check the ledger's invariants. The appliance may be running. Exit status 1 if one is violated."""
    from appliance.metering.invariants.check import check_ledger

    settings = options.settings()
    check_has_tables(settings)
    running = read_control(settings.data_dir) is not None
    with output.progress("Checking the ledger", quiet=options.as_json) as progress:
        findings = asyncio.run(
            check_ledger(
                settings.database_url,
                running=running,
                time_zone=settings.time_zone,
                data_dir=settings.data_dir,
                on_progress=progress,
            )
        )
    broken = [finding for finding in findings if finding.state == "broken"]
    _print_findings(findings, as_json=options.as_json)
    if broken:
        raise typer.Exit(1)


@app.command("rebuild-rollups")
def rebuild_rollups(options: CommonOptions = DEFAULTS) -> None:
    """Rebuild the usage sums from the usage events. Computes the sums by minute, hour and day again."""
    from appliance.metering.calendar import BillingCalendar
    from appliance.metering.ledger import rollups

    settings = options.settings()
    _refuse_while_running(settings)
    check_has_tables(settings)

    async def rebuild() -> int:
        async with open_database(settings) as database:
            return await rollups.rebuild(database, BillingCalendar(settings.time_zone))

    rows = _run_exclusively(settings, lambda: asyncio.run(rebuild()))
    if options.as_json:
        output.data({"rows": rows})
    else:
        output.say(f"Rebuilt the usage sums: {counted(rows, 'row')}.")


def _print_findings(findings: list[Finding], *, as_json: bool) -> None:
    rows = [{"check": f.name, "state": f.state, "found": f.text} for f in findings]
    if as_json:
        output.data({"data": rows, "ok": all(f.state != "broken" for f in findings)})
    else:
        output.table(rows, ("check", "state", "found"), empty="")


def _refuse_while_running(settings: Settings) -> None:
    control = read_control(settings.data_dir)
    if control is not None:
        raise CommandFailed(f"the appliance is running at {control.url} (pid {control.pid}): stop it first", code="running")


def _refuse_while_journal_is_ahead(database_url: str) -> None:
    from appliance.base.db import Database
    from appliance.base.migrations import current_revision
    from appliance.metering.ledger.journal_records import count_unwritten_requests

    async def count() -> int:
        async with Database.open(database_url) as db, db.reading() as connection:
            return await count_unwritten_requests(connection, database_url)

    ahead = asyncio.run(count()) if current_revision(database_url) is not None else 0
    if ahead:
        raise CommandFailed(
            f"the journal of a killed appliance has records of {counted(ahead, 'request')} that are not in the tables yet, and "
            "an older version would bill them wrongly: start this version once (gatehouse serve), stop it, then downgrade",
            code="journal",
        )


def _run_exclusively(settings: Settings, step: Callable[[], T]) -> T:
    """Run `step` in a thread under an exclusive database claim and return its result."""

    async def claim_and_run() -> T:
        async with hold_claim(settings, shared=False):
            return await asyncio.to_thread(step)

    return asyncio.run(claim_and_run())


def _migrate(settings: Settings, step: Callable[[], None]) -> None:
    from alembic.util import CommandError
    from sqlalchemy.exc import SQLAlchemyError

    from appliance.base.db import reason_of
    from appliance.base.settings import UnusableData

    try:
        _run_exclusively(settings, step)
    except (CommandError, SQLAlchemyError, UnusableData, ValueError, OSError) as error:
        raise CommandFailed(f"the migration failed: {reason_of(error)}", code="database") from error


def _print_revision(settings: Settings, *, as_json: bool) -> None:
    from appliance.base import migrations

    current, head = migrations.current_revision(settings.database_url), migrations.head_revision()
    if as_json:
        output.data({"revision": current, "head": head})
    else:
        output.say(f"The schema is at revision {current or 'base'}{'' if current == head else f' (the newest is {head})'}.")
