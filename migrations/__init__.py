"""Alembic migrations of the appliance's database; `appliance.base.migrations` runs them."""
