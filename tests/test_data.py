"""Data: strict folders, labels that never shift, draws that depend on the position alone, broken images by name."""

import io
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from runs import load, rows
from timm.data import ImageDataset
from tiny_data import CLASSES, write_folder, write_image

from soft_models.errors import UsageError
from soft_models.training import sources
from soft_models.training.config import TrainConfig, ValidateConfig
from soft_models.training.data import (
    ImageReport,
    ImageSamples,
    augment_ops,
    build_loader,
    check_batch_size,
    image_mode,
    train_transform,
)
from soft_models.training.folders import find_split, read_class_map, scan_folder
from soft_models.training.images import read_image
from soft_models.training.plan import head_classes
from soft_models.training.runtime import Runtime
from soft_models.training.sampling import Draw, EvalBatches, TrainBatches, derive_seed
from soft_models.training.sources import open_eval_split, open_train_splits
from soft_models.training.validate import main as validate_main

CPU = torch.device("cpu")
DATA_CONFIG = {
    "input_size": (3, 16, 16),
    "interpolation": "bilinear",
    "mean": (0.5, 0.5, 0.5),
    "std": (0.5, 0.5, 0.5),
    "crop_pct": 1.0,
    "crop_mode": "center",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "data")


def config(folder: Path, **options: object) -> TrainConfig:
    return TrainConfig(data_dir=str(folder), **{"workers": 0, **options})


def test_classes_follow_timm_order(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("10", "9", "2"):
        write_image(tmp_path / name / "x.jpg", 0, rng)
    assert scan_folder(tmp_path).classes == ["2", "9", "10"]


def test_labels_equal_those_of_timm(folder: Path) -> None:
    from timm.data import create_dataset

    theirs = create_dataset("", root=str(folder), split="train").reader.samples
    source = open_train_splits(config(folder))[0].source
    assert [(source.name(i), int(source.load(i, "RGB")[1])) for i in range(len(source))] == theirs


@pytest.mark.parametrize("name", ["val", "valid", "validation", "eval", "evaluation"])
def test_validation_folder_has_several_names(folder: Path, name: str) -> None:
    (folder / "val").rename(folder / name)
    shutil.rmtree(folder / "train")
    assert find_split(folder, "validation", "--split").name == name
    split = open_eval_split(ValidateConfig(data_dir=str(folder)), None)
    assert split.name == str(folder / name), "the folder must not be taken for a split itself"


def test_empty_class_in_val_keeps_the_labels(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for image in (folder / "val" / "a").iterdir():
        image.unlink()
    val = open_train_splits(config(folder))[1]
    assert val is not None
    labels = {Path(val.source.name(i)).parent.name: val.source.load(i, "RGB")[1] for i in range(len(val.source))}
    assert labels == {"b": 1, "c": 2}
    assert "has no images of class a; labels stay" in caplog.text


def test_unknown_class_in_val_is_refused(folder: Path) -> None:
    write_image(folder / "val" / "dog" / "x.png", 0, np.random.default_rng(0))
    with pytest.raises(UsageError, match="classes unknown to the model: dog"):
        open_train_splits(config(folder))


def test_missing_folders_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'/nowhere' does not exist"):
        open_train_splits(config(Path("/nowhere")))
    with pytest.raises(UsageError, match=r"no folder 'training set' in .* holds train, val; choose with --train-split"):
        open_train_splits(config(folder, train_split="training set"))
    with pytest.raises(UsageError, match="no data: give --data-dir"):
        open_train_splits(TrainConfig())
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is not a folder"):
        open_train_splits(config(tmp_path / "file"))


def test_never_validates_on_training_images(folder: Path) -> None:
    with pytest.raises(UsageError, match="is the training split"):
        open_train_splits(config(folder, val_split="train"))
    shutil.rmtree(folder / "val")
    with pytest.raises(UsageError, match=r"no folder 'validation' or 'val' .*--val-split ''"):
        open_train_splits(config(folder))
    assert open_train_splits(config(folder, val_split=""))[1] is None


def test_flat_and_empty_folders_are_refused(tmp_path: Path) -> None:
    write_image(tmp_path / "flat" / "x.png", 0, np.random.default_rng(0))
    with pytest.raises(UsageError, match=r"images outside class folders: x.png; sort"):
        scan_folder(tmp_path / "flat")
    (tmp_path / "empty" / "a").mkdir(parents=True)
    with pytest.raises(UsageError, match="holds no images"):
        scan_folder(tmp_path / "empty")


def test_empty_class_folders_are_no_classes(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "train" / "d").mkdir()
    train, _ = open_train_splits(config(folder))
    assert train.classes == ("a", "b", "c")
    assert "has folders without images, which are no classes: d" in caplog.text


def test_messy_folders_are_told_about(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    train = folder / "train"
    picture = Image.open(train / "a" / "0.png")
    for name in ("x.WEBP", "y.gif", "z.tif", "w.bmp"):
        picture.save(train / "b" / name, format={"x": "WEBP", "y": "GIF", "z": "TIFF", "w": "BMP"}[name[0]])
    for name in ("a/notes.txt", "a/x.heic", "b/Thumbs.db", "b/.DS_Store", "b/._0.png", ".cache/0.png"):
        (train / name).parent.mkdir(exist_ok=True)
        (train / name).write_bytes(b"")
    write_image(train / "c" / "more" / "0.png", 2, np.random.default_rng(0))
    caplog.set_level("INFO")
    scan = scan_folder(train)
    assert (len(scan.images), scan.classes, scan.empty) == (24 + 4 + 1, ["a", "b", "c", "more"], [])
    assert "not taken for images: 1 of suffix .db, 1 of suffix .heic, 1 of suffix .txt" in caplog.text
    assert "has images below class folders, whose last folder is their class: c/more" in caplog.text
    read = [read_image(path, "RGB").size for path, _ in scan.images]
    assert read == [(28, 24)] * len(read)


def test_class_map_orders_the_labels(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "classes.txt"
    path.write_text("c\nb\na\n", encoding="utf-8")
    train, _ = open_train_splits(config(folder, class_map=str(path)))
    assert train.classes == ("c", "b", "a")
    assert train.source.load(0, "RGB")[1] == 2
    path.write_text("a\na\n", encoding="utf-8")
    with pytest.raises(UsageError, match="must name each class once, got 2 lines, 1 names"):
        read_class_map(str(path))
    with pytest.raises(UsageError, match="cannot read the class map"):
        read_class_map(str(tmp_path / "none.txt"))


def test_eval_labels_come_from_the_checkpoint_or_the_training_folder(folder: Path) -> None:
    shutil.rmtree(folder / "val" / "a")
    cfg = ValidateConfig(data_dir=str(folder))
    assert open_eval_split(cfg, None).source.load(0, "RGB")[1] == 1
    assert open_eval_split(cfg, ["c", "b", "a"]).source.load(0, "RGB")[1] == 1
    with pytest.raises(UsageError, match="classes unknown to the model: b"):
        open_eval_split(cfg, ["a", "c"])
    assert len(open_eval_split(ValidateConfig(data_dir=str(folder / "val")), None).source) == 6


def test_batch_larger_than_the_data_is_refused() -> None:
    check_batch_size(24, 12, 2, "train")
    with pytest.raises(UsageError, match="--batch-size 25 is larger than the dataset: train has 24 images"):
        check_batch_size(24, 25, 1, "train")
    with pytest.raises(UsageError, match="train has 24 images, 12 for each of 2 processes"):
        check_batch_size(24, 13, 2, "train")


def test_image_mode_needs_a_name_for_odd_channels() -> None:
    assert (image_mode(3, None), image_mode(1, None), image_mode(4, "RGBA")) == ("RGB", "L", "RGBA")
    with pytest.raises(UsageError, match="--in-chans 5 needs --input-img-mode"):
        image_mode(5, None)


def test_ranks_share_an_epoch_without_overlap() -> None:
    ranks = [TrainBatches(23, 4, seed=0, rank=rank, world_size=2) for rank in range(2)]
    drawn = [draw.item for batches in ranks for batch in batches for draw in batch]
    assert [len(batches) for batches in ranks] == [2, 2]
    assert len(drawn) == len(set(drawn)) == 16


def test_evaluation_sees_every_image_once() -> None:
    drawn = [draw.item for rank in range(3) for batch in EvalBatches(10, 2, rank, 3) for draw in batch]
    assert sorted(drawn) == list(range(10))


def test_an_epoch_can_start_anywhere() -> None:
    batches = TrainBatches(20, 4, seed=1)
    batches.set_position(3)
    whole = list(batches)
    batches.set_position(3, step=2)
    assert list(batches) == whole[2:]
    batches.set_position(4)
    assert list(batches) != whole
    assert len(batches) == len(whole) == 5


def test_repeated_images_differ_in_their_draws() -> None:
    batches = [batch for rank in range(2) for batch in TrainBatches(12, 6, 0, rank, 2, repeats=3)]
    draws = [draw for batch in batches for draw in batch]
    items = [draw.item for draw in draws]
    assert len(items) == 12
    assert len(set(items)) == 4
    assert len(set(draws)) == 12


def test_seeds_differ_in_every_part() -> None:
    seeds = {derive_seed(*parts) for parts in ((0, "a", 1), (1, "a", 1), (0, "b", 1), (0, "a", 2), (0, "a", 1, 0))}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("workers", [0, 2])
def test_augmentation_depends_on_the_position_alone(folder: Path, workers: int) -> None:
    cfg = config(folder, workers=workers, aa="rand-m9-mstd0.5-inc1")
    source = open_train_splits(cfg)[0].source
    samples = ImageSamples(source, train_transform(cfg, DATA_CONFIG), "RGB")
    batches = TrainBatches(len(samples), 8, seed=5)
    expected = [torch.stack([samples[draw].image for draw in batch]) for batch in batches]
    random.seed(9)
    torch.manual_seed(9)
    loaded = [batch.images for batch in build_loader(samples, batches, cfg, CPU)]
    assert len(loaded) == 3
    assert all(torch.equal(a, b) for a, b in zip(loaded, expected, strict=True))
    assert not torch.equal(samples[Draw(0, 1)].image, samples[Draw(0, 2)].image)


@pytest.mark.parametrize(
    "policy", ["rand-m9-mstd0.5-inc1", "rand-m9-mstd0.5", "rand-m15-mmax20-inc1", "augmix-m9", "v0"]
)
def test_strongest_augmentation_is_possible(policy: str, folder: Path) -> None:
    image = Image.fromarray(np.arange(768, dtype=np.uint8).reshape(16, 16, 3))
    ops = list(augment_ops(train_transform(config(folder, aa=policy), DATA_CONFIG)))
    assert any(op.name.startswith("Posterize") for op in ops)
    for op in ops:
        op.prob, op.magnitude, op.magnitude_std = 1.0, op.magnitude_max or 10, 0.0
        assert op(image).size == image.size, op.name


def test_images_that_cannot_be_transformed_are_left_out_by_name(folder: Path) -> None:
    def refuse(image: Image.Image) -> None:
        raise ValueError("bits must be positive")

    source = open_train_splits(config(folder))[0].source
    found = ImageSamples(source, refuse, "RGB")[Draw(0, 1)]
    assert found == (source.name(0), "its transform failed, ValueError: bits must be positive")


def test_broken_images_are_left_out_by_name(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = (folder / "train" / "a" / "0.png").read_bytes()
    (folder / "train" / "a" / "0.png").write_bytes(good[: len(good) // 2])
    (folder / "train" / "b" / "0.png").write_text("not an image")
    (folder / "train" / "c" / "0.png").write_bytes(b"")
    (folder / "train" / "c" / "link.png").symlink_to(folder / "gone.png")
    cfg = config(folder)
    source = open_train_splits(cfg)[0].source
    samples = ImageSamples(source, train_transform(cfg, DATA_CONFIG), "RGB")
    report, seen = ImageReport(source, "train", 3), 0
    for batch in build_loader(samples, EvalBatches(len(samples), 4), cfg, CPU):
        report.add(batch)
        seen += len(batch.images)
        assert len(batch.images) == len(batch.targets) == len(batch.indices)
    assert sorted(str(Path(name).relative_to(folder)) for name in report.broken) == [
        "train/a/0.png",
        "train/b/0.png",
        "train/c/0.png",
        "train/c/link.png",
    ]
    assert seen == len(source) - 4 == 21
    report.log(Runtime(CPU))
    assert "unreadable images of train, skipped: 4: " in caplog.text


def test_odd_but_whole_images_are_read(tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 64).reshape(8, 8)
    Image.fromarray(ramp.astype(np.uint16)).save(tmp_path / "deep.png")
    deep = np.asarray(read_image(tmp_path / "deep.png", "RGB"))[..., 0]
    assert np.abs(deep - ramp / 257).max() <= 1
    Image.new("CMYK", (8, 8), (0, 0, 0, 0)).save(tmp_path / "cmyk.jpg")
    assert np.asarray(read_image(tmp_path / "cmyk.jpg", "RGB")).min() > 250
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([0, 0, 0, 10, 200, 30])
    palette.save(tmp_path / "palette.png", transparency=b"\x00\x80")
    assert read_image(tmp_path / "palette.png", "RGB").getpixel((0, 0)) == (10, 200, 30)
    for size in ((1, 1), (3000, 3)):
        Image.new("L", size, 7).save(tmp_path / "odd.png")
        assert read_image(tmp_path / "odd.png", "RGB").size == size


class Reader:
    """As timm's for hfds/: bytes of images with their labels."""

    def __init__(self, folder: Path, class_to_idx: dict[str, int]) -> None:
        self.paths, self.class_to_idx = sorted((folder / "train").rglob("*.png")), class_to_idx

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[io.BytesIO, int]:
        path = self.paths[index]
        return io.BytesIO(path.read_bytes()), CLASSES.index(path.parent.name)


@pytest.mark.parametrize(
    ("class_to_idx", "classes"), [({"c": 2, "a": 0, "b": 1}, ("a", "b", "c")), ({}, None), ({"a": 0, "c": 2}, None)]
)
def test_named_dataset_tells_its_classes_or_they_are_asked_for(
    class_to_idx: dict[str, int], classes: tuple[str, ...] | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Reader(folder, class_to_idx)
    monkeypatch.setattr(sources, "create_dataset", lambda *_, **__: ImageDataset("", reader=reader))
    cfg = TrainConfig(dataset="hfds/some/name", val_split="")
    train, val = open_train_splits(cfg)
    assert (val, train.classes, len(train.source)) == (None, classes, 24)
    image, label = train.source.load(23, "RGB")
    assert (image.size, label) == ((28, 24), 2)
    if classes is None:
        with pytest.raises(UsageError, match="dataset 'hfds/some/name' does not tell its classes: give --num-classes"):
            head_classes(cfg, train.classes)
    assert head_classes(replace(cfg, num_classes=3), train.classes) == 3


@pytest.fixture
def named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Labels of a named dataset's images, of classes a, b and c in this order, as it is opened for validation."""

    def labels(class_to_idx: dict[str, int], known: list[str] | None, kind: type = Reader, **options: str) -> list[int]:
        reader = kind(folder, class_to_idx)
        monkeypatch.setattr(sources, "create_dataset", lambda *_, **__: ImageDataset("", reader=reader))
        source = open_eval_split(ValidateConfig(dataset="hfds/name", **options), known).source
        return list(dict.fromkeys(source.load(index, "RGB")[1] for index in range(len(source))))

    return labels


IN_ORDER = {"a": 0, "b": 1, "c": 2}


@pytest.mark.parametrize(
    ("class_to_idx", "known", "expected"),
    [
        (IN_ORDER, None, [0, 1, 2]),
        (IN_ORDER, ["a", "b", "c"], [0, 1, 2]),
        (IN_ORDER, ["c", "a", "b"], [1, 2, 0]),
        (IN_ORDER, ["x", "b", "y", "a", "c"], [3, 1, 4]),
        ({}, ["c", "b", "a"], [0, 1, 2]),
    ],
)
def test_named_dataset_is_labelled_by_the_models_classes(
    class_to_idx: dict[str, int], known: list[str] | None, expected: list[int], named: Callable[..., list[int]]
) -> None:
    assert named(class_to_idx, known) == expected


def test_class_map_orders_the_labels_of_a_named_dataset(named: Callable[..., list[int]], tmp_path: Path) -> None:
    path = tmp_path / "classes.txt"
    path.write_text("c\nb\na\n", encoding="utf-8")
    assert named(IN_ORDER, ["a", "b", "c"], class_map=str(path)) == [2, 1, 0]
    path.write_text("cat\ndog\nowl\n", encoding="utf-8")
    with pytest.raises(UsageError, match="hfds/name:validation has classes unknown to the model: a, b, c"):
        named(IN_ORDER, None, class_map=str(path))


def test_other_classes_of_a_named_dataset_are_refused_or_told(
    named: Callable[..., list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UsageError, match="hfds/name:validation has classes unknown to the model: c"):
        named(IN_ORDER, ["a", "b", "d"])
    with pytest.raises(UsageError, match="cannot be labelled by name: a class is named twice among a, b, c, a"):
        named(IN_ORDER, ["a", "b", "c", "a"])
    assert not caplog.records
    assert named(IN_ORDER, ["0", "1", "2"]) == [0, 1, 2]
    assert "share no class name, labels are taken as they are: a, b, c are 0, 1, 2" in caplog.text


class Names(Reader):
    """Whose targets are names of classes."""

    def __getitem__(self, index: int) -> tuple[io.BytesIO, str]:
        return super().__getitem__(index)[0], self.paths[index].parent.name


def test_targets_that_are_names_are_labelled_by_them(named: Callable[..., list[int]]) -> None:
    assert named({}, ["c", "b", "a"], Names) == [2, 1, 0]
    with pytest.raises(ValueError, match="'b'"):
        named({}, ["c", "a"], Names)


def test_splits_of_a_named_dataset_share_their_labels(
    train: Callable[..., int], validate: Callable[..., dict[str, object]], data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "lacking"
    shutil.copytree(data, folder)
    shutil.rmtree(folder / "val" / "a")
    options = ["--data-dir", str(folder), "--dataset", "torch/image_folder"]
    assert train(*options, "--epochs", "1") == 0
    (row,) = rows(tmp_path / "run")
    result = validate("--data-dir", str(folder), "--checkpoint", str(tmp_path / "run" / "last.pth.tar"))
    assert result["loss"] == pytest.approx(float(row["eval_loss"]), abs=1e-5)


def test_labels_that_the_model_has_not_are_refused_by_image(
    train: Callable[..., int],
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sources, "create_dataset", lambda *_, **__: ImageDataset("", reader=Reader(data, {})))
    options = ["--dataset", "hfds/name", "--num-classes"]
    for mixing in ([], ["--mixup", "0.2"]):
        assert train(*options, "2", *mixing, "--epochs", "1") == 1
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("train.py: stopped: hfds/name[") and "has label 2, and the model 2 classes" in error
    assert train(*options, "3", "--epochs", "1", experiment="three") == 0
    capsys.readouterr()
    monkeypatch.setattr(Reader, "__getitem__", lambda self, index: (io.BytesIO(self.paths[index].read_bytes()), -100))
    argv = ["--dataset", "hfds/name", "--device", "cpu", "-j", "0"]
    assert validate_main([*argv, "--checkpoint", str(tmp_path / "three" / "last.pth.tar")]) == 1
    assert "has label -100, and the model 3 classes, from 0 on" in capsys.readouterr().err


def test_dataset_of_torchvision_is_trained_on(train: Callable[..., int], tmp_path: Path) -> None:
    assert train("--dataset", "torch/image_folder", "--epochs", "1") == 0
    assert load(tmp_path / "run" / "last.pth.tar")["soft_models"]["classes"] == list(CLASSES)
