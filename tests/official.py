"""Stand-ins for the official checkpoints: weights that follow from the parameters' names, and the outputs they gave.

``data/*_keys.json`` list the official names and shapes; the numbers in ``data/*_official.npz`` were computed by the
released code from these weights (CPU, float32).
"""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

DATA = Path(__file__).parent / "data"

MINI: dict[str, Any] = {
    "embed_dims": (32, 64, 96, 128),
    "num_heads": (1, 2, 3, 4),
    "depths": (1, 1, 2, 1),
    "num_classes": 10,
}


def official_state_dict(shapes: dict[str, list[int]], ill: bool = False) -> dict[str, Tensor]:
    """Weights by official name; ``ill`` makes the landmark kernels ill-conditioned."""
    return {name: _tensor(name, shape, ill) for name, shape in shapes.items()}


def _tensor(name: str, shape: list[int], ill: bool) -> Tensor:
    if name.endswith("num_batches_tracked"):
        return torch.zeros(shape, dtype=torch.int64)
    numbers = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(int(np.prod(shape)))
    value = torch.from_numpy(numbers.astype(np.float32)).reshape(shape)
    if name.endswith("running_var"):
        value = 1 + 0.1 * value.abs()
    elif name.endswith("running_mean"):
        value = 0.1 * value
    elif "pos_embed" in name or name == "cls_token":
        value = 0.2 * value
    elif len(shape) == 1:
        value = 1 + 0.1 * value if name.endswith("weight") else 0.02 * value
    else:
        value = value / float(np.sqrt(np.prod(shape[1:])))
    if ill and "Qnorm_act.0." in name:
        value = value * 0.2
    if ill and "W_q" in name:
        value = value * 0.5
    return value


def official_shapes(file: str, tag: str) -> dict[str, list[int]]:
    """Names and shapes of one entry of ``data/<file>_keys.json``."""
    return json.loads((DATA / f"{file}_keys.json").read_text(encoding="utf-8"))[tag]


def official_images(height: int, width: int) -> Tensor:
    return torch.from_numpy(np.random.RandomState(0).standard_normal((1, 3, height, width)).astype(np.float32))


def official_outputs(file: str) -> dict[str, Tensor]:
    with np.load(DATA / f"{file}_official.npz") as numbers:
        return {key: torch.from_numpy(numbers[key]) for key in numbers.files}


def largest_deviation(found: dict[str, Tensor], expected: dict[str, Tensor], entry: str) -> tuple[float, str]:
    """Of the outputs of one ``entry`` from the official ones, by name, and in words."""
    deviations = {what: (x - expected[f"{entry}/{what}"]).abs().max().item() for what, x in found.items()}
    words = ", ".join(f"{what} {value:.1e}" for what, value in deviations.items())
    return max(deviations.values()), f"{entry}: {words}"


def stage_outputs(logits: Tensor, maps: list[Tensor]) -> dict[str, Tensor]:
    """A pyramid's outputs as the data files hold them: the logits whole, of the maps every so many entries."""
    return {"logits": logits} | {f"stage{i}": x[:, ::16, ::4, ::4] for i, x in enumerate(maps, start=1)}


def mini(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    return timm.create_model("soft_conv_tiny", pretrained=pretrained, **(MINI | kwargs)).eval()


def official() -> dict[str, Tensor]:
    return official_state_dict(official_shapes("soft_official", "soft_mini"))


def nested(prefix: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda weights: {prefix + name: tensor for name, tensor in weights.items()}


def write(content: dict[str, Any], path: Path) -> Path:
    if path.suffix == ".safetensors":
        save_file({name: tensor.contiguous() for name, tensor in content.items()}, path)
    else:
        torch.save(content, path)
    return path


def door_overlay(path: Path) -> nn.Module:
    return mini(pretrained=True, pretrained_cfg_overlay={"file": str(path)})
