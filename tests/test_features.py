"""Feature maps of the models, and that no parameter is unused whatever part of a model is."""

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import (
    CLASSES,
    SIZE,
    close,
    gradients,
    images,
    loss_of,
    map_sizes,
    over_families,
    over_names,
    same,
    shared,
    small,
)
from torch import nn
from torchvision.ops import FeaturePyramidNetwork

# Feature maps.


@over_names
def test_features_equal_the_intermediates_of_the_full_model(name: str) -> None:
    model, x = shared(name), images()
    features = small(name, features_only=True)
    missing, unexpected = features.model.load_state_dict(model.state_dict(), strict=False)
    assert not missing, f"the classifier lacks {missing}"
    assert set(unexpected) <= {key for key in model.state_dict() if key.startswith(("head", "norm", "fc_norm"))}
    with torch.no_grad():
        maps = features(x)
        expected = model.forward_intermediates(x, intermediates_only=True)[-len(maps) :]
    for i, (actual, wanted) in enumerate(zip(maps, expected, strict=True)):
        same(actual, wanted, f"map {i}")


@over_names
@pytest.mark.parametrize("out_indices", [(0, 2), (-1,), [2, 1], (2, -3), 2])
def test_out_indices_come_in_order_of_execution_and_as_described(name: str, out_indices: Any) -> None:
    model = small(name, features_only=True, out_indices=out_indices)
    infos = shared(name).feature_info
    last = range(len(infos) - out_indices, len(infos)) if isinstance(out_indices, int) else out_indices
    chosen = sorted({i % len(infos) for i in last})
    with torch.no_grad():
        maps = model(images())
        expected = shared(name).forward_intermediates(images(), intermediates_only=True)
    assert model.feature_info.reduction() == [infos[i]["reduction"] for i in chosen]
    assert model.feature_info.channels() == [y.shape[1] for y in maps]
    for actual, index in zip(maps, chosen, strict=True):
        close(actual, expected[index], f"map {index}")


@over_names
@pytest.mark.parametrize("out_indices", [(99,), (-99,), (0, 99)])
def test_out_indices_out_of_range_are_refused(name: str, out_indices: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError, match="out of range"):
        small(name, features_only=True, out_indices=out_indices)


@over_names
def test_final_map_is_the_pixels_of_the_features(name: str) -> None:
    model, x = shared(name), images()
    with torch.no_grad():
        final, maps = model.forward_intermediates(x, norm=True)
        features = model.forward_features(x)
    close(final, features, "features")
    H, W = map_sizes(model, SIZE)[-1]
    assert maps[-1].ndim == 4
    pixels = features.flatten(2).transpose(1, 2) if features.ndim == 4 else features[:, features.shape[1] - H * W :]
    close(maps[-1].flatten(2).transpose(1, 2), pixels, "last map, which holds no class token")


@over_names
def test_average_pooling_is_the_mean_of_the_final_map(name: str) -> None:
    model, x = copy.deepcopy(shared(name)), images()
    model.reset_classifier(CLASSES, "avg")
    with torch.no_grad():
        mean = model.forward_intermediates(x, norm=True, intermediates_only=True)[-1].mean(dim=(2, 3))
        expected = getattr(model, "fc_norm", nn.Identity())(mean)
        close(model.forward_head(model.forward_features(x), pre_logits=True), expected, "pre-logits")


@over_names
def test_feature_pyramid_network_takes_the_maps(name: str) -> None:
    model = small(name, features_only=True)
    with torch.no_grad():
        maps = {str(i): y for i, y in enumerate(model(images(size=(83, 125))))}
        merged = FeaturePyramidNetwork(model.feature_info.channels(), 24)(maps)
    assert [y.shape for y in merged.values()] == [(2, 24, *y.shape[2:]) for y in maps.values()]


@over_names
@pytest.mark.parametrize("indices", [None, 1, [0, -1]])
def test_stopping_early_changes_no_map(name: str, indices: Any) -> None:
    model, x = shared(name), images()
    with torch.no_grad():
        maps = model.forward_intermediates(x, indices=indices, intermediates_only=True)
        early = model.forward_intermediates(x, indices=indices, stop_early=True, intermediates_only=True)
    for i, (actual, expected) in enumerate(zip(early, maps, strict=True)):
        same(actual, expected, f"map {i}")


@over_names
def test_unknown_output_format_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"output_fmt.*'NCHW'"):
        shared(name).forward_intermediates(images(), output_fmt="NHWC")


# Every parameter is used.


@over_names
def test_no_subset_of_the_maps_leaves_a_parameter_unused(name: str) -> None:
    indices = range(len(shared(name).feature_info))
    for size in range(1, len(indices) + 1):
        for out_indices in itertools.combinations(indices, size):
            model = small(name, features_only=True, out_indices=out_indices).train()
            loss_of(*model(images(size=(32, 48)))).backward()
            without = [key for key, p in model.named_parameters() if p.grad is None]
            assert not without, f"out_indices={out_indices} leaves without a gradient: {without}"


@over_names
@pytest.mark.parametrize("options", [{"num_classes": 0}, {"global_pool": "avg"}, {"num_classes": 0, "global_pool": ""}])
def test_no_form_of_the_head_leaves_a_parameter_unused(name: str, options: dict[str, Any]) -> None:
    model = small(name, **options).train()
    loss_of(model(images())).backward()
    gradients(model)


def run_distributed(rank: int, folder: str, name: str, options: dict[str, Any]) -> None:
    """One of two processes: three steps, then both must hold the same parameters."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    model = nn.parallel.DistributedDataParallel(small(name, **options).train(), find_unused_parameters=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        outputs = model(torch.randn(2, 3, *SIZE))
        optimizer.zero_grad()
        loss_of(*outputs if isinstance(outputs, list) else (outputs,)).backward()
        optimizer.step()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    both = [torch.empty_like(flat) for _ in range(2)]
    torch.distributed.all_gather(both, flat)
    assert torch.equal(both[0], both[1]), "the processes hold different parameters"
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"num_classes": 0}, {"features_only": True}], ids=str)
@over_families
def test_two_processes_train_without_unused_parameters(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    torch.multiprocessing.spawn(run_distributed, (str(tmp_path), name, options), nprocs=2)
