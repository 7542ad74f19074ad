"""What every part of the appliance stands on: settings, database, tables, clock, ids, money, errors, logging."""
