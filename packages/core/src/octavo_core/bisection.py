"""Finds out which request makes its steps fail.

A step that raises says nothing about who did it. So its requests are run again in
groups, and a group that fails again is split, until a group of one is left:

    [a b c d]      failed; tried again, for most faults do not come back: fails
    [a b] [c d]    both are tried alone: [a b] passes, [c d] fails
    [c] [d]        [c] passes, [d] fails: d is the culprit

A request is cleared once it got a token more than it had: so it is past where it failed,
and even a fault that only large batches meet lets everybody get on.
"""

from __future__ import annotations

from typing import NamedTuple

from octavo_core.request import Request


class Suspect(NamedTuple):
    """A request of a failed step.

    Attributes:
        num_tokens: Its tokens at the time.
    """

    request: Request
    num_tokens: int

    @property
    def is_cleared(self) -> bool:
        """True once it got past where it failed, or has ended in another way."""
        return self.request.is_finished or len(self.request.token_ids) > self.num_tokens


class Bisection:
    """The groups that are still to be tried; the last one is tried first."""

    def __init__(self) -> None:
        self._groups: list[list[Suspect]] = []

    def __bool__(self) -> bool:
        """True while somebody is under suspicion."""
        return bool(self._groups)

    def group_on_trial(self) -> list[Request]:
        """Clear whoever has passed, and return who is to be tried now; empty at the end.

        To be called with no step in flight.
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
