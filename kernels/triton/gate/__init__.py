"""The compile gate: kernels as serving configures them, compiled without a card. Serving imports none of it."""
