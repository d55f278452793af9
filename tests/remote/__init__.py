"""Tests of what is shipped. Without a card Triton's kernels run in its interpreter.

Triton decides when it is first imported, so this stands before every import of `remote`. The other tests never launch
a kernel on a CPU, and the interpreter changes nothing for them.
"""

import os
import sys

import torch

if not torch.cuda.is_available():
    assert "triton" not in sys.modules, "Triton was imported before tests.remote could choose its interpreter"
    os.environ.setdefault("TRITON_INTERPRET", "1")
