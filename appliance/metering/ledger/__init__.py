"""The usage events and their one writer: what was reserved, used and settled, and the sums of it."""
