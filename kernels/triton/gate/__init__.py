"""The compile gate: kernels as serving configures them, compiled with no card at hand. Serving imports none of it."""
