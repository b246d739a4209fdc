"""Numbers out of what the engine pooled."""

from __future__ import annotations

import random

from octavo_server.pooled_output import cosine


def test_a_cosine_never_leaves_its_range() -> None:
    """Rounding made that of a vector with itself 1.0000000000000002."""
    draw = random.Random(0)
    vectors = [[draw.gauss(0, 1) for _ in range(16)] for _ in range(500)]
    assert max(cosine(vector, vector) for vector in vectors) == 1.0
    assert min(cosine(vector, [-x for x in vector]) for vector in vectors) == -1.0
    assert cosine([0.0, 0.0], [1.0, 0.0]) == 0.0
