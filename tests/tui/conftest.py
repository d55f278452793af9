"""A filled yard, built once; apps over it with a clock that stands still."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.actions.places import Places, find_places
from orchestrator.follow.lease import lease
from tests.tui import yard
from tests.tui.world import NOW_S
from tui.app import Draftyard


@pytest.fixture(scope="session", autouse=True)
def _in_utc() -> None:
    os.environ["TZ"] = "UTC"
    time.tzset()


@pytest.fixture(scope="session")
def filled_yard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("yard") / "runs.db"
    yard.fill(path)
    return path


@pytest.fixture
def yard_places(filled_yard: Path) -> Iterator[Places]:
    """Where the filled yard lies, with somebody who follows it."""
    home = str(filled_yard.parent)
    with lease(filled_yard):
        yield find_places(filled_yard.parent, {"HOME": home, "XDG_DATA_HOME": f"{home}/data"}, db=filled_yard)


@pytest.fixture
def yard_copy(filled_yard: Path, tmp_path: Path) -> Path:
    """A yard of one's own, to write into."""
    shutil.copytree(filled_yard.parent, tmp_path / "yard")
    return tmp_path / "yard" / "runs.db"


@pytest.fixture
def open_app(filled_yard: Path) -> Callable[..., Draftyard]:
    def opened(path: Path = filled_yard, **settings: object) -> Draftyard:
        return Draftyard(path, clock=lambda: NOW_S, **settings)  # type: ignore[arg-type]

    return opened
