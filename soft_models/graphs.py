"""What records the code that is running: questions whose answer decides how a model computes."""

from typing import Any

import torch

__all__ = ["is_exporting", "is_graph", "is_open", "is_traced"]


def is_graph() -> bool:
    """Whether what runs is being traced, exported or compiled."""
    return bool(torch.compiler.is_compiling() or torch.jit.is_tracing())


def is_traced() -> bool:
    """Whether ``torch.jit.trace`` is at work: its graph may later run under an autocast that it does not switch off."""
    return bool(torch.jit.is_tracing() and not torch.onnx.is_in_onnx_export())


def is_exporting() -> bool:
    """Whether ``torch.export`` or one of the ONNX exporters is at work."""
    exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)  # torch 2.6 has the second only
    return bool(exporting() or torch.onnx.is_in_onnx_export())


def is_open(size: Any) -> bool:
    """Whether a graph that is being exported leaves a size open."""
    return isinstance(size, torch.SymInt)
