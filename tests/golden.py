"""What users' checkpoints depend on, recorded: names and shapes of the weights, and logits of weights that follow from
the names.

    python tests/golden.py                 record what has no record yet
    python tests/golden.py soft_tiny ...   record these anew

A change in a record orphans checkpoints: it needs a way for old ones to load (``soft_models/checkpoints``).
"""

import json
import sys
from pathlib import Path
from typing import Any

import timm
import torch
from small_models import enliven, family_names

from soft_models.registry import registered_names

FOLDER = Path(__file__).parent / "data/golden"
# One of each family, and every attention in SOFT-Tiny's body.
NAMES = sorted({*family_names(), *(name for name in registered_names() if name.startswith("pyramid_tiny_"))})
LOGITS = 8
SIZE = (96, 64)  # position tables are resized to it


def record(name: str) -> dict[str, Any]:
    """Names, shapes and the first logits of a registered model."""
    model = enliven(timm.create_model(name).eval())
    with torch.no_grad():
        logits = model(torch.randn(1, 3, *SIZE, generator=torch.Generator().manual_seed(0)))
    return {
        "tensors": {key: list(tensor.shape) for key, tensor in model.state_dict().items()},
        "logits": [round(value, 6) for value in logits[0, :LOGITS].tolist()],
    }


def recorded(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or [name for name in NAMES if not (FOLDER / f"{name}.json").exists()]:
        text = json.dumps(record(name)).replace('], "', '],\n"')
        (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")
