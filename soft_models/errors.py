"""Mistakes that are the caller's to mend, and how they are worded."""

import difflib
from collections.abc import Iterable

__all__ = ["CheckpointError", "RunStopped", "UsageError"]


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read, or does not fit the model; the message is one line that says what to change."""


class UsageError(ValueError):
    """A wrong flag, folder, name or file: printed by the scripts as one line, with exit code 2."""


class RunStopped(RuntimeError):
    """A run that has begun cannot go on: printed as one line, by each process that meets it, with exit code 1."""


def suggestion(name: str, choices: Iterable[str]) -> str:
    """Ending of an error message that names the closest of ``choices``, or nothing where none is close."""
    close = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def some_of(names: Iterable[object], limit: int = 4) -> str:
    """Names as a list in words, cut after ``limit``."""
    names = list(names)
    return ", ".join(map(str, names[:limit])) + (f" and {len(names) - limit} more" if len(names) > limit else "")
