"""What the job of a run was given in secret, as far as this side can tell; looked up when needed and kept nowhere.

The values of its host's env file as that is now, and of the variables of `--env` that are set here too. A value that
was changed since, or written out with `--env KEY=VALUE`, is not known here: the host hides it in what the job
reports, and in what the job prints by places (`store.logs`) once that has ended; till then it is left to its shape.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.errors import DraftyardError
from orchestrator.host import hosts_of, read_env_file
from orchestrator.store.reads import Reader
from orchestrator.store.rows import Document

AGE_S = 10.0  # an edited env file counts within this time


@dataclass
class Known:
    """Looks up secrets by run. A value that was seen once stays known: it may have been changed since the launch."""

    hosts_file: Path | None
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)
    _found: dict[str, tuple[float, frozenset[str]]] = field(default_factory=dict, repr=False)  # run -> when, values

    def of(self, reader: Reader, run_id: str) -> frozenset[str]:
        """Raises StoreError; a run, a host or a file that is not there has none."""
        at_s, values = self._found.get(run_id, (-AGE_S, frozenset()))
        if time.monotonic() - at_s >= AGE_S:
            values |= self._now(reader, run_id)
            self._found[run_id] = time.monotonic(), values
        return values

    def _now(self, reader: Reader, run_id: str) -> frozenset[str]:
        launch, spec = (
            json.loads(reader.document(run_id, which) or "{}") for which in (Document.LAUNCH, Document.SPEC)
        )
        plain = spec.get("env") or {}
        given = {name: self.environ.get(name, "") for name in launch.get("env") or ()}
        found = list(given.items())
        kept = reader.hosts_file(run_id)
        for host in reader.run(run_id).hosts:
            with suppress(DraftyardError, OSError):
                env_file = hosts_of([host], kept=kept, here=self.hosts_file).find(host).env_file
                found += [] if env_file is None else read_env_file(env_file).items()
        return frozenset(value for name, value in found if value and plain.get(name) != value)
