"""Finds out which request makes its steps fail.

A step that raises says nothing about who did it. So its requests are run again in
groups, and a group that fails again is split, until a group of one is left:

    [a b c d]  failed
    [a b] [c d]    both are tried alone: [a b] passes, [c d] fails
    [c] [d]        [c] passes, [d] fails: d is the culprit

A group has passed once each of its requests is computed as far as the failed step would
have brought it. A fault that does not come back has no culprit.
"""

from __future__ import annotations

from typing import NamedTuple

from octavo_core.request import Request


class Suspect(NamedTuple):
    """A request of a failed step.

    Attributes:
        target: Tokens that must be computed for it to be cleared.
    """

    request: Request
    target: int

    @property
    def is_cleared(self) -> bool:
        """True once it got past where it failed, or has ended in another way."""
        return self.request.is_finished or self.request.num_computed_tokens >= self.target


class Bisection:
    """The groups that are still to be tried; the last one is tried first."""

    def __init__(self) -> None:
        self._groups: list[list[Suspect]] = []

    def __bool__(self) -> bool:
        """True while somebody is under suspicion."""
        return bool(self._groups)

    def group_on_trial(self) -> list[Request]:
        """Clear whoever has passed, and return who is to be tried now; empty at the end.

        To be called with no step in flight. Who was cleared may be preempted, and lose what
        was computed of it, without coming under suspicion again.
        """
        while self._groups:
            group = [suspect for suspect in self._groups[-1] if not suspect.is_cleared]
            if group:
                self._groups[-1] = group
                return [suspect.request for suspect in group]
            self._groups.pop()
        return []

    def accuse(self, suspects: list[Suspect]) -> Request | None:
        """Take note that a step with these requests has failed.

        Returns:
            The culprit, if it was alone and already on trial.
        """
        suspects = [suspect for suspect in suspects if not suspect.request.is_finished]
        if not self._groups:
            self._add(suspects)
            return None
        group = self._groups.pop()
        accused = {suspect.request for suspect in suspects}
        # Members that were not in the step are neither cleared nor accused.
        self._add([member for member in group if member.request not in accused])
        on_trial = [member for member in group if member.request in accused]
        if len(on_trial) == 1:
            return on_trial[0].request
        half = len(on_trial) // 2
        self._add(on_trial[half:])
        self._add(on_trial[:half])
        return None

    def _add(self, group: list[Suspect]) -> None:
        if group:
            self._groups.append(group)
