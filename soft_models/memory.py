"""The memory of freed tensors on a CPU: kept by the process, where glibc would hand it back to the system.

A buffer that comes from the system comes page by page, each cleared first: several times the work of filling it.
"""

import ctypes
import os
import platform
from functools import cache

import torch

__all__ = ["keep_freed_memory", "keep_small_buffers"]

LARGEST_KEPT = 2**25 - 2**16  # bytes; just below the 32 MiB up to which glibc learns from what is freed
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h


@cache
def keep_small_buffers() -> None:
    """Let glibc learn that the process uses buffers of 32 MiB, by one that is freed untouched.

    From then on it keeps smaller ones, and twice as much in all. Without this it learns from the tensors as they come,
    and until then a model takes longer. Other allocators are not changed.
    """
    torch.empty(LARGEST_KEPT, dtype=torch.uint8, device="cpu")  # whatever the default device is


def keep_freed_memory() -> None:
    """Make glibc keep all freed memory, unless the environment sets its allocator up: for processes of our own."""
    if platform.libc_ver()[0] == "glibc" and not any(name.startswith(("MALLOC_", "GLIBC_")) for name in os.environ):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
