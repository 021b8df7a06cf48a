"""cosFormer-ViT: sizes, features, start from timm's checkpoints."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from small_models import enliven
from timm.data import IMAGENET_INCEPTION_MEAN, IMAGENET_INCEPTION_STD
from torch import nn

from soft_models.checkpoints import CheckpointError
from soft_models.checkpoints.vit import vit_filter_fn
from soft_models.variants.cosformer_vit import default_cfgs
from soft_models.vit import MapVisionTransformer

TINY = "cosformer_vit_tiny_patch16_224"
SMALL = {"embed_dim": 24, "depth": 2, "num_heads": 3}
SOURCES = (
    "vit_tiny_patch16_224.augreg_in21k_ft_in1k",
    "deit_tiny_patch16_224.fb_in1k",
    "deit_tiny_distilled_patch16_224.fb_in1k",
    "deit3_small_patch16_224.fb_in1k",
)


@pytest.mark.parametrize(("size", "millions"), [("tiny", 5.72), ("small", 22.05), ("base", 86.57)])
@pytest.mark.parametrize("family", ["cosformer", "cosformer2d"])
def test_parameter_counts(family: str, size: str, millions: float) -> None:
    model = timm.create_model(f"{family}_vit_{size}_patch16_224", device="meta")
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 2) == millions


def test_without_padding_other_sizes_are_refused() -> None:
    model = MapVisionTransformer(64, dynamic_img_pad=False, **SMALL)
    assert model(torch.randn(1, 3, 32, 96)).shape == (1, 1000)
    with pytest.raises(AssertionError, match="divisible by patch size"):
        model(torch.randn(1, 3, 60, 64))


def test_fixed_size_equals_dynamic_size() -> None:
    dynamic = MapVisionTransformer((64, 96), attention="cosformer2d", **SMALL).eval()
    fixed = MapVisionTransformer(
        (64, 96), attention="cosformer2d", dynamic_img_size=False, dynamic_img_pad=False, **SMALL
    ).eval()
    fixed.load_state_dict(dynamic.state_dict())
    x = torch.randn(2, 3, 64, 96)
    torch.testing.assert_close(fixed(x), dynamic(x))


def test_intermediates_in_both_formats_and_as_dict() -> None:
    model = MapVisionTransformer((64, 96), global_pool="", **SMALL).eval()
    x = torch.randn(2, 3, 64, 96)
    final, maps = model.forward_intermediates(x, norm=True)
    torch.testing.assert_close(final, model.forward_features(x))
    torch.testing.assert_close(maps[-1].flatten(2).transpose(1, 2), final)
    tokens = model.forward_intermediates(x, [0], norm=True, stop_early=True, output_fmt="NLC", intermediates_only=True)
    torch.testing.assert_close(tokens[0], maps[0].flatten(2).transpose(1, 2))
    result = model.forward_intermediates(x, output_dict=True)
    torch.testing.assert_close(result["image_features"], final)
    assert len(result["image_intermediates"]) == 2
    torch.testing.assert_close(model.get_intermediate_layers(x, 1, norm=True)[0], final)


def test_wrong_arguments_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="unknown attention 'cosfromer'; choose one of"):
        MapVisionTransformer(**SMALL, attention="cosfromer")
    with pytest.raises(ValueError, match="unknown act_layer 'gleu'; choose a name of timm's"):
        MapVisionTransformer(**SMALL, act_layer="gleu")
    with pytest.raises(ValueError, match="unknown norm_layer 'layrnorm'; choose a name of timm's"):
        MapVisionTransformer(**SMALL, norm_layer="layrnorm")
    with pytest.raises(ValueError, match="linear attention takes no mask"):
        MapVisionTransformer(64, **SMALL).forward_intermediates(torch.randn(1, 3, 64, 64), is_causal=True)


# From timm's checkpoints


def save_source(folder: Path, name: str, **kwargs: Any) -> tuple[Path, nn.Module]:
    """A random timm model and its file, named as timm's downloads are."""
    model = enliven(timm.create_model(name, **kwargs).eval())
    path = folder / f"{name}.pth"
    torch.save(model.state_dict(), path)
    return path, model


def mean_pooled(source: nn.Module, name: str, **kwargs: Any) -> nn.Module:
    """timm's own model of the same weights, mean pooled and without prefix tokens."""
    name = name.split(".")[0].replace("_distilled", "")
    model = timm.create_model(name, class_token=False, global_pool="avg", **kwargs).eval()
    params = {
        k.replace("norm.", "fc_norm.") if k.startswith("norm.") else k: v
        for k, v in source.state_dict().items()
        if k not in ("cls_token", "dist_token") and not k.startswith("head_dist")
    }
    params["pos_embed"] = params["pos_embed"][:, -model.patch_embed.num_patches :]
    model.load_state_dict(params)
    return model


def ours_for(name: str, **kwargs: Any) -> nn.Module:
    size = "tiny" if "tiny" in name else "small"
    return timm.create_model(f"cosformer_vit_{size}_patch16_224", pretrained=True, depth=2, **kwargs).eval()


@pytest.mark.parametrize("name", SOURCES)
def test_start_from_timm_reproduces_mean_pooled_outputs_under_softmax(tmp_path: Path, name: str) -> None:
    path, source = save_source(tmp_path, name, depth=2)
    overlay = {"file": str(path)}
    model = ours_for(name, pretrained_cfg_overlay=overlay, attention="softmax")
    x = torch.randn(2, 3, 224, 224)
    torch.testing.assert_close(model(x), mean_pooled(source, name, depth=2)(x), rtol=1e-4, atol=1e-4)
    linear = ours_for(name, pretrained_cfg_overlay=overlay)
    assert (linear(x) - model(x)).abs().max() > 1e-3


@pytest.mark.parametrize("name", SOURCES)
def test_start_from_timm_takes_mean_and_std_over_and_logs_what_it_drops(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, source = save_source(tmp_path, name, depth=2)
    with caplog.at_level(logging.WARNING):
        model = ours_for(name, pretrained_cfg_overlay={"file": str(path)})
    assert model.pretrained_cfg["mean"] == source.pretrained_cfg["mean"]
    assert model.pretrained_cfg["std"] == source.pretrained_cfg["std"]
    assert f"Started from {name}; dropped cls_token" in caplog.text
    if "distilled" in name:
        assert "dist_token, head_dist.bias, head_dist.weight" in caplog.text
    assert ("LayerScale folded" in caplog.text) == ("deit3" in name)


def test_source_is_read_from_config_json_architecture_or_cache_path(tmp_path: Path) -> None:
    _, source = save_source(tmp_path, "vit_tiny_patch16_224.augreg_in21k_ft_in1k", depth=2)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("plain/model.bin", {"architecture": "vit_tiny_patch16_224"}),
        ("hub/models--timm--vit_tiny_patch16_224.augreg_in21k_ft_in1k/snapshots/0a1b/model.bin", {}),
        ("saved/pytorch_model.bin", {}),
        ("hub2/models--timm--vit_tiny_patch16_224.augreg_in21k_ft_in1k/snapshots/list/model.bin", {}),
        ("hub2/models--timm--vit_tiny_patch16_224.augreg_in21k_ft_in1k/snapshots/text/model.bin", {}),
    ]
    of_others = {"list": "[]", "text": "no JSON"}
    for place, extra in cases:
        path = tmp_path / place
        path.parent.mkdir(parents=True)
        torch.save(source.state_dict(), path)
        if place.startswith("saved"):
            config = {"architecture": "vit_tiny_patch16_224", "pretrained_cfg": {"tag": "augreg_in21k_ft_in1k"}}
            (path.parent / "config.json").write_text(json.dumps(config), encoding="utf-8")
        elif path.parent.name in of_others:
            (path.parent / "config.json").write_text(of_others[path.parent.name], encoding="utf-8")
        model = timm.create_model(TINY, pretrained=True, depth=2, pretrained_cfg_overlay={"file": str(path), **extra})
        assert model.pretrained_cfg["mean"] == IMAGENET_INCEPTION_MEAN, place
        assert model.pretrained_cfg["std"] == IMAGENET_INCEPTION_STD, place


def test_unnamed_source_keeps_mean_and_says_so_and_given_values_win(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, _source = save_source(tmp_path, "vit_tiny_patch16_224.augreg_in21k_ft_in1k", depth=2)
    renamed = path.rename(tmp_path / "weights.pth")
    overlay: dict[str, Any] = {"file": str(renamed)}
    model = timm.create_model(TINY, pretrained=True, depth=2, pretrained_cfg_overlay=overlay)
    assert model.pretrained_cfg["mean"] == default_cfgs[TINY].default.mean
    assert "Nothing names the model" in caplog.text
    caplog.clear()
    overlay |= {"mean": (0.1, 0.2, 0.3), "std": (1.0, 1.0, 1.0)}
    model = timm.create_model(TINY, pretrained=True, depth=2, pretrained_cfg_overlay=overlay)
    assert model.pretrained_cfg["mean"] == (0.1, 0.2, 0.3)
    assert "Nothing names the model" not in caplog.text


def test_start_from_other_sizes_channels_and_classes(tmp_path: Path) -> None:
    name = "deit_tiny_patch16_224.fb_in1k"
    path, source = save_source(tmp_path, name, depth=2, num_classes=37)
    overlay = {"file": str(path)}
    model = ours_for(name, pretrained_cfg_overlay=overlay, num_classes=10, img_size=(128, 320), in_chans=1)
    assert model.pretrained_cfg["num_classes"] == 37
    assert model.head.weight.shape == (10, 192)
    assert model.pos_embed.shape == (1, 8 * 20, 192)
    gray = torch.randn(1, 1, 128, 320)
    colour = ours_for(name, pretrained_cfg_overlay=overlay, num_classes=10, img_size=(128, 320))
    colour.head.load_state_dict(model.head.state_dict())
    torch.testing.assert_close(model(gray), colour(gray.expand(-1, 3, -1, -1)), rtol=1e-4, atol=1e-4)
    kept = ours_for(name, pretrained_cfg_overlay=overlay, num_classes=37)
    torch.testing.assert_close(kept.head.weight, source.head.weight)


def test_own_checkpoints_load_unchanged_and_into_another_image_size(tmp_path: Path) -> None:
    own = enliven(timm.create_model(TINY, depth=2).eval())
    path = tmp_path / "own.pth"
    torch.save({"state_dict": {f"module.{k}": v for k, v in own.state_dict().items()}}, path)
    model = timm.create_model(TINY, pretrained=True, depth=2, pretrained_cfg_overlay={"file": str(path)}).eval()
    x = torch.randn(1, 3, 96, 96)
    torch.testing.assert_close(model(x), own(x))
    wide = timm.create_model(
        TINY, pretrained=True, depth=2, img_size=(64, 160), pretrained_cfg_overlay={"file": str(path)}
    ).eval()
    x = torch.randn(1, 3, 64, 160)
    torch.testing.assert_close(wide(x), own(x), rtol=1e-4, atol=1e-5)
    features = timm.create_model(
        TINY, pretrained=True, depth=2, features_only=True, out_indices=1, pretrained_cfg_overlay={"file": str(path)}
    ).eval()
    torch.testing.assert_close(features(x)[0], own.forward_intermediates(x, 1, intermediates_only=True)[0])


def test_old_layer_scale_names_are_folded_too() -> None:
    source = enliven(timm.create_model("deit3_small_patch16_224", depth=2).eval())
    model = timm.create_model("cosformer_vit_small_patch16_224", depth=2)
    old = {k.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): v for k, v in source.state_dict().items()}
    expected = vit_filter_fn(source.state_dict(), model)
    for key, value in vit_filter_fn({"model": old}, model).items():
        torch.testing.assert_close(value, expected[key])


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("vit_small_patch16_224.augreg_in1k", {}),  # another width
        ("deit_tiny_patch16_224.fb_in1k", {"depth": 3}),  # another depth
        ("vit_tiny_patch16_224", {"patch_size": 32}),
        ("swin_tiny_patch4_window7_224", {"depths": (1, 1, 1, 1)}),
        ("beit_base_patch16_224", {"embed_dim": 192, "num_heads": 3}),
        ("vit_medium_patch16_reg4_gap_256", {"embed_dim": 192, "num_heads": 3}),
        ("vit_base_patch16_clip_224.openai", {"embed_dim": 192, "num_heads": 3}),
        ("vit_base_patch16_siglip_224", {"embed_dim": 192, "num_heads": 3}),
    ],
)
def test_other_architectures_are_refused_by_name(
    tmp_path: Path, name: str, kwargs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The hint which other model a file fits builds them all.
    monkeypatch.setattr("soft_models.checkpoints.convert.matching_names", lambda weights: [])
    path, _ = save_source(tmp_path, name, **({"depth": 2} if "swin" not in name else {}) | kwargs)
    with pytest.raises(CheckpointError, match=rf"cannot start from '{name}'.*choose one of timm's vit_\*_patch16_N"):
        timm.create_model(TINY, pretrained=True, depth=2, pretrained_cfg_overlay={"file": str(path)})
    unnamed = path.rename(tmp_path / "x.pth")
    with pytest.raises(CheckpointError, match="cannot start from 'this file'"):
        timm.create_model(TINY, pretrained=True, depth=2, pretrained_cfg_overlay={"file": str(unnamed)})


def test_unknown_grid_is_refused_and_can_be_named(tmp_path: Path) -> None:
    name = "deit_tiny_patch16_224"
    path, source = save_source(tmp_path, name, depth=2, img_size=(96, 160))
    with pytest.raises(CheckpointError, match="cannot tell the grid of a position table with 61 rows"):
        ours_for(name, pretrained_cfg_overlay={"file": str(path)})
    model = ours_for(name, pretrained_cfg_overlay={"file": str(path), "input_size": (3, 96, 160)}, img_size=(96, 160))
    torch.testing.assert_close(model.pos_embed, source.pos_embed[:, 1:])
