"""The arguments of the pyramid."""

from typing import Any

import pytest
import timm
import torch
from small_models import (
    CLASSES,
    PYRAMID,
    close,
    enliven,
    gradients,
    images,
    loss_of,
)
from torch import nn

from soft_models.attention import ATTENTIONS
from soft_models.attention.soft import Landmarks
from soft_models.pyramid import PyramidTransformer


def pyramid(**kwargs: Any) -> PyramidTransformer:
    return enliven(PyramidTransformer(**(PYRAMID | {"img_size": 64, "num_classes": CLASSES} | kwargs)).eval())


@pytest.mark.parametrize("place", ["attention", "stage4_attention"])
@pytest.mark.parametrize("attention", sorted(ATTENTIONS))
def test_pyramid_takes_every_attention(attention: str, place: str) -> None:
    model = pyramid(**{place: attention})
    with torch.no_grad():
        together = model(images())
        close(model(images()[1:]), together[1:], "logits of an image alone", rtol=1e-5)
    loss_of(model.train()(images())).backward()
    gradients(model)


@pytest.mark.parametrize("size", [(32, 32), (47, 65), (104, 32)])
@pytest.mark.parametrize(
    "options",
    [
        {"landmark_grid": None},
        {"landmark_grid": 3},
        {"landmark_grid": (2, 5)},
        {"landmark_grid": [2, 5]},
        {"landmarks": "conv"},
        {"landmarks": "conv", "landmark_grid": None},
        {"landmarks": "conv", "sr_ratios": (4, 4, 2, 1)},
        {"stage4_attention": "soft"},
        {"inverse": "newton", "newton_iters": 5},
        {"attention": "soft_norm"},
        {"attention": "soft_norm", "inverse": "newton"},
        {"local_kernels": (0, 0, 0)},
        {"global_pool": "avg"},
        {"act_layer": "relu"},
        {"act_layer": nn.SiLU},
        {"norm_layer": "layernorm"},
        {"norm_layer": nn.LayerNorm},
    ],
    ids=str,
)
def test_pyramid_options_take_any_size(options: dict[str, Any], size: tuple[int, int]) -> None:
    model = pyramid(**options)
    logits = model(images(size=size))
    assert logits.isfinite().all()
    loss_of(logits).backward()
    gradients(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"img_size": 31}, "img_size must be at least 32 x 32 pixels, got 31"),
        ({"img_size": (64, 16)}, r"img_size must be at least 32 x 32 pixels, got \(64, 16\)"),
        ({"embed_dims": (16, 32, 48)}, r"embed_dims needs 4 entries, one per stage, got \(16, 32, 48\)"),
        ({"depths": (1, 1, 1, 1, 1)}, "depths needs 4 entries"),
        ({"num_heads": (1, 2)}, "num_heads needs 4 entries"),
        ({"mlp_ratios": (4,)}, "mlp_ratios needs 4 entries"),
        ({"sr_ratios": (8, 4, 2)}, "sr_ratios needs 4 entries"),
        ({"local_kernels": (9, 5, 3, 3)}, "local_kernels needs 3 entries"),
        ({"mlp_ratios": (4, 0, 4, 4)}, "mlp_ratio must give the MLP a hidden unit, got 0 of 32"),
        ({"num_heads": (3, 2, 3, 4)}, "dim must be divisible by num_heads, got dim=16, num_heads=3"),
        ({"global_pool": "tokens"}, r"unknown global_pool 'tokens'; choose one of \('token', 'avg', ''\)"),
        ({"attention": "sfot"}, r"unknown attention 'sfot'; choose one of \[.*'soft'.*\]"),
        ({"stage4_attention": "sofmax"}, r"unknown attention 'sofmax'; choose one of \[.*'softmax'.*\]"),
        ({"landmarks": "average"}, "unknown landmarks 'average'; choose 'avg' or 'conv'"),
        ({"landmark_grid": -1}, "landmark_grid must be a positive number or"),
        ({"landmark_grid": (7, -1)}, r"\(height, width\) of such, got \(7, -1\)"),
        ({"landmark_grid": [7]}, r"\(height, width\) of such, got \[7\]"),
        ({"in_chans": 0}, "in_chans must be at least 1, got 0"),
        ({"embed_dims": (0, 32, 32, 32)}, r"embed_dims must be positive, got \(0, 32, 32, 32\)"),
        ({"sr_ratios": (8, 0, 2, 1), "landmark_grid": None}, "sr_ratio must be at least 1, got 0"),
        ({"local_kernels": (9, 4, 3)}, "local_kernel must be odd, or 0 for none, got 4"),
        ({"local_kernels": (9, -3, 3)}, "local_kernel must be odd, or 0 for none, got -3"),
        ({"newton_iters": 1}, "newton_iters must be at least 2, got 1"),
        ({"newton_iters": 9}, "newton_iters=9 is read by inverse='newton' only: set that as well"),
        ({"act_layer": "gleu"}, "unknown act_layer 'gleu'; choose a name of timm's, such as 'gelu'"),
        ({"inverse": "sovle"}, "unknown inverse 'sovle'; choose 'newton' or 'solve'"),
        ({"embed_dims": 64}, "embed_dims needs 4 entries, one per stage, got 64"),
        (
            {"attention": "softmax", "landmarks": "conv"},
            "landmarks='conv' is not read by attention 'softmax'; it is by soft, soft_norm",
        ),
        (
            {"attention": "linformer", "newton_iters": 9},
            "newton_iters=9 is not read by attention 'linformer' and 'softmax'; it is by soft, soft_norm",
        ),
        ({"attention": "softmax", "landmark_grid": 5}, "landmark_grid=5 is not read by attention 'softmax'"),
        ({"attention": "softmax", "inverse": "solve"}, "inverse='solve' is not read by attention 'softmax'"),
        ({"attention": "softmax", "sr_ratios": (4, 4, 2, 1)}, r"sr_ratios=\(4, 4, 2, 1\) is not read by attention"),
        (
            {"attention": "linformer", "sr_ratios": (4, 4, 2, 1)},
            r"sr_ratios=\(4, 4, 2, 1\) needs landmark_grid=0$",
        ),
        ({"sr_ratios": [4, 4, 2, 1]}, r"sr_ratios=\(4, 4, 2, 1\) needs landmarks='conv' or landmark_grid=0, which"),
        (
            {"attention": "softmax", "stage4_attention": "soft", "local_kernels": (3, 3, 3)},
            r"local_kernels=\(3, 3, 3\) is not read by attention 'softmax'; it is by soft, soft_norm",
        ),
    ],
    ids=str,
)
def test_pyramid_refuses_wrong_arguments_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PyramidTransformer(**(PYRAMID | {"device": "meta"} | options))


@pytest.mark.parametrize(
    ("landmarks", "inverse", "activation"), [("conv", "newton", "TanhGELU"), ("avg", "solve", "GELU")]
)
def test_conv_landmarks_bring_the_release_with_them(landmarks: str, inverse: str, activation: str) -> None:
    blocks = [block for stage in pyramid(landmarks=landmarks).stages for block in stage.blocks]
    assert {block.attn.inverse for block in blocks[:-1]} == {inverse}
    assert [type(block.mlp.act).__name__ for block in blocks] == [activation] * (len(blocks) - 1) + ["GELU"]


def test_pyramid_methods_refuse_wrong_arguments_by_name() -> None:
    model = pyramid()
    with pytest.raises(ValueError, match="img_size must be at least 32 x 32 pixels, got 16"):
        model.set_input_size(16)
    with pytest.raises(ValueError, match="unknown init mode 'jax'; choose one of"):
        model.init_weights("jax")
    with pytest.raises(ValueError, match="images must be at least 32 x 32 pixels, got 48 x 31"):
        model(images(size=(48, 31)))
    with pytest.raises(ValueError, match="at least sr_ratio x sr_ratio pixels, got 7 x 8 and sr_ratio=8"):
        pyramid(landmarks="conv", sr_ratios=(8, 8, 2, 1))(images(size=(56, 64)))


def test_class_token_pooling_is_the_first_token() -> None:
    model = pyramid(global_pool="token")
    tokens = model.forward_features(images())
    assert torch.equal(model.forward_head(tokens, pre_logits=True), tokens[:, 0])


def test_position_tables_are_made_for_the_image_size() -> None:
    model = pyramid(img_size=(75, 130))
    assert [tuple(stage.pos_embed.shape[1:3]) for stage in model.stages] == [(19, 33), (10, 17), (5, 9), (3, 5)]


def test_landmarks_by_cells_are_chosen_through_timm() -> None:
    """It drops keywords that are None."""
    model = timm.create_model("soft_tiny", landmark_grid=0, sr_ratios=(4, 2, 1, 1), **PYRAMID)
    grids = [(module.grid, module.sr_ratio) for module in model.modules() if isinstance(module, Landmarks)]
    assert grids == [(None, 4), (None, 2), (None, 1), (None, 1)]
