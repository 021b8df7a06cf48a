"""The options of training, of validation and of what runs a trained model, with timm's names: each is a field.

The comment behind a field is its line in ``--help``; the command line and the YAML reader are derived from the
fields in ``soft_models.commands.cli``.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

import yaml

from soft_models.errors import UsageError

AmpDtype = Literal["float16", "bfloat16"]
Interpolation = Literal["", "bilinear", "bicubic", "nearest", "lanczos", "box", "hamming"]
TrainInterpolation = Literal["", "random", "bilinear", "bicubic", "nearest", "lanczos", "box", "hamming"]
# torch warns of more loader processes than there are cores.
WORKERS = min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
Metric = Literal["top1", "top5", "loss"]
Schedule = Literal["cosine", "tanh", "step", "multistep", "plateau", "poly", "constant", "wsd", "rsqrt", "none"]

_TIMM_SCRIPT = "out of scope here, use timm's own train.py with --device-modules soft_models"
OUT_OF_SCOPE: Mapping[str, str] = {
    "--kd-": f"distillation is {_TIMM_SCRIPT}",
    "--distill-": f"distillation is {_TIMM_SCRIPT}",
    "--task-loss-": f"distillation is {_TIMM_SCRIPT}",
    "--naflex-": f"NaFlex loading is {_TIMM_SCRIPT}",
    "--jsd-loss": f"augmentation splits are {_TIMM_SCRIPT}",
    "--aug-splits": f"augmentation splits are {_TIMM_SCRIPT}",
    "--split-bn": f"augmentation splits are {_TIMM_SCRIPT}",
    "--bn-": "what the model's normalisation takes goes through --model-kwargs",
    "--tta": "test-time augmentation is out of scope here",
    "--train-img-sizes": "scheduled sizes are out of scope here, use --img-size",
    "--train-batch-sizes": "scheduled sizes are out of scope here, use --batch-size",
    "--train-size-": "scheduled sizes are out of scope here, use --img-size",
    "--log-wandb": "metrics go to TensorBoard and summary.csv in the output folder",
    "--wandb-": "metrics go to TensorBoard and summary.csv in the output folder",
    "--no-prefetcher": "images are always normalised on the device",
    "--torchscript": "use --torchcompile",
    "--num-gpu": "start one process per GPU with torchrun",
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Options of everything that runs a model on images."""

    config: str = ""  # YAML file of options; the command line wins over it
    input_img_mode: str | None = None  # PIL mode; by default that of a checkpoint to go on from, else RGB or L
    model: str = "soft_tiny"  # any timm or soft_models name
    model_kwargs: dict[str, Any] = field(default_factory=dict)  # key=value pairs for the model's constructor
    num_classes: int | None = None  # classes of the head; by default those of the data
    gp: str | None = None  # global pool; by default the model's
    in_chans: int | None = None  # image channels; by default the model's
    img_size: int | None = None  # pixels per side; by default the model's
    input_size: tuple[int, ...] | None = None  # channels, height and width; wins over img_size
    crop_pct: float | None = None  # fraction of the resized image that the evaluation crop keeps
    crop_mode: Literal["center", "squash", "border"] | None = None  # evaluation crop
    mean: tuple[float, ...] | None = None  # of the pixel values, in 0..1, per channel
    std: tuple[float, ...] | None = None  # of the pixel values, in 0..1, per channel
    interpolation: Interpolation = ""  # of evaluation images; '' for the model's
    batch_size: int = 128  # images per process and step
    workers: int = WORKERS  # loader processes per process; 0 loads in the main one
    pin_mem: bool = False  # pin the loader's memory; always on for CUDA
    channels_last: bool = False  # channels-last memory layout
    device: str = ""  # cpu, cuda, cuda:1, mps, ...; '' for the best there is
    device_modules: tuple[str, ...] = ()  # modules to import before the model is created
    amp: bool = False  # mixed precision
    amp_dtype: AmpDtype = "float16"  # float16 or bfloat16
    torchcompile: str | None = None  # compile the model; the bare flag means backend inductor
    torchcompile_mode: str | None = None  # mode of torch.compile

    POSITIONAL: ClassVar[str] = ""  # field that arguments without a flag go to
    ALIASES: ClassVar[Mapping[str, Sequence[str]]] = {
        "config": ["-c"],
        "model": ["-m"],
        "batch_size": ["-b"],
        "workers": ["-j"],
        "validation_batch_size": ["-vb"],
        "decay_rate": ["--dr"],
        "log_interval": ["--log-freq"],
        "use_ema": ["--ema"],
    }
    BARE_VALUES: ClassVar[Mapping[str, Any]] = {"torchcompile": "inductor"}
    REFUSED: ClassVar[Mapping[str, str]] = OUT_OF_SCOPE


@dataclass(frozen=True, kw_only=True)
class DataConfig(ModelConfig):
    """Options that training and validation share: of data with labels."""

    data_dir: str = ""  # folder that holds the splits, each with one folder per class
    dataset: str = ""  # '' for image folders, or a timm dataset name such as torch/cifar10 or hfds/NAME
    dataset_download: bool = False  # let torch/ datasets download themselves
    class_map: str = ""  # text file with one class name per line, in label order
    seed: int = 42  # of every random draw; validation makes none
    log_interval: int = 50  # steps between log lines

    POSITIONAL: ClassVar[str] = "data_dir"


@dataclass(frozen=True, kw_only=True)
class TrainConfig(DataConfig):
    """Options of a training run."""

    # Data.
    train_split: str = "train"  # folder or split to train on
    val_split: str = "validation"  # folder or split to validate on, also by another name such as val; '' for none
    # Weights to start from.
    pretrained: bool = False  # start from the model's published weights
    pretrained_path: str = ""  # file to fine-tune, its head adapted; preprocessing and architecture are the defaults
    initial_checkpoint: str = ""  # file to start from, of exactly this model; its images are the default
    resume: str = ""  # checkpoint to continue, or auto: the newest of this experiment
    no_resume_opt: bool = False  # continue the weights but not the optimizer
    start_epoch: int | None = None  # first epoch; by default 0 or the resumed one; --resume auto obeys it once
    head_init_scale: float | None = None  # factor on the initial head weights
    head_init_bias: float | None = None  # initial value of the head's biases
    # Model.
    validation_batch_size: int | None = None  # images per process and validation step; by default batch_size
    grad_accum_steps: int = 1  # steps per optimizer update
    grad_checkpointing: bool = False  # recompute activations in the backward pass
    drop: float = 0.0  # dropout rate before the head
    drop_path: float | None = None  # stochastic depth rate
    drop_block: float | None = None  # drop block rate, for models that take one
    # Optimizer.
    opt: str = "sgd"  # timm optimizer name
    opt_eps: float | None = None  # by default the optimizer's
    opt_betas: tuple[float, ...] | None = None  # by default the optimizer's
    opt_kwargs: dict[str, Any] = field(default_factory=dict)  # key=value pairs for the optimizer
    momentum: float = 0.9  # of optimizers that have one
    weight_decay: float = 2e-5  # not applied to biases and norms
    clip_grad: float | None = None  # gradient clipping: norm, value or factor, as clip_mode says
    clip_mode: Literal["norm", "value", "agc"] = "norm"  # norm, value or agc
    layer_decay: float | None = None  # factor on the learning rate per layer group, counted from the head
    layer_decay_min_scale: float = 0.0  # smallest factor that layer_decay reaches
    layer_decay_no_opt_scale: float | None = None  # groups below this factor are not trained
    # Schedule.
    sched: Schedule = "cosine"  # cosine, tanh, step, multistep, plateau, poly, constant, wsd, rsqrt or none
    sched_on_updates: bool = False  # change the rate on every update, not every epoch
    lr: float | None = None  # learning rate; by default from lr_base
    lr_base: float = 0.1  # learning rate at a global batch of lr_base_size
    lr_base_size: int = 256  # images per update that lr_base is meant for
    lr_base_scale: Literal["", "linear", "sqrt"] = ""  # how lr_base grows with the batch; '' by optimizer
    lr_noise: tuple[float, ...] | None = None  # fractions of the run between which the rate is noisy
    lr_noise_pct: float = 0.67  # limit of that noise
    lr_noise_std: float = 1.0  # standard deviation of that noise
    lr_cycle_mul: float = 1.0  # growth of a cycle's length
    lr_cycle_decay: float = 0.5  # decay of the rate per cycle
    lr_cycle_limit: int = 1  # number of cycles
    lr_k_decay: float = 1.0  # k-decay of cosine and poly
    warmup_lr: float = 1e-5  # learning rate at the start of warm-up
    min_lr: float = 0.0  # lowest learning rate
    epochs: int = 300  # epochs of the schedule, warm-up included
    decay_milestones: tuple[int, ...] = (90, 180, 270)  # epochs, for multistep
    decay_epochs: float = 90.0  # epochs between decays, for step; of the decay, for wsd and rsqrt
    warmup_epochs: int = 5  # epochs of warm-up
    warmup_prefix: bool = False  # add the warm-up to the epochs
    cooldown_epochs: int = 0  # epochs at min_lr after the schedule
    patience_epochs: int = 10  # epochs without progress before a decay, for plateau
    decay_rate: float = 0.1  # factor per decay; the exponent, for poly
    # Augmentation and regularisation.
    no_aug: bool = False  # resize and centre crop only, no erasing; mixup and cutmix stay, as in timm
    train_crop_mode: Literal["rrc", "rkrc", "rkrr"] | None = None  # training crop
    scale: tuple[float, float] = (0.08, 1.0)  # least and largest area of the training crop, as fractions
    ratio: tuple[float, float] = (3 / 4, 4 / 3)  # least and largest aspect ratio of the training crop
    hflip: float = 0.5  # probability
    vflip: float = 0.0  # probability
    color_jitter: float | None = 0.4  # strength; ignored with --aa unless that says otherwise
    color_jitter_prob: float | None = None  # probability; by default always
    grayscale_prob: float | None = None  # probability
    gaussian_blur_prob: float | None = None  # probability
    aa: str | None = None  # auto-augment policy, such as rand-m9-mstd0.5-inc1
    aug_repeats: int = 0  # augmented copies of an image per epoch
    bce_loss: bool = False  # binary cross-entropy
    bce_sum: bool = False  # sum it over classes
    bce_target_thresh: float | None = None  # targets above this become 1
    reprob: float = 0.0  # probability of random erasing
    remode: Literal["const", "rand", "pixel"] = "pixel"  # what erased pixels become
    recount: int = 1  # most areas erased per image
    mixup: float = 0.0  # alpha of mixup, 0 for none
    cutmix: float = 0.0  # alpha of cutmix, 0 for none
    cutmix_minmax: tuple[float, float] | None = None  # smallest and largest side of the cut, as fractions
    mixup_prob: float = 1.0  # probability of mixing at all
    mixup_switch_prob: float = 0.5  # probability of cutmix where both are on
    mixup_mode: Literal["batch", "pair", "elem"] = "batch"  # what shares one draw
    mixup_off_epoch: int = 0  # epoch from which nothing is mixed, 0 for never
    smoothing: float = 0.1  # label smoothing
    train_interpolation: TrainInterpolation = "random"  # of training images; random is bilinear or bicubic by chance
    # Batch norm and EMA.
    sync_bn: bool = False  # batch statistics over all processes
    dist_bn: Literal["broadcast", "reduce", ""] = "reduce"  # running statistics after an epoch
    model_ema: bool = False  # keep an average of the weights, which is then validated and used
    model_ema_decay: float = 0.9998  # per update
    model_ema_warmup: bool = False  # start the decay low: for short runs
    # Run.
    output: str = "output/train"  # folder of all experiments
    experiment: str = ""  # folder of this one; by default date, model and size
    checkpoint_hist: int = 10  # numbered checkpoints kept
    recovery_interval: int = 0  # updates between recovery checkpoints, 0 for none
    val_interval: int = 1  # epochs between validations
    eval_metric: Metric = "top1"  # top1, top5 or loss: what ranks checkpoints
    skip_nonfinite: int = 0  # non-finite updates in a row that are left out before the run stops

    @property
    def decreasing_metric(self) -> bool:
        """Whether a lower metric is better."""
        return self.eval_metric == "loss" or not self.val_split


@dataclass(frozen=True, kw_only=True)
class TrainedConfig(ModelConfig):
    """Options of what is done with a trained model; what is not given comes from the checkpoint."""

    model: str = ""  # any timm or soft_models name; by default the checkpoint's
    num_classes: int | None = None  # classes of the head; by default the checkpoint's
    checkpoint: str = ""  # file of the weights; without one the model's published ones
    pretrained: bool = False  # use the published weights, also the default without a checkpoint
    use_ema: bool | None = None  # averaged weights or not; by default the averaged ones of a run that kept them
    batch_size: int = 256  # images per process and step
    use_train_size: bool = False  # published models: the training size, where a test size is given too
    results_file: str = ""  # also write the result to this .json or .csv file


@dataclass(frozen=True, kw_only=True)
class ValidateConfig(TrainedConfig, DataConfig):
    """Options of a validation."""

    split: str = "validation"  # folder or split, also by another name such as val


def check_least(cfg: ModelConfig, minimum: int, *names: str) -> None:
    """Refuse options that are below ``minimum``.

    Raises:
        UsageError: One is.
    """
    for name in names:
        value = getattr(cfg, name)
        if value is not None and value < minimum:
            raise UsageError(f"--{name.replace('_', '-')} must be at least {minimum}, got {value}")


def plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as text, numbers, lists and dicts: what YAML and checkpoints can hold."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


def plain_dict(cfg: ModelConfig) -> dict[str, Any]:
    """The options as :func:`plain_values`."""
    return plain_values(asdict(cfg))


def to_yaml(cfg: ModelConfig) -> str:
    """The options as YAML that ``--config`` reads back."""
    return yaml.safe_dump(plain_dict(cfg), sort_keys=False)
