"""Tables of tenants, keys, members and administrator tokens."""

from __future__ import annotations

from sqlalchemy import JSON, BigInteger, Boolean, Column, ForeignKey, Integer, String, Table, UniqueConstraint, false

from appliance.base.tables.columns import UtcDateTime, limit_columns, metadata, optional_json

# `model_limits` maps a model's name to limits of this tenant (or key) for that model only. `limit_mode` is enforce or shadow.
# `currency` is the billing currency: fixed after the first event if set; NULL follows the appliance's currency. `billing` is
# the buyer on its invoices.
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

# A key that was rotated with a grace period expires at its end; `replaced_by` is its successor.
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

# Admission settings of the tiers. The three names are fixed; a missing row means the defaults in the code.
tiers = Table(
    "tiers",
    metadata,
    Column("name", String(20), primary_key=True),
    Column("admission_wait_ms", Integer, nullable=False),
    Column("updated_at", UtcDateTime, nullable=False),
)

# Limits on a model across all tenants.
model_policies = Table(
    "model_policies",
    metadata,
    Column("model", String(200), primary_key=True),
    *limit_columns(),
    Column("limit_mode", String(20), nullable=False, server_default="enforce"),
    Column("updated_at", UtcDateTime, nullable=False),
)

# `role` applies to the whole appliance: owner, admin, billing, viewer, or `member`, who has only the rights of memberships.
# `password_temporary`: someone else set the password, so it only allows choosing a new one.
# `totp_secret` is sealed, and active once `totp_confirmed_at` is set. `totp_last_step` prevents reuse of a code.
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

# A member's role in one tenant: manager, developer or viewer.
memberships = Table(
    "memberships",
    metadata,
    Column("member_id", ForeignKey("members.id"), primary_key=True),
    Column("tenant_id", ForeignKey("tenants.id"), primary_key=True, index=True),
    Column("role", String(20), nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
)

# Single-use codes for a lost second factor.
recovery_codes = Table(
    "recovery_codes",
    metadata,
    Column("member_id", ForeignKey("members.id"), primary_key=True),
    Column("digest", String(64), primary_key=True),
    Column("used_at", UtcDateTime, nullable=True),
)

# `id` identifies a session in lists; the token is known only to the browser.
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
