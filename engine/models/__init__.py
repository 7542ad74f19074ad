"""Decoders and encoders over `engine.layers`; what differs between their families is the table in `engine.config.families`."""
