"""How a program that knows nothing of kempner shows its progress, and what its exit codes mean."""

from __future__ import annotations

import re
from typing import Annotated, Self

from pydantic import Field, model_validator

from kempner.config.section import Key, NonNegativeFloat, PathText, Section, Text

ProgramCode = Annotated[int, Field(ge=0, le=255)]


class ProgramSection(Section):
    """A program of your own (`kempner supervise -- COMMAND`) that does not import kempner: where
    its progress shows, and what its exit codes mean."""

    progress_file: Annotated[PathText | None, Key(example="out/step.txt")] = None
    """A file that the program changes as it goes on, relative to the folder in which `kempner
    supervise` was started. If all that it holds is a number, that is the step, counted since the
    run began; otherwise a change is a sign of life only. `kempner heartbeat --step N` in the
    program needs no file."""
    progress_pattern: Annotated[
        Text | None,
        Key(example="step[ =:]+([0-9]+)", form="regular expression (Python's) with a group"),
    ] = None
    """Regular expression (Python's) that is looked for in each line that a rank prints; its first
    group is the step, counted since the run began, as in "step[ =:]+([0-9]+)". The rank then
    prints into a pipe, standard output and error together. Ranks that srun starts itself are not
    looked at."""

    done_codes: Annotated[list[ProgramCode], Key("exit codes", [0, 3])] = [0]  # noqa: RUF012 - pydantic copies it
    """Exit codes of a rank that is done. The run is complete when all ranks are. 0 does not mean
    that once the rank was asked to stop: programs that save on SIGTERM exit with 0, too. Any other
    code here does, and so does `kempner heartbeat --complete`."""
    requeue_codes: Annotated[list[ProgramCode], Key("exit codes", [75, 124])] = [75]  # noqa: RUF012 - pydantic copies it
    """Exit codes of a rank that wants to go on later: the other ranks are stopped, and the job is
    requeued."""
    fail_codes: Annotated[list[ProgramCode], Key("exit codes", [2])] = []  # noqa: RUF012 - pydantic copies it
    """Exit codes of a failure that no restart can help: the run is given up at once. A code in none
    of the three lists is a failure after which the ranks are started again, or, if kempner itself
    has it (docs/exit_codes.md), what it means there."""

    progress_seconds: Annotated[NonNegativeFloat, Key("seconds", 1200.0)] = 600.0
    """Where the steps of a program are not known, an attempt that ran for this long before it
    failed has made progress: the restarts before it count no more."""

    one_tracker_run: bool = True
    """Have Weights & Biases, MLflow and Comet show one run for all starts, by variables that they
    read; what is exported, or the program says itself, goes first."""

    @model_validator(mode="after")
    def _has_a_step(self) -> Self:
        if self.progress_pattern is None:
            return self
        try:
            groups = re.compile(self.progress_pattern).groups
        except re.error as error:
            raise ValueError(f"progress_pattern is no regular expression: {error}") from None
        if not groups:
            raise ValueError(
                'progress_pattern needs a group for the step, as in "step ([0-9]+)"; put '
                "parentheses around the number"
            )
        return self

    @model_validator(mode="after")
    def _each_code_means_one_thing(self) -> Self:
        codes = [*self.done_codes, *self.requeue_codes, *self.fail_codes]
        twice = sorted({code for code in codes if codes.count(code) > 1})
        if twice:
            raise ValueError(
                f"the exit code {twice[0]} is named twice in done_codes, requeue_codes and "
                "fail_codes; name it once"
            )
        return self

    @property
    def tells_progress(self) -> bool:
        """Whether the program shows its progress by itself, so that one that never does hangs."""
        return self.progress_file is not None or self.progress_pattern is not None
