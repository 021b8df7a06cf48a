"""Maps, feature pyramids and segmenters on the registered models, and torchvision's detectors with them."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from small_models import PYRAMID, PYRAMIDS, VIT, enliven, widths
from timm.layers import LayerNorm2d
from torch import Tensor, nn
from torch.testing import assert_close
from torchvision.models.detection import FCOS, FasterRCNN, MaskRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator

from soft_models.checkpoints import CheckpointError
from soft_models.downstream import FPNBackbone, MapBackbone, UPerNet


@pytest.fixture
def images() -> list[Tensor]:
    """Of two sizes, in 0 to 1."""
    return [torch.rand(3, 70, 90), torch.rand(3, 96, 64)]


@pytest.fixture
def targets() -> list[dict[str, Tensor]]:
    """Two objects in the first image, none in the second."""
    masks = torch.zeros(2, 70, 90, dtype=torch.uint8)
    masks[0, 5:40, 5:30] = masks[1, 20:60, 40:80] = 1
    boxes = torch.tensor([[5.0, 5.0, 30.0, 40.0], [40.0, 20.0, 80.0, 60.0]])
    first = {"boxes": boxes, "labels": torch.tensor([1, 2]), "masks": masks}
    none = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.long), "masks": torch.zeros(0, 96, 64)}
    return [first, none]


def classifier_file(name: str, folder: Path, **kwargs: Any) -> tuple[Path, nn.Module]:
    """A classifier with statistics of its own, saved as training saves it."""
    model = enliven(timm.create_model(name, num_classes=10, **widths(name), **kwargs))
    path = folder / "model_best.pth.tar"
    torch.save({"arch": name, "epoch": 3, "state_dict": model.state_dict()}, path)
    return path, model


@pytest.mark.parametrize("name", [*PYRAMIDS, VIT])
@pytest.mark.parametrize("out_indices", [(0, 1, 2, 3), (1, 2), (3,)])
def test_maps_have_the_strides_and_channels_that_are_told(name: str, out_indices: tuple[int, ...]) -> None:
    backbone = MapBackbone(name, out_indices, **widths(name))
    maps = backbone(torch.randn(2, 3, 96, 64))
    assert backbone.strides == [4 * 2**i for i in out_indices]
    expected = [(2, dim, 96 // s, 64 // s) for dim, s in zip(backbone.channels, backbone.strides, strict=True)]
    assert [tuple(y.shape) for y in maps] == expected


@pytest.mark.parametrize("name", PYRAMIDS)
def test_maps_are_those_of_features_only_normalised(name: str) -> None:
    backbone = MapBackbone(name, **PYRAMID).eval()
    features = timm.create_model(name, features_only=True, **PYRAMID).eval()
    features.load_state_dict(backbone.model.state_dict())
    x = torch.randn(1, 3, 70, 90)
    for y, raw in zip(backbone(x), features(x), strict=True):
        assert_close(y, nn.functional.layer_norm(raw.movedim(1, -1), raw.shape[1:2], eps=1e-6).movedim(-1, 1))


def test_maps_come_raw_without_norm() -> None:
    backbone = MapBackbone("soft_tiny", norm=False, **PYRAMID).eval()
    x = torch.randn(1, 3, 64, 64)
    assert all(torch.equal(y, raw) for y, raw in zip(backbone(x), backbone.model(x), strict=True))
    assert not any(isinstance(module, LayerNorm2d) for module in backbone.modules())


@pytest.mark.parametrize("frozen_stages", range(5))
def test_frozen_stages_stay_as_they_are(frozen_stages: int) -> None:
    backbone = MapBackbone("soft_tiny", frozen_stages=frozen_stages, drop_path_rate=0.5, **PYRAMID).train()
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    optimizer = torch.optim.SGD([p for p in backbone.parameters() if p.requires_grad], lr=0.1, weight_decay=0.1)
    torch.stack([y.square().mean() for y in backbone(torch.randn(2, 3, 64, 64))]).sum().backward()
    optimizer.step()
    model = backbone.model.model
    frozen = ["patch_embed.", *(f"stages.{i}." for i in range(frozen_stages))] if frozen_stages else []
    for name, value in backbone.state_dict().items():
        inside = name.removeprefix("model.model.").startswith(tuple(frozen))
        if inside:
            assert torch.equal(value, before[name]), name
        elif name.startswith("model.") and value.is_floating_point() and "running" in name:
            assert not torch.equal(value, before[name]), name
    assert [stage.training for stage in model.stages] == [i >= frozen_stages for i in range(4)]
    trained = [p for stage in model.stages[frozen_stages:] for p in stage.parameters()]
    assert all(p.grad is not None for p in trained)


def test_frozen_bn_keeps_its_statistics_and_its_output() -> None:
    plain, frozen = (MapBackbone("soft_tiny", frozen_bn=flag, **PYRAMID) for flag in (False, True))
    frozen.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = plain.eval()(x)
        for y, other in zip(frozen.train()(x), expected, strict=True):
            assert_close(y, other)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in frozen.modules())


@pytest.mark.parametrize("name", PYRAMIDS)
def test_classifier_goes_into_a_backbone_bit_by_bit(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, model = classifier_file(name, tmp_path, img_size=48)
    with caplog.at_level(logging.INFO, "soft_models.downstream"):
        backbone = MapBackbone(name, checkpoint=path, **PYRAMID)
    own = backbone.model.model.state_dict()
    given = model.state_dict()
    assert own
    assert all(torch.equal(value, given[key]) for key, value in own.items())
    assert f"{len(own)} of its {len(given)} tensors" in caplog.text
    assert "0 are adapted to it" in caplog.text
    assert "head.weight, head.bias" in caplog.text


def test_another_image_size_resizes_the_tables_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, _ = classifier_file("soft_tiny", tmp_path, img_size=48)
    with caplog.at_level(logging.INFO, "soft_models.downstream"):
        backbone = MapBackbone("soft_tiny", checkpoint=path, img_size=96, **PYRAMID)
    assert backbone.model.model.stages[0].pos_embed.shape[1:3] == (24, 24)
    assert "4 are adapted to it" in caplog.text


def test_what_goes_into_other_weights_is_not_called_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    name = "deit3_small_patch16_224"
    torch.save(timm.create_model(name, depth=1).state_dict(), tmp_path / f"{name}.pth")
    with caplog.at_level(logging.INFO, "soft_models.downstream"):
        MapBackbone("cosformer_vit_small_patch16_224", checkpoint=tmp_path / f"{name}.pth", depth=1)
    assert "dropped: cls_token, norm.weight" in caplog.text


def test_checkpoint_of_another_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("soft_models.checkpoints.convert.registered_names", list)  # advice takes seconds
    path, _ = classifier_file("vvt_tiny", tmp_path)
    with pytest.raises(CheckpointError, match="the weights do not fit"):
        MapBackbone("soft_tiny", checkpoint=path, **PYRAMID)
    with pytest.raises(CheckpointError, match="no checkpoint file"):
        MapBackbone("soft_tiny", checkpoint=tmp_path / "missing.pth")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"name": "soft_tinny"}, "unknown name 'soft_tinny'; choose one of .*soft_tiny"),
        ({"name": "resnet18"}, "unknown name 'resnet18'"),
        ({"out_indices": ()}, r"out_indices must be ascending numbers from 0 to 3, got \(\)"),
        ({"out_indices": 3}, "must be ascending numbers from 0 to 3, got 3"),
        ({"out_indices": (2, 1)}, "must be ascending"),
        ({"out_indices": (0, 4)}, "must be ascending"),
        ({"dtype": torch.float64}, r"leave device and dtype to \.to\(\.\.\.\)"),
        ({"frozen_stages": 5}, r"frozen_stages of soft_tiny must be one of \(0, 1, 2, 3, 4\), got 5"),
        ({"name": VIT, "frozen_stages": 1}, r"must be one of \(0,\), got 1"),
    ],
)
def test_mistakes_are_one_line(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MapBackbone(**{"name": "soft_tiny", **kwargs})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: FPNBackbone("soft_tiny", extra="p7"), "unknown extra 'p7'; choose one of"),
        (lambda: FPNBackbone("soft_tiny", out_channels=0), "out_channels must be at least 1, got 0"),
        (lambda: UPerNet("soft_tiny", num_classes=0), "num_classes must be at least 1, got 0"),
        (lambda: UPerNet("soft_tiny", num_classes=2, pool_sizes=(0, 2)), "pool_sizes must be at least 1, got 0"),
        (lambda: UPerNet("soft_tiny", num_classes=2, pool_sizes=()), r"pool_sizes must be a sequence .* got \(\)"),
        (lambda: UPerNet("soft_tiny", num_classes=2, pool_sizes=3), "pool_sizes must be a sequence .* got 3"),
        (lambda: UPerNet("soft_tiny", num_classes=2, norm_layer="bathnorm2d"), "unknown norm_layer 'bathnorm2d'"),
        (lambda: UPerNet("soft_tiny", num_classes=2, norm_layer="simplenorm2d"), "unknown norm_layer 'simplenorm2d'"),
    ],
)
def test_mistakes_about_heads_are_one_line(build: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("extra", "names"),
    [("pool", ["0", "1", "2", "3", "pool"]), ("p6p7", ["0", "1", "2", "3", "p6", "p7"]), ("", ["0", "1", "2", "3"])],
)
def test_fpn_gives_maps_by_name(extra: str, names: list[str]) -> None:
    backbone = FPNBackbone("soft_tiny", out_channels=8, extra=extra, **PYRAMID).eval()
    maps = backbone(torch.randn(1, 3, 128, 96))
    assert list(maps) == names
    strides = (4, 8, 16, 32, 64, 128)[: len(names)]
    assert [tuple(y.shape) for y in maps.values()] == [(1, 8, -(-128 // s), -(-96 // s)) for s in strides]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [(name, widths(name)) for name in ("soft_tiny", "vvt_tiny", VIT)]
    + [pytest.param(name, {}, marks=pytest.mark.slow) for name in (*PYRAMIDS, VIT)],
)
def test_fpn_takes_images_of_800_by_1333(name: str, arguments: dict[str, Any]) -> None:
    with torch.no_grad():
        maps = FPNBackbone(name, **arguments).eval()(torch.randn(1, 3, 800, 1333))
    if name == VIT:  # padded to 1344
        assert maps["0"].shape[-2:] == (200, 336)
        return
    sizes = [tuple(y.shape[-2:]) for y in maps.values()]
    assert sizes[:4] == [(200, 334), (100, 167), (50, 84), (25, 42)]


def detector(kind: str, name: str) -> nn.Module:
    """One of torchvision's detectors, of its default structure but for the width, on small images."""
    sizes = {"min_size": 64, "max_size": 128, "num_classes": 3}
    if kind in ("MaskRCNN", "FasterRCNN"):
        cls = MaskRCNN if kind == "MaskRCNN" else FasterRCNN
        return cls(FPNBackbone(name, 16, **widths(name)), **sizes)
    backbone = FPNBackbone(name, 32, out_indices=(1, 2, 3), extra="p6p7", **widths(name))
    return (RetinaNet if kind == "RetinaNet" else FCOS)(backbone, **sizes)


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, "soft_tiny") for kind in ("MaskRCNN", "FasterRCNN", "RetinaNet", "FCOS")]
    + [("RetinaNet", name) for name in (*PYRAMIDS, VIT) if name != "soft_tiny"],
)
def test_torchvision_detectors_train_and_predict(
    kind: str, name: str, images: list[Tensor], targets: list[dict[str, Tensor]]
) -> None:
    model = detector(kind, name).train()
    losses = model(images, targets)
    torch.stack(list(losses.values())).sum().backward()
    backbone = model.backbone.body
    without = [key for key, p in backbone.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert not without, f"no finite gradient: {without}"
    with torch.no_grad():
        found = model.eval()(images)
    assert len(found) == len(images)
    for image, result in zip(images, found, strict=True):
        assert set(result) == {"boxes", "scores", "labels"} | ({"masks"} if kind == "MaskRCNN" else set())
        assert result["boxes"].shape[1] == 4
        if kind == "MaskRCNN":
            assert result["masks"].shape[1:] == (1, *image.shape[1:])


@pytest.mark.parametrize("name", [*PYRAMIDS, VIT])
def test_upernet_trains_and_gives_logits_of_the_images_size(name: str) -> None:
    model = UPerNet(name, num_classes=5, channels=8, **widths(name)).train()
    logits = model(torch.randn(2, 3, 70, 90))
    assert logits.shape == (2, 5, 70, 90)
    logits.square().mean().backward()
    without = [key for key, p in model.named_parameters() if p.grad is None]
    assert not without, f"no gradient: {without}"


def test_upernet_on_a_list_equals_images_one_by_one_where_no_padding_differs() -> None:
    model = UPerNet("soft_tiny", num_classes=5, channels=8, **PYRAMID).eval()
    images = [torch.randn(3, 64, 96), torch.randn(3, 50, 96), torch.randn(3, 64, 70)]
    logits = model(images)
    assert [tuple(y.shape) for y in logits] == [(5, 64, 96), (5, 50, 96), (5, 64, 70)]
    for image, y in zip(images, logits, strict=True):
        assert_close(y, model(image[None])[0], rtol=1e-4, atol=1e-5)  # padded to 64 x 96 alone as well


def test_upernet_sees_beyond_one_map() -> None:
    model = UPerNet("soft_tiny", num_classes=2, channels=8, **PYRAMID).eval()
    maps = [torch.randn(1, dim, 32 // 2**i, 32 // 2**i) for i, dim in enumerate(model.body.channels)]
    base = model.forward_head(maps)
    for i in range(4):
        changed = [y + (i == j) for j, y in enumerate(maps)]
        assert not torch.allclose(model.forward_head(changed), base), f"map {i} changes nothing"


def test_backbone_in_a_detector_with_anchors_of_its_own_stages(
    images: list[Tensor], targets: list[dict[str, Tensor]]
) -> None:
    backbone = FPNBackbone("soft_tiny", 16, extra="", out_indices=(0, 1), **PYRAMID)
    anchors = AnchorGenerator(((16,), (32,)), ((0.5, 1.0, 2.0),) * 2)
    model = RetinaNet(backbone, num_classes=3, anchor_generator=anchors, min_size=64, max_size=128).train()
    assert all(loss.isfinite() for loss in model(images, targets).values())
    assert len(backbone.body.model.model.stages) == 2, "stages that nobody asked for are not built"
