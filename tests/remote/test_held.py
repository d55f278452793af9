"""Which loop kept a block: told by stacks of made-up snapshots against sources that really lie there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from remote.drafter.held import REPEATED, keeper, summarise

SOURCE = """\
def attend(chunk, keys):
    wide = keys.repeat(4)
    return chunk @ wide

def chunked(queries, keys):
    outputs = []
    for chunk in queries:
        outputs.append(attend(chunk, keys))
    return [attend(chunk, keys) for chunk in queries]

class Model:
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

def train(model, optimizer, batches):
    remembered = []
    weights = model.weights()
    for batch in batches:
        loss = model(batch)
        loss.backward()
        optimizer.step()
        def later():
            return model.state()
        remembered.append(later())
    while True:
        model.evaluate()
"""
SITE = "/v/lib/python3.12/site-packages/"
CALL = {"filename": f"{SITE}torch/nn/modules/module.py", "line": 1779, "name": "_call_impl"}
LINEAR = {"filename": f"{SITE}torch/nn/functional.py", "line": 9, "name": "linear"}
MIB = 1024**2


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "model.py").write_text(SOURCE)
    return str(tmp_path / "model.py")


def at(file: str, line: int, name: str = "f") -> dict[str, Any]:
    return {"filename": file, "line": line, "name": name}


def test_the_first_loop_around_a_stack_says_what_kept_its_blocks(file: str) -> None:
    in_train = [at(file, 21, "train")]
    chunk = [at(file, 2, "attend"), at(file, 8, "chunked"), *in_train]
    layer = [LINEAR, at(file, 3, "attend"), CALL, at(file, 14, "forward"), CALL, *in_train]

    assert keeper(chunk) == "chunks"
    assert keeper([at(file, 2, "attend"), at(file, 9, "chunked")]) == "chunks"
    assert keeper(layer) == "layers"
    assert (
        keeper([LINEAR, CALL, {"filename": f"{SITE}torch/nn/modules/container.py", "line": 3, "name": "forward"}])
        == "layers"
    )
    assert keeper([LINEAR, *in_train]) == "steps"
    assert keeper([LINEAR, at(file, 19, "train")]) is None
    assert keeper([LINEAR, at(file, 28, "train")]) == "chunks"  # a loop that trains nothing
    assert keeper([at(file, 25, "later")]) is None  # made in a loop, run wherever it is called
    assert keeper([]) == "backward"


def test_an_optimizer_and_a_checkpoint_are_told_before_any_loop(file: str) -> None:
    adam = {"filename": f"{SITE}torch/optim/adam.py", "line": 160, "name": "_init_group"}
    again = {"filename": f"{SITE}torch/utils/checkpoint.py", "line": 490, "name": "checkpoint"}

    assert keeper([adam, at(file, 23, "train")]) == "optimizer"
    assert keeper([at("/w/remote/drafter/optim.py", 174, "_slot")]) == "optimizer"
    assert keeper([LINEAR, again, at(file, 14, "forward"), at(file, 21, "train")]) == "checkpointed"


BUFFERS = """\
def fill(device, sizes):
    held = []
    for size in sizes:
        held.append(torch.empty(size, dtype=torch.uint8, device=device))
    return held, [torch.zeros(2 * size) for size in sizes]

def attend(queries, keys):
    kept = []
    for query in queries:
        kept.append(torch.ones(4) * query)
        kept.append(
            torch.zeros_like(query @ keys))
        kept.append(softmax(torch.zeros(3)))
        wide = make(query)
    return kept

def make(query):
    return torch.empty(query.shape)
"""


def test_a_loop_that_only_makes_buffers_keeps_nothing_for_a_backward(tmp_path: Path) -> None:
    file = str(tmp_path / "fill.py")
    Path(file).write_text(BUFFERS)

    assert [keeper([at(file, line)]) for line in (4, 5)] == ["buffers", "buffers"]
    assert [keeper([at(file, line)]) for line in (10, 11, 12, 13)] == 4 * ["chunks"]
    assert keeper([at(file, 18), at(file, 14)]) == "chunks"  # made in a function, for a chunk that a graph may keep


@pytest.mark.parametrize("source", [None, "def broken(:\n", "\0\n", "x = " + "(" * 500])
def test_a_source_that_cannot_be_read_has_no_loops(tmp_path: Path, source: str | None) -> None:
    path = tmp_path / "gone.py"
    if source is not None:
        path.write_text(source)

    assert keeper([at(str(path), 1)]) is None


def block(size: int, *frames: dict[str, Any], state: str = "active_allocated") -> dict[str, Any]:
    return {"address": 0, "size": size, "state": state, "frames": list(frames)}


def made(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"segments": [{"total_size": sum(each["size"] for each in blocks), "blocks": list(blocks)}]}


def test_only_blocks_of_one_size_and_stack_are_kept_by_a_loop(file: str) -> None:
    wide = [at(file, 2, "attend"), at(file, 8, "chunked")]
    product = [at(file, 3, "attend"), at(file, 8, "chunked")]
    freed = [block(4 * MIB, *wide, state="inactive") for _ in range(9)]

    kept = summarise(
        made(
            *(block(4 * MIB, *wide) for _ in range(REPEATED)),
            *(block(MIB, *product) for _ in range(REPEATED - 1)),
            block(8 * MIB, *wide),
            *freed,
            block(2 * MIB),
        )
    )["kept"]

    assert kept == {
        "chunks": {
            "bytes": REPEATED * 4 * MIB,
            "num_blocks": REPEATED,
            "repeats": REPEATED,
            "frame": f"{file}:2 attend",
        },
        "backward": {"bytes": 2 * MIB, "num_blocks": 1, "repeats": 1, "frame": kept["backward"]["frame"]},
    }
