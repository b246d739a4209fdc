"""Non-negative least squares, for a handful of unknowns and without numpy."""

from __future__ import annotations

from collections.abc import Sequence


def solve_non_negative(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float]:
    """Minimize ``|rows · x - targets|²`` over all x without a negative element.

    The active-set method of Lawson and Hanson ("Solving Least Squares Problems", 1974,
    chapter 23) on the normal equations; columns are scaled to length 1 first, so that
    coefficients of very different size do not cost digits.

    Args:
        rows: ``[num_rows, num_columns]``.
        targets: ``[num_rows]``.

    Returns:
        ``[num_columns]``, each at least 0.
    """
    columns = list(zip(*rows, strict=True))
    scales = [sum(value * value for value in column) ** 0.5 or 1.0 for column in columns]
    columns = [
        tuple(value / scale for value in column)
        for column, scale in zip(columns, scales, strict=True)
    ]
    gram = [[_dot(first, second) for second in columns] for first in columns]
    moments = [_dot(column, targets) for column in columns]
    solution = _lawson_hanson(gram, moments, 1e-10 * (_dot(targets, targets) ** 0.5 or 1.0))
    return [value / scale for value, scale in zip(solution, scales, strict=True)]


def _lawson_hanson(
    gram: Sequence[Sequence[float]], moments: Sequence[float], tolerance: float
) -> list[float]:
    size = len(moments)
    solution = [0.0] * size
    passive: list[int] = []  # the unknowns that are free to be above 0
    for _ in range(10 * size):  # each round frees one; three times `size` is already rare
        gradient = [moments[i] - _dot(gram[i], solution) for i in range(size)]
        candidates = [i for i in range(size) if i not in passive and gradient[i] > tolerance]
        if not candidates:
            break
        passive.append(max(candidates, key=lambda i: gradient[i]))
        while passive:
            trial = _solve(
                [[gram[i][j] for j in passive] for i in passive], [moments[i] for i in passive]
            )
            if min(trial) > 0:
                break
            # Go towards the trial until the first unknown reaches 0, and hold that one there.
            share = min(
                solution[i] / (solution[i] - value)
                for i, value in zip(passive, trial, strict=True)
                if value <= 0
            )
            for i, value in zip(passive, trial, strict=True):
                solution[i] += share * (value - solution[i])
            held = [i for i, value in zip(passive, trial, strict=True) if value <= 0]
            zeros = [i for i in held if solution[i] <= 1e-15] or held[:1]
            for i in zeros:
                solution[i] = 0.0
                passive.remove(i)
        solution = [0.0] * size
        for i, value in zip(passive, trial, strict=True) if passive else ():
            solution[i] = value
    return solution


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a symmetric positive system; a direction that is not determined stays 0."""
    size = len(right)
    rows = [[*matrix[i], right[i]] for i in range(size)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda i: abs(rows[i][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        if abs(rows[column][column]) < 1e-12:
            rows[column] = [0.0] * (size + 1)
            rows[column][column] = 1.0
            continue
        for below in range(column + 1, size):
            factor = rows[below][column] / rows[column][column]
            if factor:
                for k in range(column, size + 1):
                    rows[below][k] -= factor * rows[column][k]
    solution = [0.0] * size
    for i in range(size - 1, -1, -1):
        known = sum(rows[i][k] * solution[k] for k in range(i + 1, size))
        solution[i] = (rows[i][size] - known) / rows[i][i]
    return solution


def _dot(first: Sequence[float], second: Sequence[float]) -> float:
    return sum(map(float.__mul__, map(float, first), map(float, second)))
