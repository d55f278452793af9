"""A throw-away OpenSSH server on loopback: own host key, own port, own authorised key.

`start(folder)` gives a running server in about 0.1 s, as root or as an ordinary user; any number
may run side by side. Nothing under /etc is touched and the developer's ~/.ssh is never read: tests
pass `server.config_file`, an ssh_config that knows the server under the alias it was started with.

    with sshd.running(tmp_path, alias="gpu") as server:
        shell = connect(Hosts.load(None, server.config_file).find("gpu"))
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PORTS_TRIED = 10

SETTINGS = """\
Port {port}
ListenAddress {address}
HostKey {folder}/host_{kind}
PidFile {folder}/sshd.pid
AuthorizedKeysFile {folder}/authorized_keys
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
UseDNS no
PrintMotd no
PrintLastLog no
MaxStartups 100:30:200
LogLevel VERBOSE
SetEnv HOME={folder}/home PATH={path}
"""


@dataclass
class Server:
    alias: str
    folder: Path
    address: str
    port: int
    user: str
    process: subprocess.Popen[bytes]
    kind: str = "ed25519"

    @property
    def key(self) -> Path:
        return self.folder / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    @property
    def home(self) -> Path:
        """The home folder of whoever logs in; a .bashrc put here is read."""
        return self.folder / "home"

    @property
    def config_file(self) -> Path:
        return self.folder / "ssh_config"

    @property
    def log(self) -> str:
        return (self.folder / "sshd.log").read_text(errors="replace")

    @property
    def host_key(self) -> str:
        """`ssh-ed25519 AAAA…`, as a known-hosts line has it."""
        return " ".join((self.folder / f"host_{self.kind}.pub").read_text().split()[:2])

    def trust(self) -> None:
        """Writes the server's own key into its known-hosts file (`start` did that already)."""
        self.known_hosts.write_text(f"[{self.address}]:{self.port} {self.host_key}\n")

    def config(self, *more: str) -> str:
        """This server's block of an ssh_config."""
        lines = [
            f"Host {self.alias}",
            f"HostName {self.address}",
            f"Port {self.port}",
            f"User {self.user}",
            f"IdentityFile {self.key}",
            "IdentitiesOnly yes",
            f"UserKnownHostsFile {self.known_hosts}",
            "GlobalKnownHostsFile none",
            *more,
        ]
        return "\n  ".join(lines) + "\n"

    def hosts_yaml(self, **more: str) -> str:
        """A hosts.yaml with this server as an entry of its alias; values are YAML."""
        pairs = {
            "address": self.address,
            "port": str(self.port),
            "user": self.user,
            "identity": str(self.key),
            "host_keys": str(self.known_hosts),
            **more,
        }
        return f"hosts:\n  {self.alias}:\n" + "".join(f"    {key}: {value}\n" for key, value in pairs.items())

    def session_pids(self) -> list[int]:
        """The processes under the listening one: a process per connection and what runs in it."""
        listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        children: dict[int, list[int]] = {}
        for line in listed.splitlines():
            pid, parent = map(int, line.split())
            children.setdefault(parent, []).append(pid)
        found, waiting = [], [self.process.pid]
        while waiting:
            below = children.get(waiting.pop(), [])
            found += below
            waiting += below
        return found

    def connection_pids(self) -> list[int]:
        """Only sshd's own processes: killing them cuts the connections and leaves what was started."""
        return [pid for pid in self.session_pids() if _program(pid) == "sshd"]

    def cut(self) -> None:
        """Every connection is lost at once, as if the network went away; the server goes on listening."""
        for pid in self.connection_pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def freeze(self, stopped: bool = True) -> None:
        """TCP goes on acknowledging, nobody answers."""
        for pid in [self.process.pid, *self.connection_pids()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP if stopped else signal.SIGCONT)

    def stop(self) -> None:
        self.freeze(stopped=False)
        for pid in self.session_pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.terminate()
        self.process.wait(5)


def start(
    folder: Path,
    *,
    alias: str = "box",
    address: str = "127.0.0.1",
    settings: tuple[str, ...] = (),
    netns: str | None = None,
    path: str = "/usr/local/bin:/usr/bin:/bin",
) -> Server:
    """A server with sshd's defaults; `settings` are further lines, which win. RuntimeError holds its log."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o711)
    (folder / "home").mkdir(exist_ok=True)  # empty: no .bashrc of this machine costs time or prints
    make_key(folder / "host_ed25519")
    make_key(folder / "id_ed25519")
    shutil.copy(folder / "id_ed25519.pub", folder / "authorized_keys")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # root's sshd wants its privilege separation folder
    if not any(line.startswith("Subsystem") for line in settings):
        settings = (*settings, "Subsystem sftp internal-sftp")
    # sshd takes no port 0, and between our look and its bind another program may take the one we found.
    for _ in range(PORTS_TRIED):
        port = free_port(address) if netns is None else 2222
        text = SETTINGS.format(port=port, address=address, folder=folder, kind="ed25519", path=path)
        (folder / "sshd_config").write_text("\n".join(settings) + "\n" + text)
        server = Server(alias, folder, address, port, getpass.getuser(), _spawn(folder, netns))
        if _is_up(server, netns):
            break
        server.process.kill()
        server.process.wait()
        if "Address already in use" not in server.log:
            raise RuntimeError(f"sshd did not start: {server.log}")
    else:
        raise RuntimeError(f"sshd found no free port in {PORTS_TRIED} attempts: {server.log}")
    server.trust()
    server.config_file.write_text(server.config())
    return server


def _spawn(folder: Path, netns: str | None) -> subprocess.Popen[bytes]:
    (folder / "sshd.log").write_bytes(b"")  # sshd appends, and what it says of this port is what counts
    sshd = shutil.which("sshd") or "/usr/sbin/sshd"
    command = [sshd, "-D", "-f", str(folder / "sshd_config"), "-E", str(folder / "sshd.log")]
    return subprocess.Popen(
        [*(["ip", "netns", "exec", netns] if netns else []), *command],
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")},
        # Not one stream of ours: a crashed test would leave sshd holding the pipe that CI waits for.
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@contextlib.contextmanager
def running(folder: Path, **options: object) -> Iterator[Server]:
    server = start(folder, **options)  # type: ignore[arg-type]
    try:
        yield server
    finally:
        server.stop()


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:  # it has ended meanwhile
        return ""


def free_port(address: str = "127.0.0.1") -> int:
    family, *_, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]  # an IPv6 zone becomes a number
    with socket.socket(family) as probe:
        probe.bind(place)
        port: int = probe.getsockname()[1]
        return port


def make_key(file: Path, kind: str = "ed25519", passphrase: str = "") -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-C", file.name, "-f", str(file)], check=True)


def _is_up(server: Server, netns: str | None) -> bool:
    """Whether it came up, within a minute. Its own log says that the port is its own (a banner alone may be another's server);
    listening is not enough either: the first bytes must come."""
    ends = time.monotonic() + 60
    while time.monotonic() < ends and server.process.poll() is None:
        if f" port {server.port}." in server.log:
            if netns is not None:
                return True
            with (
                contextlib.suppress(OSError),
                socket.create_connection((server.address, server.port), timeout=2) as probe,
            ):
                if probe.recv(4) == b"SSH-":
                    return True
        time.sleep(0.01)
    return False
