"""The usage events and their only writer: what was reserved, used and settled, and its sums."""
