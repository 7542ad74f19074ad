"""The compile gate: kernels as serving configures them, compiled without a card. Serving imports none of it.

The configurations of rows/norm.py are in gate/rows/norm.py, and so on.
"""
