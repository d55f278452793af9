"""A stand-in for a Proxmox container: real namespaces, a root of its own, and a `pct` that enters it.

The inside is another root folder (this machine's files, with an own /tmp, /var/tmp and /root),
another process, mount, host name and IPC namespace. `pct` behaves as Proxmox documents it: no shell
in between, the exit code passed on, the environment cleared to a short PATH without /usr/local and
without HOME or LANG, Perl's complaint about the locale on stderr, 255 and a message when the
container is not running. It is not Proxmox: what only real `pct` does is not proven by it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SETUP = """
set -e
root=$1; number=$2
mount --make-rprivate /
mount --rbind / "$root"
for place in tmp var/tmp root; do mount -t tmpfs tmpfs "$root/$place"; done
mount -t proc proc "$root/proc"
hostname "ct$number"
exec chroot "$root" sh -c 'echo ready > /tmp/.ready; exec sleep infinity'
"""

_PCT = r"""#!/bin/sh
dir={folder}
verb=$1; id=$2
state=$(cat "$dir/$id.state" 2>/dev/null) || { echo "Configuration file 'nodes/pve/lxc/$id.conf' does not exist" >&2; exit 2; }
case $verb in
  status) echo "status: $state"; exit 0;;
  start) echo running > "$dir/$id.state"; exit 0;;
esac
[ "$state" = running ] || { echo "container $id not running" >&2; exit 255; }
init=$(cat "$dir/$id.pid")
shift 2
printf 'perl: warning: Setting locale failed.\nperl: warning: Falling back to the standard locale ("C").\n' >&2
case $verb in
  exec)
    [ "$1" = -- ] && shift
    [ $# -gt 0 ] || { echo '400 not enough arguments' >&2; exit 255; }
    exec nsenter -t "$init" -m -u -i -p -r -w env -i PATH=/sbin:/bin:/usr/sbin:/usr/bin TERM=linux container=lxc "$@";;
  *) echo "unknown command $verb" >&2; exit 255;;
esac
"""


@dataclass
class Container:
    number: int
    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def bin(self) -> Path:
        """What has to be on the outer machine's PATH."""
        return self.folder / "bin"

    @property
    def init_pid(self) -> int:
        return int((self.folder / f"{self.number}.pid").read_text())

    def set_state(self, state: str) -> None:
        (self.folder / f"{self.number}.state").write_text(state)


def why_not() -> str | None:
    """The reason namespaces cannot be made here; None when they can."""
    if os.geteuid() != 0:
        return "namespaces of their own root need root"
    if not shutil.which("unshare") or not shutil.which("nsenter"):
        return "no unshare or nsenter (util-linux)"
    tried = subprocess.run(["unshare", "-muip", "--fork", "true"], capture_output=True, check=False)
    return None if tried.returncode == 0 else f"unshare: {tried.stderr.decode(errors='replace').strip()}"


@contextlib.contextmanager
def running(folder: Path, number: int = 200) -> Iterator[Container]:
    root = folder / "root"
    root.mkdir(parents=True)
    (folder / "bin").mkdir()
    pct = folder / "bin" / "pct"
    pct.write_text(_PCT.replace("{folder}", str(folder)))
    pct.chmod(0o755)
    process = subprocess.Popen(
        ["unshare", "-muip", "--fork", "--kill-child", "sh", "-c", _SETUP, "sh", str(root), str(number)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    container = Container(number, folder, process)
    try:
        (folder / f"{number}.pid").write_text(str(_wait_for_init(process)))
        container.set_state("running")
        yield container
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(5)


def _wait_for_init(process: subprocess.Popen[bytes]) -> int:
    ends = time.monotonic() + 10
    while time.monotonic() < ends and process.poll() is None:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        if children and Path(f"/proc/{children[0]}/root/tmp/.ready").exists():
            return int(children[0])
        time.sleep(0.01)
    raise RuntimeError("the container did not come up")
