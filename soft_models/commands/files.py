"""Files that are whole or absent, whatever happens while they are written, and folders of one run at a time."""

import csv
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from soft_models.errors import RunStopped, UsageError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def temporary_name(path: Path) -> Path:
    """Where a file is written before it takes its place; the suffix stays, as some writers go by it."""
    return path.with_name(f".tmp-{path.name}")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Name of a file to write, which takes the place of ``path`` once the block has ended and it is on the disk.

    An error inside the block leaves ``path`` as it was.

    Raises:
        RunStopped: The disk is full, the folder read-only, or the like.
    """
    temporary = temporary_name(path)
    try:
        try:
            yield temporary
            with temporary.open("r+b") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
            _sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise _save_error(path, error) from error


def write_atomic(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Let ``write`` fill a file that takes the place of ``path`` only once it is whole and on the disk.

    Raises:
        RunStopped: As in ``replacing``, or ``write`` failed.
    """
    with replacing(path) as temporary, temporary.open("wb") as file:
        try:
            write(file)
        except RuntimeError as error:  # torch's for a full disk
            raise _save_error(path, error) from error


def _save_error(path: Path, error: Exception) -> RunStopped:
    before = "the file that was there is untouched" if path.exists() else "nothing was there before"
    return RunStopped(f"cannot write {path}: {' '.join(str(error).split())}; {before}")


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(source: Path, target: Path) -> None:
    """Give ``target`` the content of ``source``: by a hard link where the file system has them, else by a copy.

    Raises:
        RunStopped: As in ``write_atomic``.
    """
    temporary = temporary_name(target)
    try:
        temporary.unlink(missing_ok=True)
        os.link(source, temporary)
        temporary.replace(target)
        # Renaming onto another link of the same file does nothing, and leaves both names.
        temporary.unlink(missing_ok=True)
    except OSError:
        with source.open("rb") as content:
            write_atomic(target, lambda file: shutil.copyfileobj(content, file))


KEEP_BYTES = "surrogateescape"  # file names that are no UTF-8 go out as they came in


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows with the columns that any of them has, in order of appearance.

    Raises:
        RunStopped: As in ``write_atomic``.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, columns, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    write_atomic(path, lambda file: file.write(text.getvalue().encode(errors=KEEP_BYTES)))


def make_folder(path: Path) -> None:
    """Make a folder to write to, with those above it, before work starts.

    Raises:
        UsageError: It cannot be made, or nothing can be written there.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = temporary_name(path / "probe")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(f"cannot write to the folder {str(path)!r} ({error.strerror}); name another") from None


def write_results(path: Path, content: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Write ``content`` as JSON, or ``rows`` as CSV for any other suffix than .json.

    Raises:
        RunStopped: As in ``write_atomic``.
    """
    if path.suffix == ".json":
        write_atomic(path, lambda file: file.write((json.dumps(content, indent=2) + "\n").encode()))
    else:
        write_csv(path, rows)


class RunLock:
    """Keeps a second run out of a folder while this process lives.

    Args:
        folder: The folder, which exists.
        advice: What to do if another run has it.

    Raises:
        UsageError: Another run has the folder, on entering.
    """

    def __init__(self, folder: Path, advice: str) -> None:
        self.path, self.advice = folder / ".lock", advice

    def __enter__(self) -> "RunLock":
        self._file = self.path.open("a")
        try:
            if fcntl is not None:
                # Not flock, which the loader's processes would inherit and keep when this one is killed.
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise UsageError(
                f"another run is writing to {self.path.parent}; wait for its end, or {self.advice}"
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
