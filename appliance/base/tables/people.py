"""Tenants, keys, and the people and tokens that administer them."""

from __future__ import annotations

from sqlalchemy import JSON, BigInteger, Boolean, Column, ForeignKey, Integer, String, Table, UniqueConstraint, false

from appliance.base.tables.columns import UtcDateTime, limit_columns, metadata, optional_json

# `model_limits` maps a model's name to limits of this tenant (or key) for that model alone. `limit_mode` is enforce or shadow.
# `currency` is what the tenant is billed in: one that was chosen stays after its first event, and NULL follows the appliance's
# currency. `billing` is the address on its invoices.
tenants = Table(
    "tenants",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("name", String(200), nullable=False, unique=True),
    Column("tier", String(20), nullable=False),
    Column("weight", Integer, nullable=False),
    *limit_columns(),
    optional_json("model_limits"),
    Column("limit_mode", String(20), nullable=False, server_default="enforce"),
    Column("cut_at_budget", Boolean, nullable=False, server_default=false()),
    Column("currency", String(3), nullable=True),
    optional_json("billing"),
    optional_json("alert_percents"),
    optional_json("allowed_models"),
    Column("suspended", Boolean, nullable=False),
    Column("archived_at", UtcDateTime, nullable=True),
    Column("created_at", UtcDateTime, nullable=False),
)

# A key that was rotated with a grace period expires at its end and names its successor.
api_keys = Table(
    "api_keys",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("tenant_id", ForeignKey("tenants.id"), nullable=False, index=True),
    Column("name", String(200), nullable=False),
    Column("prefix", String(20), nullable=False, unique=True),
    Column("digest", String(64), nullable=False),
    Column("scopes", JSON(none_as_null=True), nullable=False),
    *limit_columns(),
    optional_json("model_limits"),
    Column("limit_mode", String(20), nullable=False, server_default="enforce"),
    optional_json("allowed_models"),
    optional_json("allowed_networks"),
    Column("expires_at", UtcDateTime, nullable=True),
    Column("revoked_at", UtcDateTime, nullable=True),
    Column("replaced_by", String(40), nullable=True),
    Column("last_used_at", UtcDateTime, nullable=True),
    Column("created_at", UtcDateTime, nullable=False),
)

# What a tier means for admission. The three names are fixed; a row that is missing has the defaults of the code.
tiers = Table(
    "tiers",
    metadata,
    Column("name", String(20), primary_key=True),
    Column("admission_wait_ms", Integer, nullable=False),
    Column("updated_at", UtcDateTime, nullable=False),
)

# Limits of a model for all tenants together.
model_policies = Table(
    "model_policies",
    metadata,
    Column("model", String(200), primary_key=True),
    *limit_columns(),
    Column("limit_mode", String(20), nullable=False, server_default="enforce"),
    Column("updated_at", UtcDateTime, nullable=False),
)

# `role` is the right on the whole box: owner, admin, billing, viewer, or `member`, who has none but what memberships give.
# `password_temporary`: somebody else made the password, so it is good for choosing another and for nothing else.
# `totp_secret` is sealed; it counts once `totp_confirmed_at` is set. `totp_last_step` makes a code good for one sign-in.
members = Table(
    "members",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("email", String(320), nullable=False, unique=True),
    Column("password_hash", String(200), nullable=False),
    Column("password_temporary", Boolean, nullable=False, server_default=false()),
    Column("role", String(20), nullable=False),
    Column("totp_secret", String(400), nullable=True),
    Column("totp_confirmed_at", UtcDateTime, nullable=True),
    Column("totp_last_step", BigInteger, nullable=True),
    Column("oidc_issuer", String(400), nullable=True),
    Column("oidc_subject", String(400), nullable=True),
    Column("disabled_at", UtcDateTime, nullable=True),
    Column("created_at", UtcDateTime, nullable=False),
    UniqueConstraint("oidc_issuer", "oidc_subject"),
)

# A member's right in one tenant: manager, developer or viewer.
memberships = Table(
    "memberships",
    metadata,
    Column("member_id", ForeignKey("members.id"), primary_key=True),
    Column("tenant_id", ForeignKey("tenants.id"), primary_key=True, index=True),
    Column("role", String(20), nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
)

# One use each, when the device with the second factor is lost.
recovery_codes = Table(
    "recovery_codes",
    metadata,
    Column("member_id", ForeignKey("members.id"), primary_key=True),
    Column("digest", String(64), primary_key=True),
    Column("used_at", UtcDateTime, nullable=True),
)

# `id` names a session where it is listed; only the browser knows the token.
sessions = Table(
    "sessions",
    metadata,
    Column("token_hash", String(64), primary_key=True),
    Column("id", String(40), nullable=False, unique=True),
    Column("member_id", ForeignKey("members.id"), nullable=False, index=True),
    Column("csrf_token", String(64), nullable=False),
    Column("method", String(20), nullable=False, server_default="password"),
    Column("user_agent", String(400), nullable=False),
    Column("address", String(64), nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("last_seen_at", UtcDateTime, nullable=False),
    Column("expires_at", UtcDateTime, nullable=False),
)

admin_tokens = Table(
    "admin_tokens",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("name", String(200), nullable=False),
    Column("digest", String(64), nullable=False, unique=True),
    Column("role", String(20), nullable=False),
    Column("revoked_at", UtcDateTime, nullable=True),
    Column("created_at", UtcDateTime, nullable=False),
)
