"""Export a model for use without this package: ``python -m soft_models.export NAME --format {onnx,torch}``.

    python -m soft_models.export soft_tiny --checkpoint output/train/pets/model_best.pth.tar --output pets.onnx
    python -m soft_models.export vvt_tiny --format torch --output vvt_tiny.pt2

``onnx`` is for onnxruntime and the like, ``torch`` for ``torch.export.load``. The file takes any batch and, unless
--fixed-size is given, images of any size that the model takes; a program of torch needs more than one pixel in each
map, which is more than 32 in the image. It is read back and compared with the model at batches
of 1, 2 and 5, and at two sizes if it takes any, before it takes its name. Along with the model it holds a JSON text
with the model's name, its preprocessing and its classes: in ONNX the metadata "soft_models", in a program the extra
file "soft_models.json".
"""

import importlib
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from timm.models import safe_model_name
from timm.utils import reparameterize_model
from torch import Tensor, nn

from soft_models.commands.cli import parse_config
from soft_models.commands.files import make_folder, replacing
from soft_models.commands.script import run_script, setup_logging
from soft_models.errors import RunStopped, UsageError
from soft_models.training.config import TrainedConfig, plain_values
from soft_models.training.trained import load_or_random

_logger = logging.getLogger("soft_models.export")  # also when run as __main__

BATCHES = (1, 2, 5)
TOLERANCE = 1e-4  # largest deviation of the outputs, over their largest value
METADATA = "soft_models"
AXES = ("batch", "height", "width")  # names of those that are free


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Options of an export."""

    model: str = ""  # any timm or soft_models name; by default the checkpoint's
    checkpoint: str = ""  # file of the weights; without one they are random
    use_ema: bool | None = None  # averaged weights or not; by default the averaged ones of a run that kept them
    num_classes: int | None = None  # classes of the head; by default the checkpoint's
    model_kwargs: dict[str, Any] = field(default_factory=dict)  # key=value pairs for the model's constructor
    img_size: int | None = None  # pixels per side that the export is made with; by default the model's
    input_size: tuple[int, ...] | None = None  # channels, height and width; wins over img_size
    input_img_mode: str | None = None  # PIL mode of the images, told to those who use the file
    format: Literal["onnx", "torch"] = "onnx"  # onnx or torch
    output: str = ""  # file to write; by default the given model's name, or model, with .onnx or .pt2
    fixed_size: bool = False  # images of one size only; a smaller and sometimes faster graph
    overwrite: bool = False  # replace the file if it is there

    POSITIONAL: ClassVar[str] = "model"


def main(argv: Sequence[str] | None = None) -> int:
    """Export as the command line says; returns the exit code."""
    setup_logging()
    return run_script("export", lambda: export(parse_config(ExportConfig, argv, __doc__ or "")))


def export(cfg: ExportConfig) -> int:
    """Export as configured.

    Raises:
        UsageError: Something in the configuration or the checkpoint is wrong, or a library is missing.
        CheckpointError: The checkpoint cannot be read.
        RunStopped: The model cannot be exported, or the written file gives other outputs.
    """
    suffix = ".onnx" if cfg.format == "onnx" else ".pt2"
    path = Path(cfg.output or safe_model_name(cfg.model or "model") + suffix)
    if path.suffix != suffix:
        raise UsageError(f"--output must end in {suffix} for --format {cfg.format} (onnx or torch), got {cfg.output!r}")
    if path.exists() and not cfg.overwrite:
        raise UsageError(f"{path} exists; give --output another name, or --overwrite")
    make_folder(path.parent)
    if cfg.format == "onnx":
        require("onnx", "onnxscript", "onnxruntime")
    model, described = load_model(cfg)
    size = described["input_size"]
    with replacing(path) as temporary:
        write = write_onnx if cfg.format == "onnx" else write_torch
        try:
            # Not with the size of the position tables, which at that size are not resized in the graph.
            *_, shape = sample_sizes(size, not cfg.fixed_size)
            write(model, torch.zeros(2, *shape), not cfg.fixed_size, json.dumps(described), temporary)
            deviation = largest_deviation(model, read(cfg.format, temporary), size, not cfg.fixed_size)
        except Exception as error:  # exporters raise what they like
            advice = "" if cfg.fixed_size else "; try --fixed-size or a larger --img-size"
            raise RunStopped(f"the model cannot be exported{advice} ({root_cause(error)})") from error
        if not deviation <= TOLERANCE:
            raise RunStopped(f"the exported model deviates by {deviation:.1e} from the model; nothing is written")
    above = " of more than one pixel in each map" if cfg.format == "torch" else ""
    sizes = "this size only" if cfg.fixed_size else f"any size{above}"
    _logger.info(
        "wrote %s: any batch, %s; read back at batches %s, largest deviation %.1e",
        path, sizes, ", ".join(map(str, BATCHES)), deviation,
    )  # fmt: skip
    return 0


def root_cause(error: BaseException) -> str:
    """The error that started it all, in one line; exporters wrap it in advice to their own developers."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def require(*libraries: str) -> None:
    """Refuse what needs a library that is not there.

    Raises:
        UsageError: One cannot be imported.
    """
    for library in libraries:
        try:
            importlib.import_module(library)
        except ImportError:
            raise UsageError(f"this needs {library}: pip install {' '.join(libraries)}") from None


def load_model(cfg: ExportConfig) -> tuple[nn.Module, dict[str, Any]]:
    """The model in eval mode, convolutions and normalisations merged; its name, preprocessing and classes."""
    names = (
        "model",
        "checkpoint",
        "use_ema",
        "num_classes",
        "model_kwargs",
        "img_size",
        "input_size",
        "input_img_mode",
    )
    loaded = load_or_random(TrainedConfig(**{name: getattr(cfg, name) for name in names}))
    described = {
        "model": loaded.name,
        **plain_values(loaded.data_config),
        "input_img_mode": loaded.image_mode,
        "classes": loaded.classes,
    }
    return reparameterize_model(loaded.model.eval()), described


def free_axes(any_size: bool) -> dict[int, Any]:
    """Which axes of the images are free."""
    free: dict[int, Any] = {0: torch.export.Dim(AXES[0], min=1, max=2**16)}
    return {**free, 2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC} if any_size else free


def write_torch(model: nn.Module, images: Tensor, any_size: bool, description: str, path: Path) -> None:
    """Write a program for ``torch.export.load``."""
    program = torch.export.export(model, (images,), dynamic_shapes=(free_axes(any_size),))
    torch.export.save(program, path, extra_files={f"{METADATA}.json": description})


def write_onnx(model: nn.Module, images: Tensor, any_size: bool, description: str, path: Path) -> None:
    """Write an ONNX file with input ``images`` and output ``logits``."""
    free: dict[int, Any] = dict(zip((0, 2, 3), AXES, strict=True)) if any_size else {0: AXES[0]}
    if torch.__version__ < "2.7":  # which takes no names
        free = free_axes(any_size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's remarks about itself
        program = torch.onnx.export(
            model, (images,), dynamo=True, dynamic_shapes=(free,), verbose=False, input_names=["images"],
            output_names=["logits"],
        )  # fmt: skip
    assert program is not None
    program.model.metadata_props[METADATA] = description
    program.save(path)


def read(kind: str, path: Path) -> Callable[[Tensor], Tensor]:
    """The model in a file, as a function."""
    if kind == "torch":
        return torch.export.load(path).module()
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def sample_sizes(size: Sequence[int], any_size: bool) -> Iterator[tuple[int, ...]]:
    """The size exported with and, where any is free, a larger one of another shape."""
    channels, height, width = size
    yield channels, height, width
    if any_size:
        yield channels, height + 32, width + 64


@torch.no_grad()
def largest_deviation(
    model: nn.Module, exported: Callable[[Tensor], Tensor], size: Sequence[int], any_size: bool
) -> float:
    """Largest difference of the outputs over their largest value, at several batches and all ``sample_sizes``."""
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for shape in sample_sizes(size, any_size):
        for batch in BATCHES:
            images = torch.randn(batch, *shape, generator=generator)
            expected = model(images)
            difference = (exported(images) - expected).abs().max() / expected.abs().max().clamp(min=1e-12)
            worst = max(worst, difference.item()) if difference.isfinite() else float("inf")
    return worst


if __name__ == "__main__":
    sys.exit(main())
