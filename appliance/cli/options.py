"""Options shared by several commands, grouped in dataclasses, and the settings made from them."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from appliance.base.settings import Settings

AsJson = Annotated[bool, typer.Option("--json", help="Print results and errors as JSON.")]
DataDir = Annotated[
    str | None,
    typer.Option("--data-dir", metavar="DIR", help="Data folder of the appliance; default: the platform's standard folder."),
]
DatabaseUrl = Annotated[
    str | None,
    typer.Option("--database", metavar="URL", help="sqlite:///PATH or postgresql://…; default: SQLite in the data folder."),
]

Limit = Annotated[int, typer.Option(metavar="N", min=1, help="Maximum number of rows; a note tells if there are more.")]
LIMIT_DEFAULT = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonOptions:
    """Options of every command that works on an appliance: which appliance, and the output format."""

    as_json: AsJson = False
    data_dir: DataDir = None
    database: DatabaseUrl = None

    def settings(self, **others: object) -> Settings:
        """Return the settings that the command runs with. Raises SettingsError."""
        return settings_from(self.data_dir, self.database, **others)


DEFAULTS = CommonOptions()


def settings_from(data_dir: str | None, database: str | None, **others: object) -> Settings:
    """Return the settings that a command runs with. Raises SettingsError."""
    from appliance.base.settings import load_settings

    return load_settings(options={"data_dir": data_dir, "database_url": database, **others}, environ=os.environ)


def expand_groups(app: typer.Typer) -> None:
    """Replace each dataclass parameter of the commands of `app` by the fields of the dataclass, as options. Typer has no
    option groups of its own."""
    for command in app.registered_commands:
        if command.callback is not None:
            command.callback = _with_groups_expanded(command.callback)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            expand_groups(group.typer_instance)


def _with_groups_expanded(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return `command` with its dataclass parameters replaced by their fields; calls build the dataclasses."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {
        name: parameter.annotation for name, parameter in signature.parameters.items() if is_dataclass(parameter.annotation)
    }
    if not groups:
        return command

    @wraps(command)
    def expanded(**values: Any) -> Any:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        return command(**values)

    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        options = inspect.signature(groups[name], eval_str=True).parameters.values() if name in groups else [parameter]
        parameters += [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options]
    expanded.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return expanded
