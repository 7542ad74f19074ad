"""`/admin/v1`: JSON in, JSON out; the rules live in the layers below."""
