"""Train an image classifier: ``soft-train``, or ``train.py`` in the repository.

    train.py --config configs/soft_tiny_in1k.yaml --data-dir /data/imagenet
    train.py /data/pets --config configs/finetune.yaml --pretrained-path soft_tiny.pth --model soft_conv_tiny
    torchrun --nproc-per-node 8 train.py ...            several GPUs
    train.py ... --experiment pets --resume auto        continue, exactly

Options are timm's; the defaults are beaten by the YAML file of --config, and that by the command line.
"""

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from timm.models import safe_model_name

from soft_models.checkpoints import read_checkpoint
from soft_models.checkpoints.extras import stored_extras
from soft_models.commands.cli import parse_config
from soft_models.commands.files import RunLock, make_folder, write_atomic
from soft_models.commands.script import run_script

from .config import TrainConfig, to_yaml
from .data import image_mode
from .learner import ema_note, few_note
from .models import build_train_model, check_input, input_config, starting_arguments
from .plan import Plan, make_plan
from .resume import restore_saver
from .run import Prepared, Run, build_run, run_epochs
from .runtime import StopRequest, running
from .sampling import derive_seed, seed_all
from .saver import BEST
from .scalars import ScalarLog

_logger = logging.getLogger("soft_models.training.train")  # also when run as __main__


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the command line says; returns the exit code."""
    return run_script("train.py", lambda: train(parse_config(TrainConfig, argv, __doc__ or "")))


def train(cfg: TrainConfig) -> int:
    """Train as configured.

    Returns:
        0, or 128 plus the number of the signal that stopped the run after it was saved.

    Raises:
        UsageError: Something in the configuration, the data or a checkpoint is wrong.
        CheckpointError: The checkpoint cannot be read.
        RunStopped: The loss stopped being a number, or a checkpoint could not be written.
    """
    with running(cfg) as runtime, StopRequest() as stop:
        plan = make_plan(cfg, runtime)
        if runtime.is_primary:
            make_folder(Path(cfg.output))
        prepared = prepare_model(plan)
        run = build_run(plan, prepared, run_folder(plan.cfg, prepared.data_config), stop)
        if not runtime.is_primary:
            return train_in_folder(run)
        make_folder(run.folder)
        with RunLock(run.folder, "give --experiment another name"):
            return train_in_folder(run)


def prepare_model(plan: Plan) -> Prepared:
    """The model with its initial weights, which a checkpoint to resume makes superfluous, and its preprocessing.

    A checkpoint's own images are the default, of one to fine-tune by way of the model's ``pretrained_cfg``.
    """
    cfg, source = plan.cfg, None
    if plan.resume:
        cfg, source = replace(cfg, pretrained=False, pretrained_path="", initial_checkpoint=""), plan.resume[1]
    elif cfg.initial_checkpoint:
        source = read_checkpoint(cfg.initial_checkpoint)
    arguments = starting_arguments(cfg, source)
    seed_all(derive_seed(cfg.seed, "model"))
    model = build_train_model(cfg, arguments)
    stored = stored_extras(source or {})
    data_config = input_config(cfg, model, stored.get("data_config"))
    mode = image_mode(data_config["input_size"][0], cfg.input_img_mode or stored.get("input_img_mode"))
    check_input(model, data_config["input_size"])
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    _logger.info("%s: %.2fM parameters, on %s", cfg.model, millions, plan.runtime.device)
    _logger.info("images: mode %s, %s", mode, ", ".join(f"{name} {value}" for name, value in data_config.items()))
    return Prepared(model, arguments, data_config, mode)


def run_folder(cfg: TrainConfig, data_config: Mapping[str, Any]) -> Path:
    """Folder of the run, named as in timm where no experiment is named."""
    dated = f"{datetime.now():%Y%m%d-%H%M%S}-{safe_model_name(cfg.model)}-{data_config['input_size'][-1]}"
    return Path(cfg.output) / (cfg.experiment or dated)


def train_in_folder(run: Run) -> int:
    """Train in a folder that is this run's alone; see ``train``."""
    plan, folder, learner, position = run.plan, run.folder, run.learner, run.position
    cfg = plan.cfg
    if plan.resume:
        path, checkpoint = plan.resume
        restore_saver(run.saver, checkpoint, path, plan.runtime)
    if position.epoch >= learner.num_epochs:
        _logger.info("the run is finished: %d of %d epochs are done", position.epoch, learner.num_epochs)
        report_best(run)
        return 0
    steps = len(run.batches)
    more = learner.num_epochs - cfg.epochs
    added = f" (--epochs {cfg.epochs}, and {more} of cooldown, warm-up prefix or more cycles)" if more > 0 else ""
    _logger.info("%d epochs%s of %d steps, writing to %s", learner.num_epochs, added, steps, folder)
    updates = learner.num_epochs * run.batches.updates(cfg.grad_accum_steps)
    for note in filter(None, ("" if position.updates else few_note(updates), ema_note(cfg, updates))):
        _logger.warning("%s", note)
    if plan.runtime.is_primary:
        resolved = replace(cfg, output=str(folder.parent), experiment=folder.name)
        write_atomic(folder / "args.yaml", lambda file: file.write(to_yaml(resolved).encode()))
        run.scalars = ScalarLog(folder, position.epoch)
    try:
        code = run_epochs(run)
    finally:
        if run.scalars is not None:
            run.scalars.close()
    if code == 0:
        report_best(run)
    return code


def report_best(run: Run) -> None:
    """One JSON line on stdout: the best epoch and its checkpoint, if any epoch had a metric.

    The epoch is null where the checkpoint is of a stretch that was trained again, and has not been beaten since.
    """
    if not run.plan.runtime.is_primary:
        return
    path = run.folder / BEST
    best = {
        "best_epoch": run.saver.best_epoch,
        "metric": run.saver.best_metric,
        "checkpoint": str(path) if path.exists() else None,
    }
    sys.stdout.write(json.dumps(best) + "\n")


if __name__ == "__main__":
    sys.exit(main())
