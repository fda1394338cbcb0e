"""The plan file of a job: read once when it starts, written by rank 0 whenever the plan changes.

If the file cannot be written while training runs, the job goes on and tries again at its end.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from megatron_autorecompute import json_records
from megatron_autorecompute.errors import AutorecomputeError, ProfileError
from megatron_autorecompute.planner.plan import Plan, changes
from megatron_autorecompute.runtime.ranks import is_first_rank, on_rank_0


class PlanStore:
    """The file of a job's plan; without a path nothing is stored. `say` prints on one rank.

    Raises: ProfileError if the path cannot be written; checked at once, not after an hour of
    training."""

    def __init__(
        self, path: str | None, fingerprint: Mapping[str, str], say: Callable[[str], None]
    ) -> None:
        self.path = path
        self._fingerprint, self._say = fingerprint, say
        self.plan: Plan | None = None
        """The last one that was found or given to be saved."""
        self._unwritten: Plan | None = None
        if path is not None:
            on_rank_0(lambda: json_records.check_writable(path))

    def known(self) -> Plan | None:
        """The stored plan if it is of this job; otherwise None, and prints why not. A file that
        holds no plan is kept under another name.

        Raises: ProfileError if the file cannot be opened."""
        path = self.path
        if path is None:
            return None
        found = on_rank_0(lambda: self._read(path) if Path(path).exists() else None)
        if isinstance(found, str):
            self._say(f"recompute auto: {found}")
            return None
        self.plan = found
        return found

    def _read(self, path: str) -> Plan | str:
        """The plan, or why it is not used: it is damaged, or of another job than this one."""
        try:
            plan = Plan.load(path)
        except ProfileError as error:
            if isinstance(error.__cause__, OSError):
                raise
            return _put_aside(path, error)
        changed = changes(plan.profile.fingerprint, self._fingerprint)
        if not changed:
            return plan
        other = f"the plan in {path} is of another job, measuring again."
        return f"{other} Changed: {'; '.join(changed)}"

    def save(self, plan: Plan) -> None:
        """Write the plan for the next start, on rank 0."""
        self.plan = plan
        if self.path is None or not is_first_rank():
            return
        error = _written(plan, self.path)
        self._unwritten = plan if error else None
        if error is None:
            self._ended_path.unlink(missing_ok=True)
        else:
            self._say(f"recompute auto: {error} Training goes on; the plan is written at its end.")

    def close(self) -> str | None:
        """Try for the last time to write a plan that was not written; returns where the plan is, or
        None without a path."""
        if self._unwritten is not None:
            self.save(self._unwritten)
        if self._unwritten is not None:
            return f"not saved: {self.path} could not be written"
        return self.path and f"saved in {self.path}"

    def leave(self, plan: Plan) -> bool:
        """Write the plan on this rank alone, which is about to end; returns whether it could."""
        return self.path is not None and _written(plan, self.path) is None

    # --- jobs that ended before there was a plan --------------------------------------------------

    def ended_measuring(self) -> int:
        """How many starts in a row ran out of memory while measuring, before there was a plan."""
        return on_rank_0(self._read_ended)

    def leave_ended_measuring(self) -> bool:
        """Count this job, on this rank alone, which is about to end; returns whether it could."""
        if self.path is None:
            return False
        try:
            json_records.write_atomically(f"{self._read_ended() + 1}\n", self._ended_path)
        except AutorecomputeError:
            return False
        return True

    @property
    def _ended_path(self) -> Path:
        return Path(f"{self.path}.ended-measuring")

    def _read_ended(self) -> int:
        if self.path is None:
            return 0
        try:
            return min(63, max(0, int(self._ended_path.read_text())))
        except (OSError, ValueError):
            return 0


def _written(plan: Plan, path: str) -> AutorecomputeError | None:
    try:
        plan.save(path)
    except AutorecomputeError as error:
        return error
    return None


def _put_aside(path: str, error: ProfileError) -> str:
    aside = f"{os.path.realpath(path)}.unreadable"
    try:
        os.replace(os.path.realpath(path), aside)
    except OSError as refused:
        raise error from refused
    return f"{path} holds no plan, is {aside} now, and this job measures again: {error}"
