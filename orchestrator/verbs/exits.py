"""The exit codes and the version of every JSON document: words that help, errors and verbs share."""

from __future__ import annotations

from collections.abc import Mapping

SCHEMA_VERSION = 1
EMPTY = "is empty; was a shell variable unset?"  # of a word on the command line

EXIT_CODES: Mapping[str, str] = {
    "0": "done; for `logs -f` and `wait`: the run succeeded",
    "1": "failed for a reason said on stderr",
    "2": "usage, recipe or configuration error",
    "3": "gate refused: evidence missing, failed, or of another fingerprint",
    "4": "host cannot be reached or trusted",
    "5": "run not found, or the prefix is ambiguous",
    "6": "not finished within --timeout (not a failure)",
    "10": "the run waited for failed",
    "11": "the run waited for ran out of GPU memory",
    "12": "the run waited for ran out of host memory",
    "13": "the run waited for was stopped",
    "128+n": "ended by signal n; a closed pipe is silent",
}


class ClosedPipe(Exception):
    """Whoever read our output has gone. No error: the program ends in silence."""
