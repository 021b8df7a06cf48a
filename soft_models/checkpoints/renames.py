"""How the official checkpoints call what our models hold: one ordered table per family.

Each row is ``(pattern, replacement)``. The pattern must match the start of an official name, and the rest of the name
is kept. Groups are filled in by name; ``{stage}`` is the official stage number less one. A replacement that ends in
``[0]``, ``[1]`` is that part of a tensor which the official code keeps in pieces, put together along the first axis.
"""

import re

import torch
from torch import Tensor

__all__ = ["RENAMES", "rename"]

_BLOCK = r"block(?P<stage>[1-4])\.(?P<block>\d+)\."
_OURS = "stages.{stage}.blocks.{block}."

# fmt: off
SOFT = [
    (r"patch_embed1\.proj\.0\.",                          "patch_embed.0.0."),
    (r"patch_embed1\.proj\.1\.",                          "patch_embed.0.1."),
    (r"patch_embed1\.proj\.3\.",                          "patch_embed.1.0."),
    (r"patch_embed1\.proj\.4\.",                          "patch_embed.1.1."),
    (r"patch_embed1\.proj\.6\.",                          "patch_embed.2.0."),
    (r"patch_embed1\.proj\.7\.",                          "patch_embed.2.1."),
    (r"patch_embed(?P<stage>[2-4])\.proj\.(?P<n>[01])\.", "stages.{stage}.downsample.{n}."),
    (r"pos_embed(?P<stage>[1-4])$",                       "stages.{stage}.pos_embed"),
    (r"cls_token$",                                       "stages.3.cls_token"),
    (_BLOCK + r"att\.mha\.W_q\.",                         _OURS + "attn.q."),
    (_BLOCK + r"att\.mha\.W_v\.",                         _OURS + "attn.v."),
    (_BLOCK + r"att\.mha\.attn\.Qlandmark_op\.",          _OURS + "attn.landmarks.conv."),
    (_BLOCK + r"att\.mha\.attn\.Qnorm_act\.0\.",          _OURS + "attn.landmarks.norm."),
    (_BLOCK + r"att\.mha\.attn\.conv\.",                  _OURS + "attn.local."),
    (_BLOCK + r"att\.mha\.ff\.",                          _OURS + "attn.proj."),
    (_BLOCK + r"att\.ff(?P<n>[12])\.",                    _OURS + "mlp.fc{n}."),
    (_BLOCK + r"att\.norm(?P<n>[12])\.",                  _OURS + "norm{n}."),
    (_BLOCK + r"attn\.q\.",                               _OURS + "attn.qkv.[0]"),
    (_BLOCK + r"attn\.kv\.",                              _OURS + "attn.qkv.[1]"),
    (_BLOCK + r"attn\.proj\.",                            _OURS + "attn.proj."),
    (_BLOCK + r"mlp\.fc(?P<n>[12])\.",                    _OURS + "mlp.fc{n}."),
    (_BLOCK + r"norm(?P<n>[12])\.",                       _OURS + "norm{n}."),
]
VVT = [
    (r"patch_embed1\.",                                   "patch_embed."),
    (r"patch_embed(?P<stage>[2-4])\.",                    "stages.{stage}.downsample."),
    (r"norm(?P<stage>[1-4])\.",                           "stages.{stage}.norm."),
    (_BLOCK + r"attn\.q_proj\.",                          _OURS + "attn.qkv.[0]"),
    (_BLOCK + r"attn\.k_proj\.",                          _OURS + "attn.qkv.[1]"),
    (_BLOCK + r"attn\.v_proj\.",                          _OURS + "attn.qkv.[2]"),
    (_BLOCK + r"attn\.out_proj\.",                        _OURS + "attn.proj."),
    (_BLOCK + r"attn\.se_fc\.",                           _OURS + "attn.gate."),
    (_BLOCK + r"mlp\.dwconv\.dwconv\.",                   _OURS + "mlp.dwconv."),
    (_BLOCK,                                              _OURS),
]
# fmt: on

# For each family a name that only its files have, and its table.
RENAMES = (
    (r"block1\.0\.att\.mha\.W_q\.", SOFT),
    (r"block1\.0\.attn\.q_proj\.", VVT),
)


def rename(state_dict: dict[str, Tensor], table: list[tuple[str, str]]) -> dict[str, Tensor]:
    """Apply one table; names that no row matches stay as they are, a tensor that lacks a piece is left out."""
    rows = [(re.compile(pattern), replacement) for pattern, replacement in table]
    result: dict[str, Tensor] = {}
    pieces: dict[str, dict[int, Tensor]] = {}
    counts: dict[str, int] = {}
    for name, tensor in state_dict.items():
        target, count = _translate(name, rows)
        part = re.search(r"\[(\d)\]", target)
        if part is None:
            result[target] = tensor
        else:
            whole = target.replace(part[0], "")
            pieces.setdefault(whole, {})[int(part[1])] = tensor
            counts[whole] = count
    for whole, found in pieces.items():
        if len(found) == counts[whole]:
            result[whole] = torch.cat([found[i] for i in sorted(found)])
    return result


def _translate(name: str, rows: list[tuple[re.Pattern[str], str]]) -> tuple[str, int]:
    """The new name, and of how many pieces its tensor is made."""
    for pattern, replacement in rows:
        match = pattern.match(name)
        if match:
            groups = match.groupdict()
            if "stage" in groups:
                groups["stage"] = str(int(groups["stage"]) - 1)
            whole = replacement.partition("[")[0]
            count = sum(other.partition("[")[0] == whole for _, other in rows)
            return replacement.format(**groups) + name[match.end() :], count
    return name, 1
