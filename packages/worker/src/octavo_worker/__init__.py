"""Loads a language model and runs it over a paged KV cache."""

import os

__version__ = "0.1.0"

# Read by libgomp when torch is imported. Its threads spin at the end of each parallel region,
# by default long enough that a step takes about twice as long once another process wants a
# core. After this many turns (some 0.1 ms) they sleep; on a quiet machine that costs nothing
# measurable. Who sets one of the two variables is left in charge.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
