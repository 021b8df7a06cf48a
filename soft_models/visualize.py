"""What attention looks at: weights of chosen query points over an image, as arrays and as a picture.

    python -m soft_models.visualize photo.jpg --model soft_tiny --checkpoint model_best.pth.tar
    python -m soft_models.visualize photo.jpg --model soft_tiny --point 120,80 300,200 --stage 1 4 --head 1 2
    python -m soft_models.visualize photo.jpg --model soft_tiny pyramid_tiny_softmax vvt_tiny     one below the other
    python -m soft_models.visualize skimage:coffee                a photograph that scikit-image ships

Each panel shows where one query, the cross, takes its values from: red to yellow for positive weights, blue for
negative ones, which SOFT and Nyströmformer have, relative to the panel's largest. Without a checkpoint the weights are
random. In Python, :func:`attention_maps` returns the arrays.
"""

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

from soft_models.commands.cli import parse_config
from soft_models.commands.files import make_folder, write_atomic
from soft_models.commands.script import run_script, setup_logging
from soft_models.errors import UsageError, suggestion
from soft_models.layers import MIN_SIZE
from soft_models.training.config import TrainedConfig
from soft_models.training.images import read_image
from soft_models.training.models import check_input
from soft_models.training.trained import load_or_random

__all__ = ["AttentionMap", "attention_layers", "attention_maps", "draw_map", "draw_sheet"]

GAP = 8  # pixels between panels
COARSE = 4  # cells along a side, below which a map shows little
EVEN = 1.5  # largest weight over the mean, below which a panel of one colour shows next to nothing
DEFAULT_STAGES = 4  # shown of a model with more
# Share of the largest weight, colour, opacity over the photograph.
COLOURS = np.array(
    [(-1, 0, 220, 255, 0.9), (-0.4, 0, 80, 255, 0.6), (0, 0, 0, 0, 0), (0.4, 230, 20, 0, 0.6), (1, 255, 235, 0, 0.9)]
)
INK, MARK = (30, 30, 30), (255, 255, 255)

_logger = logging.getLogger("soft_models.visualize")  # also when run as __main__


@dataclass(frozen=True, kw_only=True)
class VisualizeConfig:
    """Options of the picture."""

    image: str = ""  # file, or skimage:NAME for a photograph that scikit-image ships
    model: tuple[str, ...] = ()  # names of ours, one below the other; by default the checkpoints'
    checkpoint: tuple[str, ...] = ()  # file of the weights of each model; without any they are random
    num_classes: int | None = None  # classes of the heads; by default the checkpoints'
    model_kwargs: dict[str, Any] = field(default_factory=dict)  # key=value pairs for the models' constructors
    point: tuple[str, ...] = ()  # queries as x,y in pixels of the image file; by default its centre
    stage: tuple[int, ...] = ()  # stages, or blocks of a plain ViT, counted from 1; by default four of them
    block: int = -1  # block of each stage, counted from 1; -1 for its last
    head: tuple[int, ...] = ()  # heads, counted from 1; by default the mean over all
    size: int | None = None  # pixels that the image's shorter side is resized to; by default the model's image size
    panel: int = 224  # pixels of a panel's longer side in the picture
    output: str = "attention.png"  # picture to write

    POSITIONAL: ClassVar[str] = "image"


@dataclass(frozen=True)
class AttentionMap:
    """Weights that query points give to the pixels of one attention's map.

    Attributes:
        stage: Number of the stage (of the block in a plain ViT), from 0.
        stride: Image pixels that a cell of the map is wide and high.
        cells: Row and column of each query, ``(P, 2)``.
        weights: Of the pixels, ``(P, h, H, W)``, float32.
        prefix: Of the tokens in front of the pixels, such as a class token, ``(P, h, number of them)``.
    """

    stage: int
    stride: int
    cells: Tensor
    weights: Tensor
    prefix: Tensor


def attention_layers(model: nn.Module) -> list[tuple[int, list[nn.Module]]]:
    """Stride in pixels and attention modules of every stage of a pyramid, or of every block of a plain ViT.

    Raises:
        UsageError: The model has no attention that gives its weights, so it is none of ours.
    """
    layers = []
    inner = getattr(model, "model", model)  # of a features_only backbone, which lacks the stages that it does not need
    known = dict(inner.named_modules())
    for info in getattr(inner, "feature_info", ()):
        if info["module"] in known:
            modules = known[info["module"]].modules()
            layers.append((info["reduction"], [module for module in modules if hasattr(module, "attention_matrix")]))
    if not layers or not all(attentions for _, attentions in layers):
        raise UsageError(
            f"{type(model).__name__} has no attention of soft_models; python -m soft_models lists its models"
        )
    return layers


@torch.no_grad()
def attention_maps(
    model: nn.Module,
    image: Tensor,
    points: Sequence[tuple[float, float]],
    stages: Sequence[int] | None = None,
    block: int = -1,
) -> list[AttentionMap]:
    """Attention weights of chosen query points, stage by stage.

    Only the rows of these queries are computed, in memory O((P + M) N) for P points and M landmarks.

    Args:
        model: A model of ours, which runs in eval mode here.
        image: ``(1, in_chans, H, W)``, normalised.
        points: Queries as (x, y) in pixels of ``image``, x to the right and y down.
        stages: Stages, or blocks of a plain ViT, from 0; None for all.
        block: Block of each stage, from 0, or negative to count from its end; -1 in a plain ViT.

    Raises:
        UsageError: The model is none of ours, there is more than one image, or a point, stage or block does not exist.
    """
    layers = attention_layers(model)
    if len(image) != 1:
        raise UsageError(f"attention maps are of one image, got {len(image)}; pass image[:1]")
    check_points(points, (image.shape[-1], image.shape[-2]))
    found: dict[int, AttentionMap] = {}
    hooks, in_training = [], [module for module in model.modules() if module.training]
    model.eval()
    try:
        for stage in range(len(layers)) if stages is None else stages:
            if not 0 <= stage < len(layers):
                raise UsageError(f"stage {stage + 1} does not exist: the model has stages 1 to {len(layers)}")
            stride, attentions = layers[stage]
            if not -len(attentions) <= block < len(attentions):
                number, last = block if block < 0 else block + 1, len(attentions)
                raise UsageError(f"block {number} does not exist: stage {stage + 1} has blocks 1 to {last}")
            record = partial(record_rows, found, stage, stride, points)
            hooks.append(attentions[block].register_forward_pre_hook(record))
        model(image)
    finally:
        for hook in hooks:
            hook.remove()
        for module in in_training:  # not all: parts may be frozen
            module.training = True
    return [found[stage] for stage in sorted(found)]


def record_rows(
    found: dict[int, AttentionMap],
    stage: int,
    stride: int,
    points: Sequence[tuple[float, float]],
    attn: Any,
    inputs: tuple[Tensor, tuple[int, int]],
) -> None:
    """Forward pre-hook of an attention: keep the rows of the points' queries."""
    x, (H, W) = inputs
    cells = torch.tensor([cell_of(point, stride, (H, W)) for point in points])
    num_prefix = x.shape[1] - H * W
    rows = num_prefix + cells[:, 0] * W + cells[:, 1]
    weights = attn.attention_matrix(x, (H, W), rows=rows.to(x.device))[0].transpose(0, 1).float().cpu()  # (P, h, N)
    pixels = weights[..., num_prefix:].unflatten(-1, (H, W))
    found[stage] = AttentionMap(stage, stride, cells, pixels, weights[..., :num_prefix])


def cell_of(point: tuple[float, float], stride: int, feat_size: tuple[int, int]) -> tuple[int, int]:
    """Row and column of the cell that a point (x, y) lies in; the last cell reaches beyond the image's border."""
    return min(int(point[1] // stride), feat_size[0] - 1), min(int(point[0] // stride), feat_size[1] - 1)


def check_points(points: Sequence[tuple[float, float]], size: tuple[int, int]) -> None:
    for x, y in points:
        if not (0 <= x < size[0] and 0 <= y < size[1]):
            raise UsageError(f"point {x:g},{y:g} lies outside the image, which is {size[0]} x {size[1]} pixels")


def select_heads(weights: Tensor, heads: Sequence[int], stage: int) -> list[Tensor]:
    """Maps ``(H, W)`` of chosen heads, from 1, or the mean over all of them, from ``(h, H, W)``."""
    for head in heads:
        if not 1 <= head <= len(weights):
            raise UsageError(f"head {head} does not exist: stage {stage + 1} has heads 1 to {len(weights)}")
    return [weights[head - 1] for head in heads] if heads else [weights.mean(dim=0)]


def draw_map(
    photo: Image.Image, weights: Tensor, stride: int, point: tuple[float, float], panel: int = VisualizeConfig.panel
) -> Image.Image:
    """One panel: weights over the photograph in grey, with a cross at the query.

    Args:
        photo: The image that the model saw.
        weights: ``(H, W)``.
        stride: Pixels of ``photo`` per cell.
        point: The query, (x, y) in pixels of ``photo``.
        panel: Longer side of the result in pixels.
    """
    grey = np.asarray(fit_panel(photo.convert("L"), panel), dtype=np.float64) * 0.7 + 40
    heat = Image.fromarray((weights / weights.abs().amax().clamp(min=1e-30)).numpy().astype(np.float32))
    # The border's cells reach beyond the image: they are cut off, not squeezed into it.
    box = (0.0, 0.0, photo.width / stride, photo.height / stride)
    share = heat.resize((grey.shape[1], grey.shape[0]), Image.Resampling.BILINEAR, box=box)
    return with_cross(colour_over(grey, np.asarray(share)), photo, point)


def colour_over(grey: "np.ndarray", share: "np.ndarray") -> Image.Image:
    """``COLOURS`` of shares in -1..1 over grey values in 0..255."""
    *channels, opacity = (np.interp(share, COLOURS[:, 0], COLOURS[:, i]) for i in range(1, 5))
    pixels = np.stack([grey * (1 - opacity) + channel * opacity for channel in channels], axis=-1)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def fit_panel(photo: Image.Image, panel: int) -> Image.Image:
    scale = panel / max(photo.size)
    return photo.resize((round(photo.width * scale), round(photo.height * scale)), Image.Resampling.LANCZOS)


def with_cross(panel: Image.Image, photo: Image.Image, point: tuple[float, float]) -> Image.Image:
    """A panel of ``photo`` with a white cross, dark at its edges, at a point of the photograph."""
    draw, scale = ImageDraw.Draw(panel), max(panel.size) / max(photo.size)
    x, y = point[0] * scale, point[1] * scale
    for colour, width in ((INK, 5), (MARK, 2)):
        draw.line((x - 7, y, x + 7, y), colour, width)
        draw.line((x, y - 7, x, y + 7), colour, width)
    return panel


def draw_sheet(rows: Sequence[tuple[str, Sequence[tuple[str, Image.Image]]]]) -> Image.Image:
    """Rows of panels, each row and each panel with its title, and the scale of the colours below."""
    large, small = ImageFont.load_default(15), ImageFont.load_default(12)
    line, bar = 22, 48
    widths = [sum(panel.width + GAP for _, panel in panels) for _, panels in rows]
    heights = [2 * line + max(panel.height for _, panel in panels) + GAP for _, panels in rows]
    sheet = Image.new("RGB", (max([*widths, 420]) + GAP, sum(heights) + bar), "white")
    draw = ImageDraw.Draw(sheet)
    top = 0
    for (title, panels), height in zip(rows, heights, strict=True):
        draw.text((GAP, top + 4), title, INK, large)
        left = GAP
        for name, panel in panels:
            draw.text((left, top + line + 4), name, INK, small)
            sheet.paste(panel, (left, top + 2 * line))
            left += panel.width + GAP
        top += height
    ramp = np.tile(np.linspace(-1, 1, 200), (12, 1))
    sheet.paste(colour_over(np.full_like(ramp, 150), ramp), (GAP, top + 10))
    for position, text in ((0, "-1"), (100, "0"), (200, "1")):
        draw.text((GAP + position, top + 26), text, INK, small, anchor="ma" if position else "la")
    draw.text((GAP + 216, top + 8), "weight over the panel's largest", INK, small)
    return sheet


def load_photo(name: str) -> Image.Image:
    """The image of a file, or the photograph ``skimage:NAME``, in RGB.

    Raises:
        UsageError: There is none, or it cannot be read.
    """
    if not name:
        raise UsageError("no image: name a file, or skimage:NAME such as skimage:coffee")
    path = skimage_file(name.removeprefix("skimage:")) if name.startswith("skimage:") else Path(name)
    try:
        return read_image(path, "RGB")
    except FileNotFoundError:
        raise UsageError(f"no image file {name!r}") from None
    except Exception as error:  # decoders raise what they like
        raise UsageError(f"cannot read the image {name!r}: {' '.join(str(error).split())}") from None


def skimage_file(name: str) -> Path:
    try:
        import skimage
    except ImportError:
        raise UsageError("skimage:NAME needs scikit-image: pip install scikit-image") from None
    folder = Path(skimage.__file__).parent / "data"
    files = {path.stem: path for path in folder.iterdir() if path.suffix in (".png", ".jpg")}
    if name not in files:
        raise UsageError(f"scikit-image ships no image {name!r}{suggestion(name, files)}")
    return files[name]


def parse_point(text: str) -> tuple[float, float]:
    try:
        x, y = map(float, text.split(","))
    except ValueError:
        raise UsageError(f"--point takes x,y in pixels, got {text!r}") from None
    return x, y


def pair_models(cfg: VisualizeConfig) -> list[tuple[str, str]]:
    """Model name and checkpoint file of every row of the picture; either may be empty."""
    names, files = cfg.model, cfg.checkpoint
    if names and files and len(names) != len(files):
        raise UsageError(f"--model and --checkpoint must be as many, got {len(names)} and {len(files)}")
    if not names and not files:
        names = ("soft_tiny",)
    return list(zip(names or ("",) * len(files), files or ("",) * len(names), strict=True))


def prepare_photo(photo: Image.Image, size: int, data_config: dict[str, Any], mode: str) -> tuple[Image.Image, Tensor]:
    """The photograph with a shorter side of ``size`` pixels, and the tensor that the model takes."""
    scale = size / min(photo.size)
    resized = photo.resize((round(photo.width * scale), round(photo.height * scale)), Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(np.array(resized.convert(mode))).float() / 255
    pixels = pixels.reshape(*pixels.shape[:2], -1)
    return resized, ((pixels - torch.tensor(data_config["mean"])) / torch.tensor(data_config["std"])).permute(2, 0, 1)


def model_rows(
    cfg: VisualizeConfig, name: str, checkpoint: str, photo: Image.Image
) -> list[tuple[str, list[tuple[str, Image.Image]]]]:
    """Titled rows of panels of one model: one for each point and head."""
    points = [parse_point(text) for text in cfg.point] or [(photo.width / 2, photo.height / 2)]
    check_points(points, photo.size)
    loaded = load_or_random(
        TrainedConfig(model=name, checkpoint=checkpoint, num_classes=cfg.num_classes, model_kwargs=cfg.model_kwargs)
    )
    model, data_config, mode = loaded.model, loaded.data_config, loaded.image_mode
    count = len(attention_layers(model))
    size = data_config["input_size"][-1] if cfg.size is None else cfg.size
    if cfg.block < 1 and cfg.block != -1:
        raise UsageError(f"--block counts from 1, or is -1 for the last, got {cfg.block}")
    if cfg.panel < MIN_SIZE:
        raise UsageError(f"--panel must be at least {MIN_SIZE} pixels, got {cfg.panel}")
    if size < MIN_SIZE:
        raise UsageError(f"--size must be at least {MIN_SIZE} pixels, got {size}")
    resized, image = prepare_photo(photo, size, data_config, mode)
    check_input(model, image.shape, "--size")
    inside = [(x * resized.width / photo.width, y * resized.height / photo.height) for x, y in points]
    stages = [stage - 1 for stage in cfg.stage]
    if not stages:  # the last one among them
        stages = [(i + 1) * count // min(count, DEFAULT_STAGES) - 1 for i in range(min(count, DEFAULT_STAGES))]
    maps = attention_maps(model, image[None], inside, stages, cfg.block if cfg.block < 0 else cfg.block - 1)
    unit = "stage" if hasattr(model, "stages") else "block"
    H, W = maps[-1].weights.shape[-2:]
    if min(H, W) < COARSE:
        _logger.info("%s %d has a map of %d x %d: a larger --size draws finer ones", unit, maps[-1].stage + 1, W, H)
    rows = []
    for i, point in enumerate(inside):
        seen = (f"{resized.width} x {resized.height} pixels", with_cross(fit_panel(resized, cfg.panel), resized, point))
        chosen = [select_heads(found.weights[i], cfg.head, found.stage) for found in maps]
        for j, head in enumerate(cfg.head or (0,)):
            panels = [seen]
            for found, weights in zip(maps, (heads[j] for heads in chosen), strict=True):
                title = f"{unit} {found.stage + 1}: {weights.shape[1]} x {weights.shape[0]}"
                if weights.abs().amax() < EVEN * weights.abs().mean():
                    title += ", nearly even"
                panels.append((title, draw_map(resized, weights, found.stride, point, cfg.panel)))
            what = f"head {head}" if head else "mean of the heads"
            where = f"query at {points[i][0]:g},{points[i][1]:g} of {photo.width} x {photo.height}"
            rows.append((f"{loaded.name}, {where}, {what}", panels))
    return rows


def visualize(cfg: VisualizeConfig) -> int:
    """Draw as configured; returns the exit code.

    Raises:
        UsageError: Something in the options is wrong.
    """
    output = Path(cfg.output)
    if output.suffix.lower() != ".png":
        raise UsageError(f"--output must end with .png, got {cfg.output!r}")
    photo = load_photo(cfg.image)
    if output.exists() and output.resolve() == Path(cfg.image).resolve():
        raise UsageError(f"--output {cfg.output!r} is the image itself; name another file")
    make_folder(output.parent)
    rows = [row for name, checkpoint in pair_models(cfg) for row in model_rows(cfg, name, checkpoint, photo)]
    sheet = draw_sheet(rows)
    write_atomic(output, lambda file: sheet.save(file, format="PNG", optimize=True))
    _logger.info("%s: %d x %d pixels", output, *sheet.size)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    setup_logging()
    return run_script("visualize", lambda: visualize(parse_config(VisualizeConfig, argv, __doc__ or "")))


if __name__ == "__main__":
    sys.exit(main())
