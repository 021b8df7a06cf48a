"""timm's own tests of models, run against the names of this package.

The text of timm's suite is no part of this repository: it comes with the source distribution of the timm that is
installed, which is fetched on first use and kept in ``.cache/``. Two ways lead into it:

- as a command, timm's ``test_models.py`` is run as it is, with only our names selected, and less the ``EXCEPTIONS``::

      python tests/timm_suite.py [NAME ...] [-n WORKERS]

- ``run_check`` calls one of its functions with one name. ``test_timm_suite.py`` does so with those in ``CHECKS`` and
  one name of each family, and with all names for what the first way leaves out: an exception's stand-in, and the
  functions that timm limits to a list of its own modules.
"""

import argparse
import functools
import importlib
import inspect
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path, PurePosixPath
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "timm_tests"  # timm's is called "tests", as is ours

# Names whose ``forward_features`` returns tokens (B, prefix + N, C), as a class token and plain ViTs ask for.
TOKEN_NAMES = ("soft_*", "pyramid_*", "cosformer*")

# (test, pattern of names, reason): what timm's suite expects of every name and these rightly do not give.
EXCEPTIONS = (
    *(
        (
            "test_model_default_cfgs",
            pattern,
            "wants a 4-D map and forward_features gives tokens; test_model_default_cfgs_non_std stands in, "
            "as for timm's own models with tokens, which timm finds by a list of name patterns",
        )
        for pattern in TOKEN_NAMES
    ),
)

# Tests of timm with the arguments each takes beside the name. A timm that lacks an argument does without.
CHECKS: dict[str, dict[str, object]] = {
    "test_model_forward": {"batch_size": 1},
    "test_model_backward": {"batch_size": 2},
    "test_model_default_cfgs": {"batch_size": 1, "cfg_device": "meta"},
    "test_model_default_cfgs_non_std": {"batch_size": 1, "cfg_device": "meta"},
    "test_model_forward_torchscript": {"batch_size": 1},
    "test_model_forward_features": {"batch_size": 1},
    "test_model_forward_intermediates_features": {"batch_size": 1},
    "test_model_forward_intermediates": {"batch_size": 1},
    "test_prune_intermediate_layers_contract": {},
    "test_model_forward_fx": {"batch_size": 1},
    "test_model_backward_fx": {"batch_size": 2},
    "test_model_forward_fx_torchscript": {"batch_size": 1},
    "test_model_init_weights_after_to_empty": {"kwargs": {}},
}
# Not reached by running the suite as it is: timm parametrises these over a list of its own modules, or of its names.
ONLY_CALLED = (
    "test_model_forward_intermediates_features",
    "test_model_forward_intermediates",
    "test_prune_intermediate_layers_contract",
    "test_model_init_weights_after_to_empty",
)


class SuiteUnavailableError(RuntimeError):
    """timm's suite cannot be had here; the message says why."""


def returns_tokens(name: str) -> bool:
    """Whether ``forward_features`` of the name returns tokens rather than a map."""
    return any(fnmatch(name, pattern) for pattern in TOKEN_NAMES)


def excused(test: str, name: str) -> bool:
    """Whether the test is one of the ``EXCEPTIONS`` for the name."""
    return any(test == excepted and fnmatch(name, pattern) for excepted, pattern, _ in EXCEPTIONS)


def fetch() -> Path:
    """Folder with the package ``timm_tests`` of the installed timm, downloaded on first use.

    Raises:
        SuiteUnavailableError: The source distribution cannot be downloaded, or holds no tests.
    """
    version = metadata.version("timm")
    folder = ROOT / ".cache" / "timm-suite" / version
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        partial = Path(work) / "suite"
        _unpack_tests(_download(version, Path(work)), partial / PACKAGE)
        # An ini file of its own, so that pytest does not take the settings of this repository.
        (partial / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        try:
            partial.replace(folder)
        except OSError:
            # Another process, of the same test run perhaps, was faster.
            if not folder.is_dir():
                raise
    return folder


def _download(version: str, folder: Path) -> Path:
    # pip asks the build backend of a source distribution for its metadata, so this can fail in more ways than a lost
    # connection; pip's own last error tells which.
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet", "--retries", "1"]
    command += ["--no-deps", "--no-binary", "timm", "--dest", str(folder), f"timm=={version}"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=180, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        raise SuiteUnavailableError(f"no source distribution of timm {version}: no answer in 180 s") from error
    archives = list(folder.glob("timm-*.tar.gz"))
    if result.returncode or not archives:
        errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or ["pip gave no reason"]
        raise SuiteUnavailableError(f"no source distribution of timm {version}: {errors[-1]}")
    return archives[0]


def _unpack_tests(archive: Path, target: Path) -> None:
    with tarfile.open(archive) as tar:
        for member in tar:
            parts = PurePosixPath(member.name).parts
            if member.isfile() and len(parts) == 3 and parts[1] == "tests" and parts[2].endswith(".py"):
                target.mkdir(parents=True, exist_ok=True)
                stream = tar.extractfile(member)
                assert stream is not None
                (target / parts[2]).write_bytes(stream.read())
    if not (target / "test_models.py").is_file():
        raise SuiteUnavailableError(f"{archive.name} has no tests/test_models.py")


@functools.cache
def load() -> ModuleType | SuiteUnavailableError:
    """timm's ``test_models`` as a module, its asserts explained as pytest does for tests; or why it cannot be had."""
    try:
        folder = fetch()
    except SuiteUnavailableError as error:
        return error
    os.environ["TORCH_BACKEND"] = "soft_models"
    pytest.register_assert_rewrite(PACKAGE)
    sys.path.append(str(folder))
    return importlib.import_module(f"{PACKAGE}.test_models")


def run_check(test: str, name: str) -> None:
    """Call one of timm's tests with one model name; skips where this timm, or this name in it, has no such test."""
    suite = load()
    if isinstance(suite, SuiteUnavailableError):
        pytest.skip(str(suite))
    function = getattr(suite, test, None)
    if function is None:
        pytest.skip(f"timm {metadata.version('timm')} has no {test}")
    accepted = inspect.signature(function).parameters
    function(name, **{key: value for key, value in CHECKS[test].items() if key in accepted})


# From here on: the plugin by which a run of timm's suite is limited to our names.


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--model-names", default="", help="comma-separated names to keep")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    names = set(config.getoption("--model-names").split(","))
    kept, dropped = [], []
    for item in items:
        callspec = getattr(item, "callspec", None)
        name = str(callspec.params.get("model_name", "")).split(".")[0] if callspec else ""
        test = getattr(item, "originalname", item.name)
        (kept if name in names and not excused(test, name) else dropped).append(item)
    config.hook.pytest_deselected(items=dropped)
    items[:] = kept


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("exceptions")
    for test, pattern, reason in EXCEPTIONS:
        terminalreporter.write_line(f"{test} of {pattern}: {reason}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run timm's ``test_models.py`` on our names; returns pytest's exit status, or 1 where the suite cannot be had."""
    from soft_models.registry import registered_names

    parser = argparse.ArgumentParser(description="Run timm's own tests of models against our names.")
    parser.add_argument("names", nargs="*", help="registered names; all of ours when left out")
    parser.add_argument("-n", "--workers", default="0", help="processes, as pytest-xdist takes it")
    args = parser.parse_args(argv)
    registered = registered_names()
    unknown = sorted(set(args.names) - set(registered))
    if unknown:
        parser.error(f"names must be registered by soft_models, got {unknown}; choose from {registered}")
    try:
        folder = fetch()
    except SuiteUnavailableError as error:
        sys.stderr.write(f"timm's suite was not run: {error}\n")
        return 1
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = {**os.environ, "TORCH_BACKEND": "soft_models", "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "timm_suite", "-p", "no:cacheprovider", "-n", args.workers]
    command += [
        "-W",
        "ignore::pytest.PytestUnknownMarkWarning",
        "-q",
        "--model-names",
        ",".join(args.names or registered),
    ]
    command += [f"{PACKAGE}/test_models.py"]
    return subprocess.run(command, cwd=folder, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
