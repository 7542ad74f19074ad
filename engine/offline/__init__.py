"""`LLM`: the engine without a gateway."""
