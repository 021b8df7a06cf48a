"""What the comparison of attentions measures: models, sizes, and the names of the cells."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from soft_models.attention import ATTENTIONS

MODELS = {
    name: f"{name}_tiny" if name in ("soft", "soft_norm") else f"pyramid_tiny_{name}"
    for name in ("softmax", "linformer", "performer", "nystromformer", *sorted(ATTENTIONS))  # the paper's order first
}
PEERS = ("pvt_v2_b1", "xcit_tiny_24_p16_224", "efficientvit_b1")
WIDTH, HEADS = 64, 2  # of the attention layer whose growth is fitted: stage 1's
EXPLICIT = "softmax, explicit"  # softmax with its N x N weights in memory
LAYERS = (*MODELS, EXPLICIT)


@dataclass(frozen=True)
class Plan:
    """What a run measures; sizes in pixels per side of images, sides in tokens of square maps."""

    inference_sizes: tuple[int, ...] = (224, 448, 896)
    training_sizes: tuple[int, ...] = (224, 448)
    memory_sizes: tuple[int, ...] = (896,)  # of inference; in training it is measured at all sizes
    images: int = 8  # per step at 224 pixels; fewer at larger sizes, by their area
    rounds: int = 5  # of models
    layer_rounds: int = 15
    cell_seconds: float = 12.0  # a cell gets no further sample after so long
    sides: tuple[int, ...] = (32, 45, 64, 91, 128)
    explicit_sides: tuple[int, ...] = (32, 45, 64, 91)

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> "Plan":
        """The plan that JSON holds, which knows no tuples."""
        values: Any = {key: tuple(value) if isinstance(value, list) else value for key, value in stored.items()}
        return cls(**values)

    def batch(self, size: int) -> int:
        return max(1, self.images * 224**2 // size**2)

    def layer_sides(self, name: str) -> tuple[int, ...]:
        return self.explicit_sides if name == EXPLICIT else self.sides

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Image sizes by kind of step."""
        return {"inference": self.inference_sizes, "training": self.training_sizes}

    @property
    def sizes_for_memory(self) -> dict[str, tuple[int, ...]]:
        return {"training": self.training_sizes, "inference": self.memory_sizes}

    def model_cell(self, kind: str, name: str, size: int) -> str:
        return f"{kind} {name} {size} {self.batch(size)}"

    def layer_cell(self, name: str, side: int) -> str:
        return f"layer {name} {side}"


QUICK = Plan((96, 192), (96,), (), 2, 2, 9, 1.0, (45, 64, 91), (32, 45, 64))


def memory_cell(cell: str) -> str:
    return f"memory {cell}"
