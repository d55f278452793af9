"""The first lines of the command: they load the rest, which takes a moment, and a Ctrl-C meanwhile is no traceback.

From then on `cli` answers it. What a verb does is no business of this file.
"""

from __future__ import annotations

import signal

from orchestrator.lazy import loaded


def main() -> None:
    """Exits with the command's code, or dies of a SIGINT that comes before anything could be said, as of a SIGTERM."""
    is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not so under nohup, or behind an &
    if is_heard:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    cli = loaded("orchestrator.cli")
    if is_heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.main()
