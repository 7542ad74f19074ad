"""`LLM`: the engine without a gateway, and what is measured through it."""
