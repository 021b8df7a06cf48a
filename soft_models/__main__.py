"""The models that this package registers, counted from the code: ``python -m soft_models``.

Usage::

    python -m soft_models                          # a table
    python -m soft_models --json                   # the same for programs
    python -m soft_models --update docs/models.md  # rewrite the table between the markers in a file
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from soft_models.commands.script import run_script
from soft_models.errors import UsageError
from soft_models.registry import registered_names
from soft_models.table import describe, markdown, replace_table


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m soft_models", description="List the models of soft_models.")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="as JSON")
    form.add_argument("--update", type=Path, metavar="FILE", help="rewrite the table in a file, between its markers")
    return run_script("python -m soft_models", lambda: run(parser.parse_args(argv)))


def run(args: argparse.Namespace) -> int:
    """List the models as asked for."""
    rows = map(describe, registered_names())  # one by one, as each takes a second
    if args.update:
        try:
            text = replace_table(args.update.read_text(encoding="utf-8"), "\n".join(markdown(rows)))
        except (OSError, ValueError) as error:
            raise UsageError(f"{args.update}: {error}") from None
        args.update.write_text(text, encoding="utf-8")
    elif args.json:
        sys.stdout.write(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    else:
        for line in markdown(rows):
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
