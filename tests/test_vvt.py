"""VVT: official numbers, sizes, features, gradients."""

from collections.abc import Callable

import pytest
import timm
import torch
from official import (
    MINI,
    largest_deviation,
    official_images,
    official_outputs,
    official_shapes,
    official_state_dict,
    stage_outputs,
)
from torch import Tensor, nn

from soft_models.checkpoints import CheckpointError, checkpoint_filter_fn
from soft_models.vvt import ConvMlp, VicinityVisionTransformer


def official_weights(tag: str) -> dict[str, Tensor]:
    return official_state_dict(official_shapes("cosformer_vvt", tag))


def official_model(tag: str) -> VicinityVisionTransformer:
    kwargs = MINI if tag == "vvt_mini" else {}
    overlay = {"state_dict": official_weights(tag)}
    return timm.create_model("vvt_tiny", pretrained=True, pretrained_cfg_overlay=overlay, **kwargs).eval()


@pytest.mark.parametrize("case", ["vvt_mini/224x224", "vvt_mini/160x256", "vvt_tiny/224x224"])
def test_official_weights_give_the_official_numbers(case: str, record_property: Callable[[str, object], None]) -> None:
    tag, size = case.split("/")
    model = official_model(tag)
    with torch.no_grad():
        features, maps = model.forward_intermediates(official_images(*map(int, size.split("x"))))
        found = stage_outputs(model.forward_head(features), maps)
    deviation, words = largest_deviation(found, official_outputs("vvt"), case)
    record_property("deviation", words)
    assert deviation < 1e-4, words


def test_limits_are_part_of_the_released_model() -> None:
    model = official_model("vvt_mini")
    plain = VicinityVisionTransformer(**MINI, clamp=False).eval()
    plain.load_state_dict(model.state_dict())
    x = official_images(224, 224)
    with torch.no_grad():
        assert (plain(x) - model(x)).abs().max() > 0.05


def test_official_names_map_one_to_one() -> None:
    model = timm.create_model("vvt_tiny")
    weights = official_weights("vvt_tiny")
    converted = checkpoint_filter_fn({"model": {f"module.{k}": v for k, v in weights.items()}}, model)
    assert {k: v.shape for k, v in converted.items()} == {k: v.shape for k, v in model.state_dict().items()}
    assert sum(v.numel() for v in converted.values()) == sum(v.numel() for v in weights.values())
    own = model.state_dict()
    again = checkpoint_filter_fn(own, model)
    assert again.keys() == own.keys()
    assert all(torch.equal(again[k], own[k]) for k in own)


@pytest.mark.parametrize("missing", ["block3.1.attn.k_proj.bias", "norm2.weight", "patch_embed4.proj.weight"])
def test_incomplete_official_files_are_refused(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The hint which other model a file fits builds them all.
    monkeypatch.setattr("soft_models.checkpoints.convert.matching_names", lambda weights: [])
    weights = official_weights("vvt_tiny")
    del weights[missing]
    with pytest.raises(CheckpointError):
        timm.create_model("vvt_tiny", pretrained=True, num_classes=5, pretrained_cfg_overlay={"state_dict": weights})


def test_official_head_is_replaced_for_other_classes() -> None:
    overlay = {"state_dict": official_weights("vvt_tiny")}
    model = timm.create_model("vvt_tiny", pretrained=True, num_classes=7, pretrained_cfg_overlay=overlay)
    torch.testing.assert_close(model.stages[3].norm.weight, overlay["state_dict"]["norm4.weight"])
    assert model.head.weight.shape == (7, 512)


@pytest.mark.parametrize(
    ("name", "millions"), [("vvt_tiny", 12.88), ("vvt_small", 25.49), ("vvt_medium", 47.91), ("vvt_large", 61.85)]
)
def test_parameter_counts(name: str, millions: float) -> None:
    model = timm.create_model(name, device="meta")
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 2) == millions


def test_inference_in_place_equals_training_arithmetic() -> None:
    mlp = ConvMlp(8, 16).eval()
    x = torch.randn(2, 12, 8)
    with torch.no_grad():
        fast = mlp(x, (3, 4))
    assert torch.equal(fast, mlp(x, (3, 4)))


def test_what_looks_inside_the_mlp_sees_it_as_it_stands() -> None:
    mlp, x, seen = ConvMlp(4, 8).eval(), torch.randn(1, 6, 4), []
    with torch.no_grad():
        expected = mlp(x, (2, 3))
        hooks = [
            part.register_forward_hook(lambda module, inputs, output: seen.append((output, output.clone())))
            for part in (mlp.dwconv, mlp.act)
        ]
        torch.testing.assert_close(mlp(x, (2, 3)), expected)
        assert len(seen) == 2 and all(torch.equal(output, then) for output, then in seen), "written over"
        for hook in hooks:
            hook.remove()
        mlp.act = nn.ReLU().eval()
        assert not torch.allclose(mlp(x, (2, 3)), expected)


def test_pruning_ends_at_the_last_kept_stage() -> None:
    model = VicinityVisionTransformer(**MINI).eval()
    x = torch.randn(1, 3, 64, 64)
    expected = model.forward_intermediates(x, intermediates_only=True)[1]
    assert model.prune_intermediate_layers([1]) == [1]
    assert model.num_features == model.head_hidden_size == 64
    torch.testing.assert_close(model.forward_features(x), expected)
    torch.testing.assert_close(model(x), expected.mean(dim=(2, 3)))


def test_a_classifier_over_a_map_is_refused_and_the_model_stays_as_it_was() -> None:
    model, x = VicinityVisionTransformer(**MINI).eval(), torch.randn(1, 3, 64, 64)
    expected = model(x)
    with pytest.raises(ValueError, match="global_pool='' gives a map, which takes num_classes=0, got 10"):
        model.reset_classifier(10, "")
    assert torch.equal(model(x), expected)
    model.reset_classifier(0, "")
    assert model(x).shape == (1, model.num_features, 2, 2)
    model.reset_classifier(10)  # timm's contract: it keeps what pooling there is
    with pytest.raises(ValueError, match="global_pool='' gives a map, which takes num_classes=0, got 10"):
        model(x)
    model.reset_classifier(10, "avg")
    assert model(x).shape == (1, 10)


def test_wrong_arguments_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="unknown act_layer 'gleu'; choose a name of timm's"):
        VicinityVisionTransformer(act_layer="gleu")
    with pytest.raises(ValueError, match="num_heads needs 4 entries, one per stage, got 4"):
        VicinityVisionTransformer(num_heads=4)
    with pytest.raises(ValueError, match=r"depths needs 4 entries, one per stage, got \(1, 2\)"):
        VicinityVisionTransformer(depths=(1, 2))
