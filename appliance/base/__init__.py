"""Foundations shared by the whole appliance: settings, database, tables, clock, ids, money, errors, logging."""
