"""Keys are renewed in the midst of traffic, and nothing stands still for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from paramiko.packet import Packetizer

from orchestrator.host import Hosts
from orchestrator.shell.connect import connect
from tests import sshd


@pytest.mark.slow  # some hundred commands
def test_an_end_that_is_on_its_way_while_keys_are_renewed_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a command was answered by the very thread that had to read the new keys: it waited for itself, 30 s long,
    then the connection was lost."""
    monkeypatch.setattr(Packetizer, "REKEY_BYTES", 200_000)  # where paramiko renews after 512 MiB
    with sshd.running(tmp_path / "sshd") as server:
        shell = connect(Hosts.load(None, server.config_file).find(server.alias))
        try:
            for number in range(150):
                size = 60_000 + 997 * number  # so that the renewal falls on every part of a command
                done = shell.run(["head", "-c", str(size), "/dev/zero"], timeout_s=25)
                assert len(done.stdout) == size
        finally:
            shell.close()
