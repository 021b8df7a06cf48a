"""What the mains of the scripts share."""

import logging
import os
import sys
from collections.abc import Callable

from soft_models.errors import CheckpointError, RunStopped, UsageError


def run_script(name: str, work: Callable[[], int]) -> int:
    """Exit code of ``work``: 2 and one line for a caller's mistake, 1 and one line for a run that had to stop.

    Where nobody reads the output any more it is a shell's 141, without a word.
    """
    try:
        return work()
    except (UsageError, CheckpointError) as error:
        if int(os.environ.get("RANK", 0)) == 0:
            sys.stderr.write(f"{name}: error: {error}\n")
        return 2
    except RunStopped as error:
        sys.stderr.write(f"{name}: stopped: {error}\n")
        return 1
    except BrokenPipeError:  # whatever reads the output, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes at the end
        return 141


def setup_logging(rank: int = 0) -> None:
    """Log to stderr: everything from the first process, errors from the others."""
    logger = logging.getLogger("soft_models")
    logger.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
