"""The options: every recipe loads, typos are refused with a suggestion, and the command line wins."""

import dataclasses
from pathlib import Path

import pytest
import yaml
from runs import load_config

from soft_models.commands.cli import cast, field_help, parse_config
from soft_models.errors import UsageError
from soft_models.registry import is_ours
from soft_models.training.config import TrainConfig, ValidateConfig, plain_dict, to_yaml

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))

# What users of timm's scripts type most; each must be a flag here.
TRAIN_FLAGS = """
    --config --data-dir --dataset --train-split --val-split --model --pretrained --pretrained-path --initial-checkpoint
    --resume --num-classes --img-size --crop-pct --mean --std --batch-size --validation-batch-size --channels-last
    --grad-accum-steps --grad-checkpointing --model-kwargs --torchcompile --device --amp --amp-dtype --opt --opt-eps
    --opt-betas --momentum --weight-decay --clip-grad --clip-mode --layer-decay --sched --sched-on-updates --lr
    --lr-base --warmup-lr --min-lr --epochs --warmup-epochs --cooldown-epochs --color-jitter --aa --bce-loss --reprob
    --remode --mixup --cutmix --smoothing --drop --drop-path --drop-block --model-ema --model-ema-decay --seed
    --log-interval --checkpoint-hist --workers --output --experiment
    --input-size --dist-bn --sync-bn --aug-repeats --lr-base-size --recovery-interval --eval-metric --val-interval
    --device-modules -b -vb -j -c --dr
""".split()
VALIDATE_FLAGS = """
    --data-dir --dataset --split --class-map --model -m --pretrained --checkpoint --use-ema --no-use-ema --num-classes
    --gp --model-kwargs --img-size --in-chans --input-size --use-train-size --crop-pct --crop-mode --mean --std
    --interpolation -b --batch-size -j --workers --device --amp --amp-dtype --channels-last --torchcompile --log-freq
    --results-file --seed --pin-mem --config
""".split()


def parse(*argv: str) -> TrainConfig:
    return parse_config(TrainConfig, argv, "")


def write(folder: Path, text: str) -> str:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_recipe_loads_and_says_what_it_is(path: Path) -> None:
    cfg = load_config(path)
    opening = path.read_text(encoding="utf-8").split("\n\n")[0]
    assert is_ours(cfg.model)
    assert "train.py --config configs/" + path.name in opening
    assert "Hardware" in opening


def test_imagenet_recipes_follow_the_paper() -> None:
    rates = {"tiny": 1e-3, "small": 1e-3, "medium": 3.5e-4, "large": 3.3e-4, "huge": 2.7e-4}
    for size, rate in rates.items():
        cfg = load_config(CONFIGS[0].parent / f"soft_{size}_in1k.yaml")
        assert (cfg.model, cfg.lr_base, cfg.lr_base_size) == (f"soft_{size}", rate, 1024)
        assert (cfg.epochs, cfg.warmup_epochs, cfg.cooldown_epochs) == (300, 10, 10)
        assert (cfg.opt, cfg.weight_decay, cfg.clip_grad, cfg.drop_path) == ("adamw", 0.05, 1.0, 0.1)
        assert (cfg.mixup, cfg.cutmix, cfg.reprob, cfg.smoothing) == (0.8, 1.0, 0.25, 0.1)
        assert (cfg.model_ema, cfg.model_ema_decay) == (True, 0.99996)


def test_recipes_of_deit_training_follow_its_images() -> None:
    paths = [path for path in CONFIGS if path.stem.startswith(("vvt_", "cosformer_"))]
    assert len(paths) == 5
    for path in paths:
        cfg = load_config(path)
        assert (cfg.train_interpolation, cfg.crop_pct, cfg.aug_repeats) == ("bicubic", 0.875, 3)


def test_timm_flags_are_accepted() -> None:
    from soft_models.commands.cli import build_parser

    for cls, flags in ((TrainConfig, TRAIN_FLAGS), (ValidateConfig, VALIDATE_FLAGS)):
        known = set(build_parser(cls, "")._option_string_actions)
        assert not set(flags) - known


def test_every_option_is_explained() -> None:
    for cls in (TrainConfig, ValidateConfig):
        missing = [field.name for field in dataclasses.fields(cls) if not field_help(cls).get(field.name)]
        assert not missing


def test_help_lists_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse("--help")
    text = capsys.readouterr().out
    assert "--weight-decay" in text
    assert "not applied to biases and norms" in text


def test_command_line_beats_yaml_beats_defaults(tmp_path: Path) -> None:
    recipe = write(tmp_path, "lr: 1e-3\nbatch-size: 32\nmodel_ema: true\namp: true\n")
    cfg = parse("--config", recipe, "-b", "16", "--no-amp", "data")
    assert (cfg.lr, cfg.batch_size, cfg.model_ema, cfg.amp) == (1e-3, 16, True, False)
    assert cfg.epochs == TrainConfig().epochs
    assert cfg.data_dir == "data"


@pytest.mark.parametrize("argv", [["--data-dir", "d", "--amp", "false"], ["false", "--data-dir", "d"]])
def test_an_argument_beside_its_flag_is_not_dropped(argv: list[str]) -> None:
    with pytest.raises(UsageError, match="unexpected argument 'false': --data-dir is given already"):
        parse(*argv)


def test_values_take_the_type_of_their_field(tmp_path: Path) -> None:
    recipe = write(
        tmp_path,
        "weight_decay: 5e-2\nscale: [0.5, 1]\nopt_betas: ['0.9', 0.95]\nmodel_kwargs: {depth: 2}\n"
        "torchcompile: true\nclip_grad: null\nepochs: 3.0\n",
    )
    cfg = load_config(recipe)
    assert (cfg.weight_decay, cfg.scale, cfg.opt_betas) == (0.05, (0.5, 1.0), (0.9, 0.95))
    assert (cfg.model_kwargs, cfg.torchcompile, cfg.clip_grad) == ({"depth": 2}, "inductor", None)
    assert isinstance(cfg.epochs, int)
    cfg = parse("--model-kwargs", "img_size=64", "name=a", "--torchcompile", "--input-size", "3", "64", "96")
    assert (cfg.model_kwargs, cfg.torchcompile, cfg.input_size) == (
        {"img_size": 64, "name": "a"},
        "inductor",
        (3, 64, 96),
    )
    assert parse("--color-jitter", "none").color_jitter is None
    cfg = load_config(write(tmp_path, "experiment: ~\npretrained_path:\ndevice_modules: null\n"))
    assert (cfg.experiment, cfg.pretrained_path, cfg.device_modules) == ("", "", ())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lerning_rate: 1\n", "unknown option 'lerning_rate'"),
        ("batch_sise: 4\n", "did you mean 'batch_size'"),
        ("epochs: many\n", "epochs must be int, got 'many'"),
        ("epochs: 2.5\n", "epochs must be int, got 2.5"),
        ("epochs: true\n", "epochs must be int, got True"),
        ("amp: maybe\n", "amp must be bool, got 'maybe'"),
        ("lr: [1]\n", "lr must be float"),
        ("remode: pixels\n", "remode must be one of .*did you mean 'pixel'"),
        ("- lr\n", "must hold 'option: value' lines"),
        ("lr: [\n", "is not YAML"),
        ("lr: !!python/object/apply:os.getcwd []\n", "is not YAML"),
    ],
)
def test_wrong_yaml_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_config(write(tmp_path, text))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--bach-size", "4"], "unknown flag --bach-size; did you mean '--batch-size'"),
        (["--modle=soft_tiny"], "unknown flag --modle; did you mean '--model'"),
        (["-b", "four"], "batch_size must be int, got 'four'"),
        (["--lr"], "--lr"),
        (["--scale", "0.5"], "scale takes 2 values, got 1"),
        (["--cutmix-minmax", "0.2", "0.4", "0.6"], "cutmix_minmax takes 2 values, got 3"),
        (["a", "b"], "unexpected argument 'b'"),
        (["--config", "nowhere.yaml"], "cannot read the config 'nowhere.yaml'"),
        (["--model-kwargs", "depth"], "model_kwargs takes key=value pairs, got 'depth'"),
        (["--jsd-loss"], "--jsd-loss is not supported: augmentation splits are out of scope"),
        (["--bn-momentum", "0.1"], "--bn-momentum is not supported: what the model's normalisation takes goes through"),
        (["--kd-model-name", "resnet50"], "--kd-model-name is not supported: distillation is out of scope"),
        (["--naflex-loader"], "--naflex-loader is not supported"),
        (["--train-img-sizes", "128"], "--train-img-sizes is not supported"),
        (["--log-wandb"], "--log-wandb is not supported: metrics go to TensorBoard"),
    ],
)
def test_wrong_flags_are_refused(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse(*argv)


def test_resolved_options_read_back_as_they_are(tmp_path: Path) -> None:
    cfg = parse("-b", "8", "--lr", "1e-3", "--mean", "0.5", "--model-kwargs", "img_size=64", "--aa", "rand-m9")
    assert load_config(write(tmp_path, to_yaml(cfg))) == cfg
    assert yaml.safe_load(to_yaml(cfg)) == plain_dict(cfg)


def test_cast_names_the_option() -> None:
    assert cast("1e-3", float | None, "lr") == 1e-3
    with pytest.raises(UsageError, match="lr must be float, got 'x'"):
        cast("x", float | None, "lr")
