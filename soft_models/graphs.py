"""What records or watches the code that is running: questions whose answer decides how a model computes."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

__all__ = ["is_exporting", "is_graph", "is_open", "is_traced", "is_unobserved"]

# Private, but the same in all versions of torch that are supported.
GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")


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


def is_unobserved(module: nn.Module, x: Tensor) -> bool:
    """Whether how ``module`` computes shows nowhere: in evaluation of all its parts on a CPU, where no gradients are
    recorded, no graph is made, and no hooks look inside.
    """
    if torch.is_grad_enabled() or is_graph():
        return False
    if not isinstance(x, Tensor) or x.device.type != "cpu":  # proxies of torch.fx are none
        return False
    parts = list(module.modules())
    return not (any(part.training for part in parts) or is_watched(*parts))


def is_watched(*modules: nn.Module) -> bool:
    """Whether forward hooks, theirs or global, look at ``modules``, or something wraps ``forward``."""
    return any(getattr(torch_module, name) for name in GLOBAL_HOOKS) or any(
        module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module) for module in modules
    )
