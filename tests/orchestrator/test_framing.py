"""The marks around a command's output, from hosts that print what they like."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.errors import HostError
from orchestrator.host import Hop
from orchestrator.shell.framing import MAX_NOISE_BYTES, Unframe
from orchestrator.shell.hops import HopShell
from orchestrator.shell.local import LocalShell


def _unframed(printed: bytes) -> Unframe:
    stream = Unframe("n", lambda _: None)
    for at in range(0, len(printed), 32 * 1024):
        stream.feed(printed[at : at + 32 * 1024])
    return stream


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("0", 0),
        ("255", 255),
        ("256", None),
        ("-7", None),
        ("", None),
        ("abc", None),
        ("9" * 60, None),
        ("\u0663", None),
    ],
)
def test_an_end_mark_has_a_code_that_a_process_can_have(said: str, code: int | None) -> None:
    stream = _unframed(f"<n start 1 pipe>\n<n end {said}>\n".encode())

    assert stream.end_words is not None
    assert stream.exit_code == code


def test_noise_without_end_is_told_from_a_long_banner() -> None:
    assert not _unframed(b"x" * MAX_NOISE_BYTES).is_drowned
    assert _unframed(b"x" * (MAX_NOISE_BYTES + 1)).is_drowned
    assert not _unframed(b"<n start 1 pipe>\n" + b"x" * (MAX_NOISE_BYTES + 1)).is_drowned


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("yes garbage", "prints more than 1 MiB before a command starts.*it begins: garbage"),
        (
            "shift 3; exec \"$@\" | sed 's/ end 0>/ end abc>/'",
            "a command there ended with 'abc'; a code of 0 to 255 is due",
        ),
    ],
)
def test_a_hop_that_says_no_sense_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    (tmp_path / "docker").write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    with pytest.raises(HostError, match=said):
        HopShell(LocalShell(), Hop("docker", "box")).run(["true"], timeout_s=20)
