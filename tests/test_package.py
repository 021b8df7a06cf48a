"""The package as it is installed: import, registry, metadata, wheel, and a repository that can stand anywhere."""

import configparser
import importlib
import importlib.machinery
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import timm
import yaml
from packaging.requirements import Requirement
from packaging.version import Version
from small_models import family_names

import soft_models
from soft_models.registry import registered_names

ROOT = Path(__file__).parent.parent
PACKAGE = Path(soft_models.__file__).parent
QUIET_PIP = ("--quiet", "--no-deps", "--no-index", "--disable-pip-version-check")

# What the registry gives before and after the import, and the modules that the import adds to those of its
# dependencies; as a child process, since this one has imported everything.
PROBE = """
import json, sys
import timm, torch, torchvision, yaml
names, modules = set(timm.list_models()), set(sys.modules)
import soft_models
files = {name: getattr(sys.modules[name], "__file__", None) or "" for name in set(sys.modules) - modules}
entry = lambda name: timm.model_entrypoint(name).__module__
print(json.dumps({
    "lost": sorted(names - set(timm.list_models())),
    "shadowed": sorted(name for name in names if entry(name).startswith("soft_models.")),
    "added": sorted(set(timm.list_models()) - names),
    "modules": files,
}))
"""


def python(*args: str, cwd: Path = ROOT, **env: str) -> str:
    """Output of a child Python; a failure shows what it wrote."""
    result = subprocess.run(
        [sys.executable, *args], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, f"python {' '.join(args)} gave {result.returncode}\n{result.stdout}{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def config() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


@pytest.fixture(scope="module")
def imported() -> dict[str, object]:
    result: dict[str, object] = json.loads(python("-c", PROBE))
    return result


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("#")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Built from a copy: setuptools writes its folders beside the sources.
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(PACKAGE, source / "soft_models", ignore=shutil.ignore_patterns("__pycache__"))
    python("-m", "pip", "wheel", *QUIET_PIP, "--no-build-isolation", "--wheel-dir", str(folder), str(source))
    (built,) = folder.glob("*.whl")
    return built


def test_import_warns_of_nothing() -> None:
    assert python("-W", "error", "-c", "import soft_models") == ""


@pytest.mark.parametrize("family", ["soft", "pyramid", "cosformer_vit", "vvt"])
def test_table_configurations_and_registry_agree(family: str) -> None:
    module = importlib.import_module(f"soft_models.variants.{family}")
    registered = [name for name in registered_names() if timm.model_entrypoint(name).__module__ == module.__name__]
    assert sorted(module.VARIANTS) == sorted(registered) == sorted(module.default_cfgs)


def test_import_is_not_lost_to_a_folder_of_the_same_name(tmp_path: Path) -> None:
    (tmp_path / "soft_models").mkdir()  # as a clone beside the script that imports
    code = "import soft_models, timm; print(timm.is_model('soft_tiny'))"
    assert python("-c", code, cwd=tmp_path).strip() == "True"


def test_import_adds_names_and_shadows_none_of_timm(imported: dict[str, object]) -> None:
    assert imported["lost"] == []
    assert imported["shadowed"] == []
    assert imported["added"] == sorted(registered_names())
    assert registered_names(), "no model is registered"


def test_import_loads_no_compiled_extension(imported: dict[str, object]) -> None:
    modules = imported["modules"]
    assert isinstance(modules, dict)
    suffixes = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    assert [name for name, file in modules.items() if file.endswith(suffixes)] == []


def test_import_is_of_the_models_alone(imported: dict[str, object]) -> None:
    modules = imported["modules"]
    assert isinstance(modules, dict)
    assert {name.split(".")[0] for name in modules} & {"tensorboard", "mlxtend", "matplotlib", "pytest"} == set()
    assert [name for name in modules if name.startswith("soft_models.training")] == []


def test_every_module_imports_without_a_warning() -> None:
    found = sorted(path.relative_to(ROOT).with_suffix("") for path in PACKAGE.rglob("*.py"))
    names = [".".join(path.parts).removesuffix(".__init__") for path in found if path.name != "__main__"]
    # tensorboard and torch.utils.tensorboard may warn of their own dependencies; they are imported first, unchecked.
    code = "import timm, torch, torchvision, torch.utils.tensorboard, warnings; warnings.simplefilter('error'); "
    python("-c", code + "import importlib; [importlib.import_module(name) for name in " + repr(names) + "]")


@pytest.mark.parametrize("name", registered_names())
def test_name_is_listed_by_its_module_with_a_cfg(name: str) -> None:
    module = timm.model_entrypoint(name).__module__
    assert name in timm.list_models(module=module.split(".")[-1])
    assert timm.is_model(name)
    assert re.fullmatch(r"[a-z0-9_]+", name), "names are lower case words joined by underscores"
    cfg = timm.models.get_pretrained_cfg(name)
    assert cfg is not None, "default_cfgs must hold the name before its entry point is registered"
    assert cfg.architecture == name
    assert name in sys.modules[module].__all__


def test_modules_of_ours_and_timm_are_called_differently() -> None:
    # timm keeps the last word of a module's name only, so two modules of one name would be listed as one.
    ours = {timm.model_entrypoint(name).__module__ for name in registered_names()}
    for module in {module.split(".")[-1] for module in ours}:
        assert set(timm.list_models(module=module)) <= set(registered_names()), f"timm has a module {module} too"


def test_families_are_represented_by_small_names() -> None:
    assert not [name for name in family_names() if re.search("medium|large|huge", name)]


def test_versions_agree(config: configparser.ConfigParser) -> None:
    assert soft_models.__version__ == config["metadata"]["version"]
    Version(soft_models.__version__)


def test_dependencies_are_ranges_that_hold_here(config: configparser.ConfigParser) -> None:
    requirements = [Requirement(line) for line in lines(config["options"]["install_requires"])]
    names = {requirement.name for requirement in requirements}
    assert names == {"torch", "torchvision", "timm", "pyyaml", "tensorboard"}
    for requirement in requirements:
        assert [specifier.operator for specifier in requirement.specifier] == [">="], f"{requirement} must be a range"
        assert requirement.specifier.contains(metadata.version(requirement.name), prereleases=True)


def test_extras(config: configparser.ConfigParser) -> None:
    extras = {name: lines(text) for name, text in config["options.extras_require"].items()}
    assert set(extras) >= {"demo", "downstream", "export", "plots", "test", "dev"}
    assert [Requirement(line).name for line in extras["demo"]] == ["mlxtend"]
    pinned = {Requirement(line).name: str(Requirement(line).specifier) for line in extras["dev"]}
    for tool in ("ruff", "mypy"):
        assert pinned[tool].startswith("=="), f"{tool} must be pinned, so that editor, hook and CI agree"


def test_workflow_tests_the_lowest_versions(config: configparser.ConfigParser) -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))["jobs"]
    (command,) = (step["run"] for step in jobs["oldest"]["steps"] if "pip install" in step.get("run", ""))
    tested = {Requirement(word).name: Requirement(word).specifier for word in command.split() if "==" in word}
    floors = [Requirement(line) for line in lines(config["options"]["install_requires"])]
    for floor in (floor for floor in floors if floor.name in ("torch", "torchvision", "timm")):
        (lowest,) = floor.specifier
        (version,) = tested[floor.name]
        assert Version(version.version) == Version(lowest.version), floor.name
    pythons = jobs["check"]["strategy"]["matrix"]["python"]
    assert config["options"]["python_requires"] == f">={pythons[0]}"


def test_commands_lead_to_functions(config: configparser.ConfigParser) -> None:
    for line in lines(config["options.entry_points"]["console_scripts"]):
        point = metadata.EntryPoint(*(part.strip() for part in line.split("=")), group="console_scripts")
        assert callable(point.load()), line


def test_package_holds_its_type_marker() -> None:
    assert (PACKAGE / "py.typed").is_file()


def test_wheel_holds_the_whole_package_and_nothing_else(wheel: Path) -> None:
    assert wheel.name == f"soft_models-{soft_models.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        text = archive.read(f"soft_models-{soft_models.__version__}.dist-info/METADATA").decode()
    sources = {path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    own = {path.relative_to(PACKAGE.parent).as_posix() for path in sources}
    assert {name for name in names if ".dist-info/" not in name} == own
    assert [name for name in names if name.endswith("/LICENSE")], "the licence must be in the wheel"
    assert "Requires-Python: >=3.10" in text
    assert re.search(r"^License(-Expression)?: Apache-2.0$", text, re.MULTILINE)


def test_wheel_works_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    python("-m", "pip", "install", *QUIET_PIP, "--target", str(target), str(wheel))
    code = "import soft_models, timm; print(soft_models.__file__); timm.create_model('soft_tiny', device='meta')"
    where = python("-W", "error", "-c", code, cwd=tmp_path, PYTHONPATH=str(target)).strip()
    assert Path(where).is_relative_to(target)


@pytest.mark.slow
def test_distributions_build_clean_and_pass_twine(tmp_path: Path) -> None:
    pytest.importorskip("build")
    pytest.importorskip("twine")
    for file in repository_files():
        copy = tmp_path / "source" / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    python("-m", "build", "--no-isolation", "--outdir", str(tmp_path / "dist"), cwd=tmp_path / "source")
    built = sorted((tmp_path / "dist").iterdir())
    assert [file.suffix for file in built] == [".whl", ".gz"]
    python("-m", "twine", "check", "--strict", *map(str, built))
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "setup.cfg", "soft_models/py.typed"} <= names


@pytest.mark.slow
@pytest.mark.parametrize("timm_version", ["installed", "lowest", "newest"])
def test_wheel_works_in_an_environment_of_its_own(
    timm_version: str, wheel: Path, config: configparser.ConfigParser, tmp_path: Path
) -> None:
    python("-m", "venv", str(tmp_path / "venv"))
    own = tmp_path / "venv" / "bin"
    subprocess.run([own / "pip", "install", *QUIET_PIP, wheel], check=True, cwd=tmp_path)
    if timm_version != "installed":
        (floor,) = (line for line in lines(config["options"]["install_requires"]) if line.startswith("timm"))
        wanted = floor.replace(">=", "==") if timm_version == "lowest" else "timm"
        if subprocess.run([own / "pip", "install", "--quiet", "--no-deps", wanted]).returncode:
            pytest.skip(f"{wanted} cannot be downloaded")
    # The dependencies are those of this environment, by a path file: they are gigabytes, and not what is tested.
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "zz-dependencies.pth").write_text(str(Path(timm.__file__).parent.parent), encoding="utf-8")
    code = (
        "import soft_models, timm, torch; print(soft_models.__file__); "
        "print(tuple(timm.create_model('soft_tiny', num_classes=10)(torch.zeros(1, 3, 64, 64)).shape))"
    )
    result = subprocess.run([own / "python", "-c", code], check=True, cwd=tmp_path, capture_output=True, text=True)
    where, shape = result.stdout.splitlines()
    assert Path(where).is_relative_to(site)
    assert shape == "(1, 10)"
    for command in ("soft-train", "soft-validate", "soft-predict", "soft-export"):
        result = subprocess.run([own / command, "--help"], check=True, cwd=tmp_path, capture_output=True, text=True)
        assert "--checkpoint" in result.stdout


def repository_files() -> list[Path]:
    """Text files under version control."""
    command = ["git", "ls-files", "-z"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if result.returncode:
        pytest.skip("not a checkout")
    paths = [ROOT / name for name in result.stdout.split("\0") if name]
    return [path for path in paths if path.is_file() and b"\0" not in path.read_bytes()[:4096]]


def test_repository_speaks_no_machine_path() -> None:
    homes = "|".join(["home", "root", "Users"])
    pattern = re.compile(
        rf"(?<![\w.*])/({homes})/[\w.]+" + (f"|{re.escape(str(ROOT))}/" if len(ROOT.parts) > 2 else "")
    )
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in repository_files()
        if (match := pattern.search(path.read_text(encoding="utf-8", errors="replace")))
    ]
    assert not found, "paths that exist on one machine only"


def test_repository_holds_no_large_file() -> None:
    large = [f"{path.relative_to(ROOT)}: {path.stat().st_size}" for path in repository_files()
             if path.stat().st_size > 2**20]  # fmt: skip
    assert not large, "files of more than 1 MiB (weights, data) do not belong into the repository"


@pytest.mark.parametrize(
    "path", [path for path in PACKAGE.rglob("*.py") if '__name__ == "__main__"' in path.read_text()], ids=str
)
def test_commands_log_under_the_package_when_run_as_modules(path: Path) -> None:
    assert "getLogger(__name__)" not in path.read_text(), "there the name is __main__, which nothing shows"
