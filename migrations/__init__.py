"""Alembic migrations of the appliance's database; `appliance.base.db` runs them."""
