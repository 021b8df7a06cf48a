"""Datasets and loaders: exact about random draws, open about broken images."""

import logging
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from PIL import Image
from timm.data import create_transform
from timm.data.auto_augment import AugmentOp, posterize
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from soft_models.errors import RunStopped, UsageError, some_of

from .config import ModelConfig, TrainConfig
from .images import asks_to_be_turned
from .runtime import Runtime
from .sampling import Draw, EvalBatches, TrainBatches, seed_host
from .sources import Source

_logger = logging.getLogger(__name__)


class Sample(NamedTuple):
    """One decoded and transformed image."""

    image: Tensor
    target: int
    item: int
    turned: bool  # EXIF data ask for another orientation, see asks_to_be_turned


class Broken(NamedTuple):
    """An image that could not be read or transformed."""

    name: str
    reason: str


class Batch(NamedTuple):
    """Images as bytes, their labels and indices, and which images could not be read or may lie on their side."""

    images: Tensor
    targets: Tensor
    indices: list[int]
    broken: list[Broken]
    turned: list[int]


class ImageSamples(Dataset[Sample | Broken]):
    """Transformed images of a split, each under its own seed.

    Args:
        source: Where the images come from.
        transform: From a PIL image to a byte tensor or array.
        mode: PIL mode that the transform expects.
    """

    def __init__(self, source: Source, transform: Callable[[Image.Image], Any], mode: str) -> None:
        self.source, self.transform, self.mode = source, transform, mode

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, draw: Draw) -> Sample | Broken:
        try:
            image, target = self.source.load(draw.item, self.mode)
        except Exception as error:  # decoders raise what they like on broken files
            return Broken(self.source.name(draw.item), f"{type(error).__name__}: {error}")
        seed_host(draw.seed)
        try:
            pixels = torch.as_tensor(self.transform(image))
        except Exception as error:  # one image in a thousand must not end a run
            return Broken(self.source.name(draw.item), f"its transform failed, {type(error).__name__}: {error}")
        return Sample(pixels, target, draw.item, asks_to_be_turned(image))


def collate(items: Sequence[Sample | Broken]) -> Batch:
    """Batch what could be read, list what could not."""
    samples = [item for item in items if isinstance(item, Sample)]
    broken = [item for item in items if isinstance(item, Broken)]
    images = torch.stack([sample.image for sample in samples]) if samples else torch.empty(0, dtype=torch.uint8)
    targets = torch.tensor([sample.target for sample in samples], dtype=torch.long)
    turned = [sample.item for sample in samples if sample.turned]
    return Batch(images, targets, [sample.item for sample in samples], broken, turned)


class ImageReport:
    """What was odd about the images of a split.

    Args:
        source: The images.
        title: What to call the split.
        num_classes: Of the model, if it tells; other labels stop the run.
    """

    def __init__(self, source: Source, title: str, num_classes: int | None) -> None:
        self.source, self.title, self.num_classes = source, title, num_classes
        self.broken: set[str] = set()
        self.turned: set[str] = set()
        self.told = False

    def add(self, batch: Batch) -> None:
        """Take note of a batch; an image that was skipped is named the first time.

        Raises:
            RunStopped: A label is none of the model's, where a dataset does not tell its classes beforehand.
        """
        for item, label in zip(batch.indices, batch.targets.tolist(), strict=True):
            if self.num_classes is not None and not 0 <= label < self.num_classes:
                raise RunStopped(
                    f"{self.source.name(item)} of {self.title} has label {label}, and the model {self.num_classes} "
                    "classes, from 0 on: give --num-classes, or a split with such labels"
                )
        for name, reason in batch.broken:
            if name not in self.broken:
                _logger.warning("skipped unreadable image %s (%s)", name, reason)
            self.broken.add(name)
        self.turned.update(self.source.name(item) for item in batch.turned)

    def log(self, runtime: Runtime) -> None:
        """Say what there was, the first time only, in all processes together, which must all call."""
        if self.told:
            return
        self.told = True
        broken = sorted({name for names in runtime.gather_objects(list(self.broken)) for name in names})
        turned = sorted({name for names in runtime.gather_objects(list(self.turned)) for name in names})
        if broken:
            _logger.warning("unreadable images of %s, skipped: %d: %s", self.title, len(broken), some_of(broken))
        if turned:
            _logger.warning(
                "%d images of %s are shown by viewers in another orientation than the model sees, as their EXIF data "
                "ask (the model sees them as in timm, unturned; rewrite the files to change that): %s",
                len(turned), self.title, some_of(turned),
            )  # fmt: skip


def check_batch_size(length: int, batch_size: int, world_size: int, split: str) -> None:
    """Refuse a batch that the data cannot fill.

    Raises:
        UsageError: Fewer images per process than a batch.
    """
    share = length // world_size
    if share < batch_size:
        per_rank = f", {share} for each of {world_size} processes" if world_size > 1 else ""
        raise UsageError(
            f"--batch-size {batch_size} is larger than the dataset: {split} has {length} images{per_rank}; lower it"
        )


def image_mode(in_chans: int, mode: str | None) -> str:
    """PIL mode of images with ``in_chans`` channels.

    Raises:
        UsageError: No mode is given and none is usual for so many channels, or the one given has others.
    """
    usual = {1: "L", 3: "RGB"}
    if mode is None and in_chans not in usual:
        raise UsageError(f"--in-chans {in_chans} needs --input-img-mode: a PIL mode with so many channels")
    mode = mode or usual[in_chans]
    try:
        channels = Image.getmodebands(mode)
    except KeyError:
        raise UsageError(f"unknown --input-img-mode {mode!r}; choose one of Pillow's, such as RGB, L or RGBA") from None
    if channels != in_chans:
        raise UsageError(f"--input-img-mode {mode} has {channels} channels and the model takes {in_chans}")
    return mode


def train_transform(cfg: TrainConfig, data_config: dict[str, Any]) -> Callable[[Image.Image], Any]:
    """timm's training transform, to bytes; mixing, normalising and erasing follow on the device.

    Raises:
        UsageError: timm knows no such policy of augmentation, or does not take another option of it.
    """
    try:
        transform = create_transform(
            data_config["input_size"], is_training=True, no_aug=cfg.no_aug, train_crop_mode=cfg.train_crop_mode,
            scale=cfg.scale, ratio=cfg.ratio, hflip=cfg.hflip, vflip=cfg.vflip, color_jitter=cfg.color_jitter,
            color_jitter_prob=cfg.color_jitter_prob, grayscale_prob=cfg.grayscale_prob or 0.0,
            gaussian_blur_prob=cfg.gaussian_blur_prob or 0.0, auto_augment=cfg.aa,
            interpolation=cfg.train_interpolation or data_config["interpolation"], mean=data_config["mean"],
            std=data_config["std"], use_prefetcher=True,
        )  # fmt: skip
    except (AssertionError, KeyError, ValueError) as error:
        policy = f" by --aa {cfg.aa}" if cfg.aa else ""
        raise UsageError(f"cannot augment{policy}: {error}") from None
    for op in augment_ops(transform):
        if op.aug_fn is posterize:
            op.aug_fn = posterize_some
    return transform


def augment_ops(part: Any) -> Iterator[AugmentOp]:
    """Operations of the auto-augment policy within a transform of timm's, if it has one."""
    if isinstance(part, AugmentOp):
        yield part
    elif isinstance(part, list | tuple):
        for inner in part:
            yield from augment_ops(inner)
    else:
        for name in ("transforms", "ops", "policy"):
            yield from augment_ops(getattr(part, name, ()))


def posterize_some(image: Image.Image, bits: int, **options: Any) -> Image.Image:
    """timm's operation with at least one bit: its strongest levels ask for none, which Pillow 13 refuses."""
    return posterize(image, max(bits, 1), **options)


def eval_transform(data_config: dict[str, Any]) -> Callable[[Image.Image], Any]:
    """timm's evaluation transform, to bytes."""
    return create_transform(
        data_config["input_size"], is_training=False, interpolation=data_config["interpolation"],
        mean=data_config["mean"], std=data_config["std"], crop_pct=data_config["crop_pct"],
        crop_mode=data_config["crop_mode"], use_prefetcher=True,
    )  # fmt: skip


def build_loader(
    samples: ImageSamples, batches: TrainBatches | EvalBatches, cfg: ModelConfig, device: torch.device
) -> DataLoader[Any]:
    """Loader of ``batches``, with ``cfg.workers`` processes or none."""
    return DataLoader(
        samples, batch_sampler=batches, num_workers=cfg.workers, collate_fn=collate,
        pin_memory=cfg.pin_mem or device.type == "cuda", persistent_workers=cfg.workers > 0,
        worker_init_fn=_start_worker,
        # The loader draws a base seed, which nothing uses: from its own generator, to leave the global one alone.
        generator=torch.Generator(),
    )  # fmt: skip


def _start_worker(_: int) -> None:
    # The main process decides when to stop, and stops the workers; a signal to the whole group must not do it first.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
