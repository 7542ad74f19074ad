"""The part of OpenAI's organization API that the official client's admin methods read."""
