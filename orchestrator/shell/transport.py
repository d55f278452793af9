"""paramiko's transport without one way to stand still for ever.

Keys are renewed after every 512 MiB. paramiko's own thread reads the other side's answer to that, and the same thread
answers the end of a channel. An end that was on its way when the keys began to be renewed made it wait for the new keys,
which it alone could have read: after 30 s the connection was given up, in the midst of a long `pull`.
"""

from __future__ import annotations

import contextlib
import threading

import paramiko


class Transport(paramiko.Transport):
    """While keys are renewed, what its own thread has to say is said by another."""

    def _send_user_message(self, data: paramiko.Message) -> None:
        if threading.current_thread() is self and not self.clear_to_send.is_set():
            threading.Thread(target=self._send_later, args=(data,), name="draftyard-rekey", daemon=True).start()
        else:
            super()._send_user_message(data)  # type: ignore[misc]  # paramiko's stubs leave it out

    def _send_later(self, data: paramiko.Message) -> None:
        with contextlib.suppress(
            paramiko.SSHException, EOFError, OSError
        ):  # the connection is gone: that shows elsewhere
            super()._send_user_message(data)  # type: ignore[misc]
