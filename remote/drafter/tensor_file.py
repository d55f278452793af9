"""Tensors written to a safetensors file, durably, with a full disk told as what it is.

The library says a full disk in an error class of its own, which nobody who watches for an OSError catches.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes the file anew and syncs it. OSError, with its errno, names the file: the disk is full, say."""
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), f"{os.strerror(int(number[1]))}: {path}") from None
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
