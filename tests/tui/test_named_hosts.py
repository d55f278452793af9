"""Hosts that settings name stand on their screen before anybody has looked at them, with the command that looks."""

from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.actions.places import Places, find_places
from orchestrator.store.rows import HostRow
from tests.tui.golden import opened, press, shown
from tests.tui.world import NOW_S, Yard
from tui.app import Draftyard
from tui.hosts_lines import hosts_lines, places_in_order
from tui.pieces import text_of, width_of
from tui.plain import screen_text
from tui.snapshot import Ask, Snapshot

Open = Callable[..., Draftyard]
SEEN = HostRow("pve-a", "", {"gpus": []}, NOW_S, None, None, 0.0)


@pytest.mark.parametrize("width", [58, 100])
def test_a_host_that_was_never_seen_stands_last_with_the_command_that_looks(width: int) -> None:
    snapshot = Snapshot(Ask(), NOW_S, hosts=(SEEN,))

    lines = hosts_lines(
        snapshot,
        width,
        named=["pve-c", "pve-a", "$(id)", "a-host-with-a-name-of-forty-cells-or-more"],
        ascii_only=False,
    )
    text = text_of(lines)
    last = text[text.index("Never seen") :].splitlines()

    assert last[0].startswith("Never seen ")
    assert last[1].split(maxsplit=1) == ["pve-c", "draftyard doctor pve-c"]
    assert last[2].endswith("draftyard doctor '$(id)'")
    assert max(width_of(line) for line in lines) <= width
    assert " ".join(last[3:]).split()[-1] == "a-host-with-a-name-of-forty-cells-or-more"
    assert places_in_order(snapshot) == [("pve-a", "")]  # there is nothing there that a key could act on


def test_all_that_were_seen_leave_no_heading_and_none_at_all_says_how_to_look() -> None:
    assert "Never seen" not in text_of(
        hosts_lines(Snapshot(Ask(), NOW_S, hosts=(SEEN,)), 100, named=["pve-a"], ascii_only=False)
    )
    assert "draftyard doctor HOST" in text_of(hosts_lines(Snapshot(Ask(), NOW_S), 100, ascii_only=False))


@pytest.fixture
def places(tmp_path: Path) -> Places:
    yard = Yard(tmp_path / "runs.db")
    with yard.store:
        yard.run("v3wq7kdx", "mine/fast", host="pve-a")
        yard.store.host_seen("pve-a", address="ssh pve-a", facts={"gpus": []}, clock_offset_s=0.0)
    name_hosts(tmp_path, "pve-a", "pve-c")
    return find_places(tmp_path, {"HOME": str(tmp_path)}, db=yard.path)


def name_hosts(home: Path, *names: str) -> None:
    settings = home / ".config" / "draftyard"
    settings.mkdir(parents=True, exist_ok=True)
    (settings / "hosts.yaml").write_text("hosts:\n" + "".join(f"  {name}: {{address: {name}}}\n" for name in names))


@pytest.mark.slow  # a whole app
async def test_names_are_read_as_the_screen_opens_and_anew_when_asked(
    places: Places, tmp_path: Path, open_app: Open
) -> None:
    app = open_app(places.db, places=places)
    async with opened(app, "2") as pilot:
        first = await shown(app, pilot, "Never seen", "draftyard doctor pve-c", "draftyard doctor local")
        name_hosts(tmp_path, "pve-a", "pve-d")
        await press(app, pilot, "r")
        await shown(app, pilot, "draftyard doctor pve-d")
        anew = screen_text(app)

    assert "draftyard doctor pve-a" not in first
    assert "pve-c" not in anew
