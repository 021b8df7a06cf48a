"""Libraries that take their backbones from timm by name, as their own code calls it."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from small_models import PYRAMID, PYRAMIDS, VIT, enliven, widths
from torch import nn
from torch.testing import assert_close


def assert_same_tensors(model: nn.Module, other: nn.Module) -> None:
    """The same names, and each tensor bit by bit."""
    own, others = model.state_dict(), other.state_dict()
    assert list(own) == list(others)
    assert [name for name, value in own.items() if not torch.equal(value, others[name])] == []


# segmentation_models_pytorch


@pytest.fixture(scope="module")
def smp() -> Any:
    return pytest.importorskip("segmentation_models_pytorch", reason="needs the extra downstream")


@pytest.mark.parametrize(
    ("architecture", "name"),
    [(architecture, "soft_tiny") for architecture in ("Unet", "FPN", "UPerNet", "MAnet", "Linknet", "Segformer")]
    + [("Unet", name) for name in PYRAMIDS if name != "soft_tiny"],
)
def test_smp_trains(smp: Any, architecture: str, name: str) -> None:
    model = getattr(smp, architecture)(f"tu-{name}", encoder_weights=None, classes=3, **PYRAMID).train()
    logits = model(torch.randn(2, 3, 64, 96))
    assert logits.shape == (2, 3, 64, 96)
    logits.square().mean().backward()
    assert all(p.grad is not None for p in model.encoder.parameters())


@pytest.mark.parametrize("architecture", ["DeepLabV3", "DeepLabV3Plus", "PAN"])
def test_smp_decoders_that_dilate_the_encoder_are_refused(smp: Any, architecture: str) -> None:
    with pytest.raises(TypeError, match="output_stride"):
        getattr(smp, architecture)("tu-soft_tiny", encoder_weights=None, **PYRAMID)


def test_smp_takes_no_plain_vit(smp: Any) -> None:
    with pytest.raises(ValueError, match="Unsupported model downsampling pattern"):
        smp.Unet(f"tu-{VIT}", encoder_weights=None)


# transformers


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="needs the extra downstream")


def test_transformers_backbone_comes_back_from_a_folder(transformers: Any, tmp_path: Path) -> None:
    config = transformers.TimmBackboneConfig(backbone="soft_tiny", out_indices=[0, 1, 2, 3])
    model = transformers.TimmBackbone(config, **PYRAMID).eval()
    enliven(model)
    x = torch.randn(1, 3, 64, 96)
    maps = model(x).feature_maps
    assert [tuple(y.shape) for y in maps] == [(1, 16, 16, 24), (1, 32, 8, 12), (1, 48, 4, 6), (1, 64, 2, 3)]
    assert model.channels == [16, 32, 48, 64]
    model.save_pretrained(tmp_path)
    # TimmBackbone's own from_pretrained takes timm's names and no folders, so this is its parent's.
    again = super(transformers.TimmBackbone, transformers.TimmBackbone).from_pretrained(tmp_path, **PYRAMID).eval()
    assert_same_tensors(again, model)
    for y, other in zip(again(x).feature_maps, maps, strict=True):
        assert_close(y, other)


@pytest.mark.parametrize("name", ["soft_tiny", "vvt_tiny", VIT])
def test_transformers_classifier_comes_back_from_a_folder(transformers: Any, name: str, tmp_path: Path) -> None:
    config = transformers.TimmWrapperConfig(architecture=name, num_labels=10, model_args=widths(name))
    model = transformers.TimmWrapperForImageClassification(config).eval()
    enliven(model)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    assert_same_tensors(again, model)
    x = torch.randn(1, 3, 64, 96)
    assert_close(again(x).logits, model(x).logits)


# mmpretrain, mmdetection, mmsegmentation and detectron2, which do not install here: what their wrappers ask of timm


@pytest.mark.parametrize("name", PYRAMIDS)
def test_openmmlab_wrapper_keywords(name: str) -> None:
    """``mmpretrain.TIMMBackbone`` (mmdetection's and mmsegmentation's too) calls timm with all of these."""
    model = timm.create_model(
        model_name=name, features_only=True, pretrained=False, in_chans=3, checkpoint_path="", out_indices=(1, 2, 3),
        **PYRAMID,
    )  # fmt: skip
    maps = model(torch.randn(2, 3, 70, 90))
    assert isinstance(maps, list | tuple)
    assert [tuple(y.shape[1:]) for y in maps] == [(32, 9, 12), (48, 5, 6), (64, 3, 3)]
    assert model.feature_info.channels() == [32, 48, 64]


@pytest.mark.parametrize("name", [*PYRAMIDS, VIT])
def test_openmmlab_wrapper_resets_the_classifier(name: str) -> None:
    """Without ``features_only`` the wrapper takes head and pooling away, and returns what is left as one feature."""
    model = timm.create_model(
        model_name=name, features_only=False, pretrained=False, in_chans=1, checkpoint_path="", **widths(name)
    )
    model.reset_classifier(0, "")
    assert model(torch.randn(1, 1, 64, 64)).shape[0] == 1
    assert not [key for key, _ in model.named_parameters() if key.startswith("head.")]
