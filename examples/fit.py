"""What the examples share: command line, training on scenes, a checkpoint to go on from, TensorBoard log, test."""

import argparse
import json
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from timm.scheduler import CosineLRScheduler
from torch import Tensor, nn

from examples.scenes import Scene, Scenes
from soft_models.checkpoints import read_checkpoint
from soft_models.commands.files import RunLock, make_folder, write_atomic
from soft_models.commands.progress import Progress
from soft_models.commands.script import run_script, setup_logging
from soft_models.downstream import MapBackbone
from soft_models.errors import RunStopped, UsageError
from soft_models.training.runtime import StopRequest
from soft_models.training.saver import LAST
from soft_models.training.scalars import ScalarLog

TEST_SEED = 0  # whatever --seed is, runs are compared on the same scenes
BATCH_SIZE = 4
WEIGHT_DECAY = 0.05  # of all but biases and norms
LOG_INTERVAL = 10  # steps
SAVE_INTERVAL = 50  # steps
ROWS, COLUMNS = 4, 4  # of the scenes in the picture
FREE = ("data", "output", "resume", "test_scenes")  # options that may change on resume

_logger = logging.getLogger("soft_models.examples")


@dataclass(frozen=True)
class Example:
    """One task on the scenes.

    Args:
        name: Of the module, and of the output folder unless one is named.
        build: From the options to a model.
        losses: From the model and a batch of scenes to the parts of the loss.
        evaluate: From the model and scenes to metrics by name, and one picture of each scene.
        steps: Default of ``--steps``.
        rate: Default of ``--lr``.
        needs: Modules that ``evaluate`` imports.
        head_scale: Learning rate of what is new, over that of the backbone.
    """

    name: str
    build: Callable[[argparse.Namespace], nn.Module]
    losses: Callable[[Any, list[Scene]], dict[str, Tensor]]
    evaluate: Callable[[Any, Iterator[Scene]], tuple[dict[str, float], list[Image.Image]]]
    steps: int
    rate: float
    needs: tuple[str, ...] = ()
    head_scale: float = 1.0


def run_example(example: Example, doc: str, argv: list[str] | None) -> int:
    """Train and test as the command line says; returns the exit code."""
    options = parse_options(example, doc, argv)
    setup_logging()
    return run_script(example.name, lambda: run(example, options))


def parse_options(example: Example, doc: str, argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog=f"python -m examples.{example.name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("output", example.name), help="folder of the run")
    parser.add_argument("--data", type=Path, default=Path("data/digits"), help="digits; built where there are none")
    parser.add_argument("--model", default="soft_tiny", help="a registered name")
    parser.add_argument(
        "--checkpoint", type=Path, help="classifier to start from, such as the demo's model_best.pth.tar"
    )
    parser.add_argument("--steps", type=positive, default=example.steps, help=f"training steps of {BATCH_SIZE} scenes")
    parser.add_argument("--lr", type=rate, default=example.rate, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of weights and training scenes; test scenes are the same")
    parser.add_argument("--test-scenes", type=positive, default=100, help="scenes to test on")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --output")
    return parser.parse_args(argv)


def positive(text: str) -> int:
    """A count, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def rate(text: str) -> float:
    """A learning rate, for argparse."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number, at least 0, got {value}")
    return value


def run(example: Example, options: argparse.Namespace) -> int:
    """Train, test, and write what was found.

    Returns:
        0, or 128 plus the number of the signal that stopped the run after it was saved.

    Raises:
        UsageError: Options, data or checkpoint are not as they have to be.
        CheckpointError: The checkpoint cannot be read, or does not fit.
        RunStopped: The loss stopped being a number, or a file could not be written.
    """
    if (options.output / LAST).exists() and not options.resume:
        raise UsageError(f"{options.output} holds a run: go on with it by --resume, or choose another --output")
    missing = [module for module in example.needs if find_spec(module) is None]
    if missing:
        raise UsageError(f"the test needs {', '.join(missing)}: pip install {' '.join(missing)}")
    torch.manual_seed(options.seed)
    train_scenes, test_scenes = Scenes(options.data, "train", options.seed), Scenes(options.data, "test", TEST_SEED)
    try:
        model = example.build(options)
    except ValueError as error:
        raise UsageError(str(error)) from None
    make_folder(options.output)
    with RunLock(options.output, "choose another --output"), StopRequest() as stop:
        fit(example, model, train_scenes, options, stop)
        if stop.number:
            return 128 + stop.number
        metrics, pictures = test(example, model, test_scenes, options.test_scenes)
        write_atomic(options.output / "metrics.json", lambda file: file.write(json.dumps(metrics, indent=2).encode()))
        write_atomic(options.output / "scenes.png", lambda file: contact_sheet(pictures).save(file, "png"))
    _logger.info(", ".join(f"{name} {value:.3f}" for name, value in metrics.items()))
    _logger.info("metrics, pictures and TensorBoard log: %s", options.output)
    return 0


def fit(example: Example, model: nn.Module, scenes: Scenes, options: argparse.Namespace, stop: StopRequest) -> None:
    """Train one cosine schedule long; each step depends on its number alone, so a stopped run goes on exactly.

    Args:
        example: The task.
        model: What it built.
        scenes: To train on, each seen once.
        options: The command line.
        stop: Asked after each step.

    Raises:
        UsageError: The folder holds a run with other options.
        RunStopped: The loss stopped being a number, or the checkpoint could not be written.
    """
    optimizer = torch.optim.AdamW(parameter_groups(model, example.head_scale), lr=options.lr)
    schedule = CosineLRScheduler(optimizer, options.steps, warmup_t=options.steps // 20, t_in_epochs=False)
    chosen = {name: str(value) for name, value in vars(options).items() if name not in FREE}
    path = options.output / LAST
    first = restore(path, model, optimizer, chosen) if path.exists() else 0
    log = ScalarLog(options.output, first)
    progress = Progress("train", options.steps, LOG_INTERVAL, enabled=True)
    model.train()
    for step in range(first, options.steps):
        torch.manual_seed(options.seed + step)  # detectors draw among their proposals
        schedule.step_update(step)
        parts = example.losses(model, [scenes[step * BATCH_SIZE + i] for i in range(BATCH_SIZE)])
        loss = torch.stack(list(parts.values())).sum()
        if not loss.isfinite():
            raise RunStopped(f"the loss of step {step} is {loss.item()}; try a lower --lr")
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        done = step + 1
        progress.show(done, BATCH_SIZE, loss=loss.item())
        if done % LOG_INTERVAL == 0:
            values = {name: part.item() for name, part in parts.items()}
            log.add(done, {"loss": loss.item(), **values, "lr": optimizer.param_groups[0]["lr"]})
        if done % SAVE_INTERVAL == 0 or done == options.steps or stop.number:
            save(path, model, optimizer, chosen, done)
        if stop.number:
            break
    progress.close()
    log.close()


def parameter_groups(model: nn.Module, head_scale: float) -> list[dict[str, Any]]:
    """The parameters by learning rate and weight decay; timm's schedules read ``lr_scale``."""
    backbones = [module.model for module in model.modules() if isinstance(module, MapBackbone)]
    inside = {id(parameter) for backbone in backbones for parameter in backbone.parameters()}
    groups: dict[tuple[bool, bool], dict[str, Any]] = {}
    for parameter in model.parameters():
        key = id(parameter) in inside, parameter.ndim > 1
        rates = {"lr_scale": 1.0 if key[0] else head_scale, "weight_decay": WEIGHT_DECAY if key[1] else 0.0}
        groups.setdefault(key, {"params": [], **rates})["params"].append(parameter)
    return list(groups.values())


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, chosen: dict[str, str], step: int) -> None:
    """Write the state of a run."""
    state = {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "options": chosen}
    write_atomic(path, lambda file: torch.save(state, file))


def restore(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, chosen: dict[str, str]) -> int:
    """Put the state of a run back in its place; returns the next step."""
    state = read_checkpoint(path)
    if not {"optimizer", "step", "options"} <= state.keys():
        raise UsageError(f"{path} is of another program; choose another --output")
    differing = [f"--{name.replace('_', '-')}" for name, value in chosen.items() if state["options"].get(name) != value]
    if differing:
        raise UsageError(f"{path.parent} holds a run with another {', '.join(differing)}; --resume needs the same")
    model.load_state_dict(state["state_dict"])
    optimizer.load_state_dict(state["optimizer"])
    _logger.info("resumed %s: step %d", path, state["step"])
    return int(state["step"])


@torch.no_grad()
def test(example: Example, model: nn.Module, scenes: Scenes, count: int) -> tuple[dict[str, float], list[Image.Image]]:
    """Metrics on ``count`` scenes, and pictures of the first of them."""
    model.eval()
    progress = Progress("test", count, count // 4, enabled=True)

    def read() -> Iterator[Scene]:
        for i in range(count):
            yield scenes[i]
            progress.show(i + 1, 1)

    metrics, pictures = example.evaluate(model, read())
    progress.close()
    return metrics, pictures[: ROWS * COLUMNS]


def contact_sheet(pictures: list[Image.Image]) -> Image.Image:
    """Pictures of one size in rows."""
    width, height = pictures[0].size
    sheet = Image.new("RGB", (COLUMNS * width, -(-len(pictures) // COLUMNS) * height))
    for i, picture in enumerate(pictures):
        sheet.paste(picture, (i % COLUMNS * width, i // COLUMNS * height))
    return sheet
