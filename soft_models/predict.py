"""Name what images show: ``soft-predict``, or ``python -m soft_models.predict``.

    python -m soft_models.predict photo.jpg --checkpoint output/train/pets/model_best.pth.tar
    python -m soft_models.predict folder --checkpoint ... --topk 1 --results-file result.csv
    python -m soft_models.predict photo.jpg --model resnet18        published weights

Model, classes and preprocessing come from the checkpoint unless options say otherwise. The exit code is 1 if an image
could not be read; the others are predicted all the same.
"""

import io
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from timm.data import ImageNetInfo, infer_imagenet_subset
from timm.utils import natural_key
from torch import Tensor, nn

from soft_models.commands.cli import parse_config
from soft_models.commands.files import KEEP_BYTES, make_folder, write_results
from soft_models.commands.script import run_script
from soft_models.errors import UsageError, some_of
from soft_models.training.augment import BatchTransform
from soft_models.training.config import TrainedConfig, check_least
from soft_models.training.data import ImageReport, ImageSamples, build_loader, eval_transform
from soft_models.training.folders import image_extensions, read_class_map, walk
from soft_models.training.runtime import Runtime, build_autocast, running
from soft_models.training.sampling import EvalBatches
from soft_models.training.sources import FolderSource
from soft_models.training.trained import Stored, load_trained, prepare, read_stored, resolve_input

_logger = logging.getLogger("soft_models.predict")  # also when run as __main__


@dataclass(frozen=True, kw_only=True)
class PredictConfig(TrainedConfig):
    """Options of a prediction."""

    images: tuple[str, ...] = ()  # image files, and folders of them
    class_map: str = ""  # text file with one class name per line, in label order; by default the checkpoint's classes
    topk: int = 5  # classes named for each image
    batch_size: int = 32  # images per step
    workers: int = 0  # loader processes; 0 loads in the main one

    POSITIONAL: ClassVar[str] = "images"


def main(argv: Sequence[str] | None = None) -> int:
    """Predict as the command line says; returns the exit code."""
    return run_script("predict", lambda: run(parse_config(PredictConfig, argv, __doc__ or "")))


def run(cfg: PredictConfig) -> int:
    """Predict as configured: print every image's classes, and write them to a file where asked for."""
    if cfg.results_file:
        make_folder(Path(cfg.results_file).parent)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors=KEEP_BYTES)
    with running(cfg) as runtime:
        results = []
        for result in predict(cfg, runtime):
            sys.stdout.write(as_text(result))
            sys.stdout.flush()
            results.append(result)
    if cfg.results_file:
        write_results(Path(cfg.results_file), results, [row for result in results for row in as_rows(result)])
    return int(any("error" in result for result in results))


def predict(cfg: PredictConfig, runtime: Runtime) -> Iterator[dict[str, Any]]:
    """Predict as configured, batch by batch.

    Yields:
        For every image its path as ``image`` and, likeliest first, ``classes``: each with ``label`` (index in the
        head), ``name`` and ``probability`` (softmax, 0 to 1). An image that cannot be read has ``error`` instead.

    Raises:
        UsageError: Something in the configuration, the images' names or the checkpoint is wrong.
        CheckpointError: The checkpoint cannot be read.
    """
    if runtime.world_size > 1:
        raise UsageError(f"predict runs in one process, got {runtime.world_size}; start it without torchrun")
    check_least(cfg, 1, "topk")
    cfg, stored = read_stored(cfg)
    source = FolderSource([(path, 0) for path in find_images(cfg.images)])
    model = load_trained(cfg, stored)
    data_config, mode = resolve_input(cfg, model, stored)
    names = class_names(cfg, stored, model)
    prepare(cfg, model, runtime).eval()
    samples = ImageSamples(source, eval_transform(data_config), mode)
    loader = build_loader(samples, EvalBatches(len(samples), cfg.batch_size), cfg, runtime.device)
    transform = BatchTransform(runtime.device, data_config, channels_last=cfg.channels_last)
    report, autocast, done = ImageReport(source, "those asked for", None), build_autocast(cfg, runtime.device), 0
    for batch in loader:
        report.add(batch)
        results = {name: {"image": name, "error": reason} for name, reason in batch.broken}
        if batch.indices:
            with torch.no_grad(), autocast:
                logits = model(transform(batch)[0])
            for item, probabilities in zip(batch.indices, logits.float().softmax(1).cpu(), strict=True):
                results[source.name(item)] = {
                    "image": source.name(item),
                    "classes": likeliest(probabilities, names, cfg.topk),
                }
        count = len(batch.indices) + len(batch.broken)
        yield from (results[source.name(item)] for item in range(done, done + count))
        done += count
    report.log(runtime)


def find_images(arguments: Sequence[str]) -> list[str]:
    """Paths of the images: files as named, folders with all images below them in natural order.

    Raises:
        UsageError: None are named, a path does not exist, or a folder holds no images.
    """
    if not arguments:
        raise UsageError("no images: name files or folders of them")
    paths: list[str] = []
    for argument in arguments:
        path = Path(argument)
        if not path.exists():
            raise UsageError(f"no image or folder {argument!r}")
        if not path.is_dir():
            paths.append(argument)
            continue
        found = [str(Path(folder, name)) for folder, _, names, _ in walk(path) for name in names]
        if not found:
            raise UsageError(f"{argument} holds no images; known are {some_of(sorted(image_extensions()))}")
        paths.extend(sorted(found, key=natural_key))
    return list(dict.fromkeys(paths))


def class_names(cfg: PredictConfig, stored: Stored, model: nn.Module) -> list[str]:
    """A name for every output of the head: from ``class_map``, the checkpoint, or ImageNet, else its number.

    Raises:
        UsageError: More names than outputs.
    """
    count = int(getattr(model, "num_classes", 0))
    if count < 1:
        raise UsageError(f"{cfg.model} has no classifier: --num-classes must be at least 1")
    known = stored.classes or getattr(model, "pretrained_cfg", {}).get("label_names")
    names: list[str] = read_class_map(cfg.class_map) if cfg.class_map else list(known or [])
    subset = infer_imagenet_subset(model)
    if not names and subset:
        _logger.info("classes are taken to be those of %s, as the head has %d outputs; see --class-map", subset, count)
        info = ImageNetInfo(subset)
        names = [info.index_to_description(index) for index in range(count)]
    if len(names) > count:
        raise UsageError(f"{len(names)} class names for a head of {count} outputs: they do not belong together")
    if len(names) < count:
        _logger.warning("%d of the head's %d outputs have no name and are shown by number", count - len(names), count)
    return names + [str(index) for index in range(len(names), count)]


def likeliest(probabilities: Tensor, names: Sequence[str], count: int) -> list[dict[str, Any]]:
    """The ``count`` classes of highest probability, as in :func:`predict`."""
    values, labels = probabilities.topk(min(count, len(names)))
    pairs = zip(labels.tolist(), values.tolist(), strict=True)
    return [{"label": label, "name": names[label], "probability": value} for label, value in pairs]


def as_text(result: dict[str, Any]) -> str:
    """A result in lines for people."""
    if "error" in result:
        return f"{result['image']}: unreadable\n"
    lines = [f"{100 * found['probability']:6.2f} %  {found['name']}" for found in result["classes"]]
    return "\n".join([f"{result['image']}:", *lines]) + "\n"


def as_rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """A result in rows of a table, one for each class; an unreadable image has one with its error."""
    if "error" in result:
        return [{"image": result["image"], "error": result["error"]}]
    return [{"image": result["image"], "rank": rank, **found} for rank, found in enumerate(result["classes"], start=1)]


if __name__ == "__main__":
    sys.exit(main())
