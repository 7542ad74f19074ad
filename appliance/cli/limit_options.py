"""The options for limits, shared by the commands for tenants, keys and models, and the request fields made from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from appliance.base.digits import whole_number
from appliance.cli.failure import WrongUsage
from appliance.tenancy.fields import LIMIT_MAX
from appliance.tenancy.principals import LIMIT_NAMES

BudgetOption = Annotated[
    str | None,
    typer.Option(
        metavar="MICROS", help="Maximum cost per month in millionths of the currency (5000000 is 5.00 EUR), or `none`."
    ),
]
ModeOption = Annotated[
    str | None,
    typer.Option(
        "--limit-mode", metavar="MODE", help="enforce, or shadow: serve requests that exceed a limit, and count them."
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitOptions:
    """The limits of a tenant, a key or a model."""

    tokens_per_minute: Annotated[
        str | None, typer.Option(metavar="N", help="Maximum prompt and output tokens per minute, or `none`.")
    ] = None
    requests_per_minute: Annotated[str | None, typer.Option(metavar="N", help="Maximum requests per minute, or `none`.")] = None
    concurrent_requests: Annotated[
        str | None, typer.Option(metavar="N", help="Maximum requests at the same time, or `none`.")
    ] = None
    tokens_per_day: Annotated[
        str | None, typer.Option(metavar="N", help="Maximum prompt and output tokens per day, or `none`.")
    ] = None
    monthly_budget: BudgetOption = None

    def body(self) -> dict[str, Any]:
        """Return the field `limits` with the limits that were given; `none` removes a limit. Raises WrongUsage."""
        given = {name: getattr(self, name) for name in LIMIT_NAMES}
        limits = {name: _limit(name, text) for name, text in given.items() if text is not None}
        return {"limits": limits} if limits else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerLimitOptions(LimitOptions):
    """The limits of a tenant or a key, which also have limits for single models and a list of allowed models."""

    model: Annotated[
        list[str] | None, typer.Option("--model", metavar="NAME", help="Allowed model; repeatable; `all` allows every model.")
    ] = None
    model_limit: Annotated[
        list[str] | None,
        typer.Option(
            "--model-limit",
            metavar="MODEL:LIMIT=N",
            help="Limit for a single model, such as large:tokens_per_minute=1000; a budget in millionths of the currency; "
            "repeatable; together they replace all earlier ones; `none` removes them.",
        ),
    ] = None
    limit_mode: ModeOption = None

    def body(self) -> dict[str, Any]:
        """Return the fields that were given. Raises WrongUsage."""
        mode = {} if self.limit_mode is None else {"limit_mode": self.limit_mode}
        limits = LimitOptions.body(self)  # `super()` fails in a dataclass with slots, which is a new class
        return _models(self.model) | _model_limits(self.model_limit) | mode | limits


NO_LIMITS = LimitOptions()
NO_OWNER_LIMITS = OwnerLimitOptions()


def _limit(name: str, text: str) -> int | None:
    if text.lower() == "none":
        return None
    limit = whole_number(text, LIMIT_MAX)
    if limit is None:
        option = "--" + name.replace("_", "-")
        raise WrongUsage(f"{option} must be a whole number from 0 to {LIMIT_MAX} or `none`, not {text!r}")
    return limit


def _models(models: list[str] | None) -> dict[str, Any]:
    """Return the field `allowed_models` if models were given; `all` removes the restriction."""
    if not models:
        return {}
    return {"allowed_models": None if models == ["all"] else models}


def _model_limits(given: list[str] | None) -> dict[str, Any]:
    """Return the field `model_limits` if any was given: the complete set, because it replaces the previous one."""
    if not given:
        return {}
    if given == ["none"]:
        return {"model_limits": None}
    limits: dict[str, dict[str, int]] = {}
    for text in given:
        model, _, setting = text.rpartition(":")
        name, _, number = setting.partition("=")
        limit = whole_number(number, LIMIT_MAX)
        if not model or name not in LIMIT_NAMES or limit is None:
            expected = (
                f"MODEL:LIMIT=N, where LIMIT is one of {', '.join(LIMIT_NAMES)} and N a whole number from 0 to {LIMIT_MAX}"
            )
            raise WrongUsage(f"--model-limit must be {expected}, not {text!r}")
        limits.setdefault(model, {})[name] = limit
    return {"model_limits": limits}
