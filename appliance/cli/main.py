"""Builds the `gatehouse` command and reports every failure as one line and an exit status: 0, 1 (failed), 2 (wrong usage)."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from appliance.cli.failure import CommandFailed, exit_status

if TYPE_CHECKING:
    import typer


COMMAND_OPTIONS = ("--data-dir", "--database", "--json")  # options of the commands, not of `gatehouse` itself


def build() -> typer.Typer:
    """Return the complete command. Imports are local, so that `gatehouse version` starts fast."""
    import typer

    from appliance.cli import (
        admin,
        alerts,
        audit,
        database,
        doctor,
        economics,
        invoices,
        keys,
        ledger,
        limits,
        members,
        models,
        options,
        plan,
        prices,
        serve,
        simulate,
        tenants,
        usage,
        version,
    )

    app = typer.Typer(
        name="gatehouse",
        help="Run and administer a Gatehouse appliance.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    app.callback()(version.version_option)
    app.command("serve")(serve.serve)
    app.command("doctor")(doctor.doctor)
    app.add_typer(models.app, name="models")
    app.add_typer(tenants.app, name="tenants")
    app.add_typer(keys.app, name="keys")
    app.add_typer(members.app, name="members")
    app.add_typer(limits.app, name="limits")
    app.command("usage")(usage.usage)
    app.add_typer(ledger.app, name="ledger")
    app.add_typer(prices.app, name="prices")
    app.add_typer(invoices.app, name="invoices")
    app.add_typer(alerts.app, name="alerts")
    app.command("economics")(economics.economics)
    app.command("plan")(plan.plan)
    app.command("simulate")(simulate.simulate)
    app.add_typer(database.app, name="db")
    app.add_typer(admin.app, name="admin")
    app.add_typer(audit.app, name="audit")
    app.command("version")(version.version)
    options.expand_groups(app)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if given in (["version"], ["--version"]):
            # Scripts call this command often, so it skips the import of the others.
            from appliance.base.version import current_version

            sys.stdout.write(f"gatehouse {current_version()}\n")
            return 0
        return _run(given)
    except BrokenPipeError:
        # The reader of our output (head, less) has closed the pipe, so there is nobody to report to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(given: list[str]) -> int:
    import typer

    from appliance.base.errors import GatehouseError
    from appliance.base.settings import SettingsError, UnusableData
    from appliance.cli import output

    as_json = "--json" in given
    first = given[0].partition("=")[0] if given else ""
    if first in COMMAND_OPTIONS:
        output.failed(f"{first} must come after the command, as in: gatehouse doctor {first}", "usage", as_json=as_json)
        return 2
    try:
        status = build()(given, standalone_mode=False, prog_name="gatehouse")
        return status if isinstance(status, int) else 0
    except (typer.Abort, KeyboardInterrupt):
        sys.stderr.write("Stopped.\n")
        return 130
    except CommandFailed as failure:
        output.failed(failure.message, failure.code, as_json=as_json, done=failure.done)
        return failure.status
    except GatehouseError as error:
        output.failed(error.message, error.code, as_json=as_json)
        return exit_status(error.status)
    except SettingsError as error:
        output.failed(str(error), "invalid_setting", as_json=as_json)
        return 2 if str(error).startswith("option ") else 1  # other sources: environment and file
    except UnusableData as error:
        output.failed(str(error), "unusable_data", as_json=as_json)
        return 1
    except _database_error() as error:
        from appliance.base.database_errors import is_outage
        from appliance.base.db import reason_of

        fault = "is unavailable" if is_outage(error) else "reports an error"
        output.failed(f"the database {fault}: {reason_of(error)}", "database", as_json=as_json)
        return 1
    except typer.TyperException as error:
        return output.usage_error(error, as_json=as_json)


def _database_error() -> type[Exception]:
    """Return the base class of database errors. Imported only after a failure, since the import would slow every command."""
    from sqlalchemy.exc import SQLAlchemyError

    return SQLAlchemyError


if __name__ == "__main__":
    sys.exit(main())
