"""The options for limits, which commands for tenants, keys and models share, and the JSON that they make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from appliance.base.digits import whole_number
from appliance.cli.failure import WrongUsage
from appliance.tenancy.fields import LIMIT_MAX
from appliance.tenancy.principals import LIMIT_NAMES

LimitOption = Annotated[str | None, typer.Option(metavar="N", help="A whole number, or `none` for no limit.")]
BudgetOption = Annotated[
    str | None,
    typer.Option(metavar="MICROS", help="In millionths of the currency (5000000 is 5.00 EUR), or `none` for no limit."),
]
ModeOption = Annotated[
    str | None,
    typer.Option("--limit-mode", metavar="MODE", help="enforce, or shadow: count requests over a limit and serve them."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitOptions:
    """The options for limits of a tenant, a key or a model."""

    tokens_per_minute: LimitOption = None
    requests_per_minute: LimitOption = None
    concurrent_requests: LimitOption = None
    tokens_per_day: LimitOption = None
    monthly_budget: BudgetOption = None

    def body(self) -> dict[str, Any]:
        """Return the field `limits` if any was given, each by its name; `none` removes one. Raises WrongUsage."""
        given = {name: getattr(self, name) for name in LIMIT_NAMES}
        limits = {name: _limit(name, text) for name, text in given.items() if text is not None}
        return {"limits": limits} if limits else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerLimitOptions(LimitOptions):
    """The options for limits of a tenant or a key, which may also have some for single models, and a list of those."""

    model: Annotated[
        list[str] | None, typer.Option("--model", metavar="NAME", help="An allowed model; repeatable; `all` for every model.")
    ] = None
    model_limit: Annotated[
        list[str] | None,
        typer.Option(
            "--model-limit",
            metavar="MODEL:LIMIT=N",
            help="A limit for a single model, as in large:tokens_per_minute=1000; a budget in millionths of the currency; "
            "repeatable; `none` lifts all of them.",
        ),
    ] = None
    limit_mode: ModeOption = None

    def body(self) -> dict[str, Any]:
        """Return the fields that were given. Raises WrongUsage."""
        mode = {} if self.limit_mode is None else {"limit_mode": self.limit_mode}
        limits = LimitOptions.body(self)  # `super()` does not know the class that `slots` makes
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
    """Return the field `allowed_models` if models were named; `all` removes the restriction."""
    if not models:
        return {}
    return {"allowed_models": None if models == ["all"] else models}


def _model_limits(given: list[str] | None) -> dict[str, Any]:
    """Return the field `model_limits` if any was given: the whole set, because it replaces the former one."""
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
            raise WrongUsage(f"--model-limit takes {expected}, not {text!r}")
        limits.setdefault(model, {})[name] = limit
    return {"model_limits": limits}
