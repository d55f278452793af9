"""What goes wrong between two machines, made to happen: keys, jumps, cuts, frozen and silent servers."""

from __future__ import annotations

import contextlib
import io
import ipaddress
import os
import re
import shutil
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import HostError
from orchestrator.host import Host, Hosts
from orchestrator.shell.connect import connect, endpoints
from orchestrator.shell.keys import AGENT_S, Agent
from orchestrator.shell.routes import Question, parse_answer, route
from orchestrator.shell.stream import Source, StreamShell, TimedOut, told
from orchestrator.shell.trust import parse_search
from tests import delay, sshd
from tests.remote.jobs import wait_for
from tests.sshd import Server

pytestmark = pytest.mark.slow  # many servers, started and cut


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with sshd.running(tmp_path / "sshd") as running:
        yield running


def host_of(server: Server, *config: str) -> Host:
    if config:
        server.config_file.write_text(server.config(*config))
    return Hosts.load(None, server.config_file).find(server.alias)


@contextlib.contextmanager
def reached(host: Host) -> Iterator[StreamShell]:
    shell = connect(host)
    try:
        yield shell
    finally:
        shell.close()


# Host keys -------------------------------------------------------------------------------------------


def test_a_known_key_lets_the_connection_through(server: Server) -> None:
    with reached(host_of(server)) as shell:
        assert shell.run(["echo", "in"]).stdout == b"in\n"


def test_an_unknown_key_is_refused_with_its_fingerprint_and_the_line_to_add(server: Server) -> None:
    server.known_hosts.write_text("")
    shown = subprocess.run(
        ["ssh-keygen", "-lf", server.folder / "host_ed25519.pub"], capture_output=True, text=True, check=True
    ).stdout.split()[1]

    with pytest.raises(HostError) as refused:
        connect(host_of(server))

    assert refused.value.reason == "host_key_unknown"
    assert shown in str(refused.value)
    repair = next(line for line in str(refused.value).splitlines() if "repair:" in line).partition("repair: ")[2]
    subprocess.run(["sh", "-c", repair], check=True)
    with reached(host_of(server)) as shell:
        assert shell.run(["true"]).exit_code == 0


def test_a_changed_key_names_both_fingerprints_file_line_and_the_repairing_command(
    server: Server, tmp_path: Path
) -> None:
    sshd.make_key(tmp_path / "old")
    old = " ".join((tmp_path / "old.pub").read_text().split()[:2])
    name = f"[{server.address}]:{server.port}"
    server.known_hosts.write_text(f"# first line\nother ssh-ed25519 {old.split()[1]}\n{name} {old}\n")
    prints = [
        subprocess.run(["ssh-keygen", "-lf", file], capture_output=True, text=True, check=True).stdout.split()[1]
        for file in (tmp_path / "old.pub", server.folder / "host_ed25519.pub")
    ]

    with pytest.raises(HostError) as refused:
        connect(host_of(server, "StrictHostKeyChecking accept-new"))

    message = str(refused.value)
    assert refused.value.reason == "host_key_changed"
    assert all(fingerprint in message for fingerprint in prints)
    assert f"{server.known_hosts}:3" in message
    assert f"repair: ssh-keygen -R '{name}' -f {server.known_hosts}" in message
    assert "accept" not in server.log.lower()  # no authentication was tried


def test_accept_new_keeps_a_first_key_and_refuses_the_next_one(server: Server) -> None:
    server.known_hosts.write_text("earlier.example ssh-ed25519 AAAA")  # without a newline at its end
    accepting = host_of(server, "StrictHostKeyChecking accept-new")
    with reached(accepting) as shell:
        shell.run(["true"])

    lines = server.known_hosts.read_text().splitlines()
    assert lines == ["earlier.example ssh-ed25519 AAAA", f"[{server.address}]:{server.port} {server.host_key}"]
    with reached(host_of(server)) as shell:
        assert shell.run(["true"]).exit_code == 0


def test_a_known_hosts_file_of_the_hosts_own_is_the_only_one_asked(server: Server, tmp_path: Path) -> None:
    hosts_file = tmp_path / "hosts.yaml"
    hosts_file.write_text(server.hosts_yaml(host_keys=str(tmp_path / "own")))
    (tmp_path / "own").write_text("")

    with pytest.raises(HostError, match="not known"):
        connect(Hosts.load(hosts_file, server.config_file).find(server.alias))

    hosts_file.write_text(server.hosts_yaml(host_keys=f"accept-new {tmp_path / 'own'}"))
    with reached(Hosts.load(hosts_file, server.config_file).find(server.alias)) as shell:
        shell.run(["true"])
    assert server.host_key in (tmp_path / "own").read_text()


def test_known_hosts_files_with_blanks_in_their_names_are_read_written_and_repaired(server: Server) -> None:
    file, other = server.folder / "of Jane Doe" / "known hosts", server.folder / "other known"
    file.parent.mkdir()
    shutil.copy(server.known_hosts, other)
    usual = f"UserKnownHostsFile {server.known_hosts}"
    text = server.config().replace(usual, f'UserKnownHostsFile "{file}" "{other}"')

    def enter(*more: str) -> None:
        server.config_file.write_text("\n  ".join([text, *more]))
        with reached(Hosts.load(None, server.config_file).find(server.alias)) as shell:
            assert shell.run(["true"]).exit_code == 0

    def repair() -> None:
        with pytest.raises(HostError) as told:
            enter()
        subprocess.run(re.findall(r"repair: (.*)", str(told.value))[0], shell=True, check=True)

    enter()  # it lies in the second file
    other.write_text("")
    enter("StrictHostKeyChecking accept-new")
    assert server.host_key in file.read_text()

    file.write_text(f"[{server.address}]:{server.port} {server.key.with_suffix('.pub').read_text()}")
    repair()  # takes the changed key out
    repair()  # adds the one that is unknown now
    enter()


def test_hashed_names_wildcards_and_damaged_lines_are_read_as_openssh_reads_them(server: Server) -> None:
    name = f"[{server.address}]:{server.port}"
    for text in (
        f"[127.0.0.*]:{server.port} {server.host_key}\n",
        f"nonsense\nx ssh-newkind AAAA====\n{name} ssh-ed25519 not-base64!\n{name} {server.host_key}\n",
    ):
        server.known_hosts.write_text(text)
        with reached(host_of(server)) as shell:
            assert shell.run(["true"]).exit_code == 0

    server.trust()
    subprocess.run(["ssh-keygen", "-H", "-f", server.known_hosts], check=True, capture_output=True)
    assert server.address not in server.known_hosts.read_text()
    with reached(host_of(server)) as shell:
        assert shell.run(["true"]).exit_code == 0


def test_a_revoked_key_is_refused_even_when_new_ones_are_accepted(server: Server) -> None:
    server.known_hosts.write_text(f"@revoked * {server.host_key}\n")

    with pytest.raises(HostError, match="revoked"):
        connect(host_of(server, "StrictHostKeyChecking accept-new"))


def test_the_key_type_we_know_is_asked_for_first(tmp_path: Path) -> None:
    """A server with two keys, one of them known: the other one must not look like an unknown host."""
    sshd.make_key(tmp_path / "rsa", "rsa")
    with sshd.running(tmp_path / "sshd", settings=(f"HostKey {tmp_path / 'rsa'}",)) as server:
        public = " ".join((tmp_path / "rsa.pub").read_text().split()[:2])
        server.known_hosts.write_text(f"[{server.address}]:{server.port} {public}\n")

        with reached(host_of(server)) as shell:
            assert shell.run(["true"]).exit_code == 0


def test_two_servers_on_one_address_are_told_apart_by_port(tmp_path: Path) -> None:
    with sshd.running(tmp_path / "a", alias="a") as a, sshd.running(tmp_path / "b", alias="b") as b:
        both = tmp_path / "both"
        both.write_text(a.known_hosts.read_text() + b.known_hosts.read_text())
        for server in (a, b):
            shutil.copy(both, server.known_hosts)
            with reached(host_of(server)) as shell:
                assert shell.run(["true"]).exit_code == 0


def test_a_host_key_alias_is_the_name_that_is_looked_up(server: Server) -> None:
    server.known_hosts.write_text(f"the-box {server.host_key}\n")

    with reached(host_of(server, "HostKeyAlias the-box")) as shell:
        assert shell.run(["true"]).exit_code == 0


def test_a_search_result_keeps_line_and_marker_and_skips_what_is_no_key() -> None:
    text = "# Host box found: line 3 \nbox ssh-ed25519 AAAA\n# Host * found: line 9 REVOKED\n@revoked * ssh-rsa BBBB\nbox x y!\n"

    found = parse_search(text, Path("/kh"))

    assert [(key.line, key.kind, key.marker) for key in found] == [(3, "ssh-ed25519", ""), (9, "ssh-rsa", "@revoked")]


# Our own keys ----------------------------------------------------------------------------------------


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A real ssh-agent of its own."""
    sock = tmp_path / "agent.sock"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(sock)], stdout=subprocess.DEVNULL)
    while not sock.exists():
        time.sleep(0.01)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(sock))
    yield
    process.terminate()
    process.wait()


def _add(key: Path) -> None:
    subprocess.run(["ssh-add", "-q", str(key)], check=True, capture_output=True)


@pytest.mark.usefixtures("agent")
def test_an_agent_full_of_keys_does_not_use_up_the_servers_patience(server: Server, tmp_path: Path) -> None:
    """The server hangs up after six offers; the key that is configured goes first."""
    for number in range(9):
        sshd.make_key(tmp_path / f"extra{number}")
        _add(tmp_path / f"extra{number}")
    config = server.config().replace("IdentitiesOnly yes", "IdentitiesOnly no")
    server.config_file.write_text(config)

    with reached(Hosts.load(None, server.config_file).find("box")) as shell:
        assert shell.run(["true"]).exit_code == 0


@pytest.mark.parametrize(("said", "told"), [("{sock}", "no key in the agent {sock}"), ("none", "no agent")])
@pytest.mark.usefixtures("agent")
def test_where_no_key_was_found_the_agent_that_was_asked_is_named(server: Server, said: str, told: str) -> None:
    sock = os.environ["SSH_AUTH_SOCK"]
    server.key.unlink()

    with pytest.raises(HostError, match=f"none was found: {told.format(sock=sock)}.*, and not one of {server.key}"):
        connect(host_of(server, f"IdentityAgent {said.format(sock=sock)}"))


@pytest.mark.parametrize("said", ["{sock}", "$ANOTHER_SOCK", "SSH_AUTH_SOCK", "none"])
@pytest.mark.usefixtures("agent")
def test_the_agent_is_the_one_that_the_config_names(server: Server, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    _add(server.key)
    subprocess.run(["ssh-keygen", "-q", "-p", "-N", "secret", "-f", server.key], check=True)
    sock = os.environ["SSH_AUTH_SOCK"]
    monkeypatch.setenv("ANOTHER_SOCK", sock)
    if said != "SSH_AUTH_SOCK":
        monkeypatch.delenv("SSH_AUTH_SOCK")
    host = host_of(server, f"IdentityAgent {said.format(sock=sock)}")

    if said == "none":
        with pytest.raises(HostError, match="has a passphrase"):
            connect(host)
    else:
        with reached(host) as shell:
            assert shell.run(["true"]).exit_code == 0


def test_an_agent_that_does_not_answer_holds_nobody_up_and_is_named_where_no_key_lets_in(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was forwarded over a connection that is dead by now takes what is said and is silent."""
    monkeypatch.setattr("orchestrator.shell.keys.AGENT_S", 0.3)
    place = str(tmp_path / "silent.sock")
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(place)
        silent.listen()
        host = host_of(server, f"IdentityAgent {place}")
        with reached(host) as shell:  # by its key file
            assert shell.run(["true"]).exit_code == 0

        (server.folder / "authorized_keys").write_text("")
        with pytest.raises(HostError, match=r"the agent \S+silent\.sock gave no answer within 0\.3 s"):
            connect(host)

    with pytest.raises(HostError, match=r"the agent \S+silent\.sock cannot be reached: Connection refused"):
        connect(host)


class Impatient(Agent):
    """It has all the time for its list of keys, and little for a signature."""

    def __init__(self, place: Path) -> None:
        super().__init__(place)
        assert self._conn.gettimeout() == AGENT_S  # type: ignore[attr-defined]
        self._conn.settimeout(0.3)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("agent")
def test_an_agent_that_lists_keys_and_never_signs_is_named(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody is asked to touch a key and does not."""
    monkeypatch.setattr("orchestrator.shell.keys.Agent", Impatient)
    _add(server.key)
    server.key.unlink()
    place, asked = str(tmp_path / "listing.sock"), list[bytes]()
    with socket.socket(socket.AF_UNIX) as listing, socket.socket(socket.AF_UNIX) as real:
        listing.bind(place)
        listing.listen()
        listing.settimeout(60)
        real.connect(os.environ["SSH_AUTH_SOCK"])

        def answer_once() -> None:
            with contextlib.suppress(OSError), listing.accept()[0] as asking:
                real.sendall(asking.recv(100))
                asking.sendall(real.recv(10_000))
                while question := asking.recv(10_000):
                    asked.append(question)

        thread = threading.Thread(target=answer_once, daemon=True)
        thread.start()
        with pytest.raises(HostError, match=rf"the agent \S+listing\.sock gave no answer within {AGENT_S:g} s"):
            connect(host_of(server, f"IdentityAgent {place}"))
        thread.join()

    assert asked, "it has listed its keys and was asked for a signature"


@pytest.mark.usefixtures("agent")
def test_a_key_with_a_passphrase_works_through_the_agent(server: Server, tmp_path: Path) -> None:
    _add(server.key)
    subprocess.run(["ssh-keygen", "-q", "-p", "-N", "secret", "-f", server.key], check=True)

    with reached(host_of(server)) as shell:
        assert shell.run(["true"]).exit_code == 0


def test_a_key_with_a_passphrase_and_no_agent_is_said(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    subprocess.run(["ssh-keygen", "-q", "-p", "-N", "secret", "-f", server.key], check=True)

    with pytest.raises(HostError, match="has a passphrase; add it to the agent") as refused:
        connect(host_of(server))

    assert refused.value.reason == "auth"


def test_a_refused_key_is_named_with_the_command_to_try(server: Server) -> None:
    (server.folder / "authorized_keys").write_text("")

    with pytest.raises(HostError) as refused:
        connect(host_of(server))

    assert refused.value.reason == "auth"
    assert f"refused: {server.key}" in str(refused.value)
    spelled = f"-p {server.port} -i {server.key} root@127.0.0.1 true"
    assert f"ssh -o BatchMode=yes {spelled}" in str(refused.value)


def test_a_key_file_cut_off_when_pasted_is_named(server: Server) -> None:
    server.key.write_text(server.key.read_text().replace("-----END OPENSSH PRIVATE KEY-----\n", "")[:-20])

    with pytest.raises(HostError, match="cannot be read: no trailing newline"):
        connect(host_of(server))


def test_a_missing_identity_file_is_no_reason_not_to_try_the_next(server: Server) -> None:
    config = server.config().replace(
        f"IdentityFile {server.key}", f"IdentityFile /nowhere/key\n  IdentityFile {server.key}"
    )
    server.config_file.write_text(config)

    with reached(Hosts.load(None, server.config_file).find("box")) as shell:
        assert shell.run(["true"]).exit_code == 0


# The way there ---------------------------------------------------------------------------------------


def test_jump_hosts_are_passed_in_order_each_with_its_own_port_user_and_key(tmp_path: Path) -> None:
    """Each machine may only go on to the next one, so that another order could not arrive."""
    with contextlib.ExitStack() as stack:
        target = stack.enter_context(sshd.running(tmp_path / "target", alias="target"))
        only = (f"PermitOpen 127.0.0.1:{target.port}",)
        second = stack.enter_context(sshd.running(tmp_path / "second", alias="second", settings=only))
        only = (f"PermitOpen 127.0.0.1:{second.port}",)
        first = stack.enter_context(sshd.running(tmp_path / "first", alias="first", settings=only))
        config = tmp_path / "config"
        config.write_text(first.config() + second.config() + target.config("ProxyJump first,second"))
        host = Hosts.load(None, config).find("target")

        with reached(host) as shell:
            connection = shell.run(["sh", "-c", "echo $SSH_CONNECTION"]).stdout.split()

        assert [end.port for end in endpoints(host)] == [first.port, second.port, target.port]
        assert int(connection[3]) == target.port
        assert all("Accepted publickey" in server.log for server in (first, second, target))


def test_a_jump_over_the_same_address_with_another_port_is_not_dropped(tmp_path: Path) -> None:
    with sshd.running(tmp_path / "a", alias="a") as a, sshd.running(tmp_path / "b", alias="b") as b:
        config = tmp_path / "config"
        config.write_text(a.config() + b.config(f"ProxyJump {a.user}@{a.address}:{a.port}"))
        with config.open("a") as more:
            more.write(
                f"Host {a.address}\n  IdentityFile {a.key}\n  IdentitiesOnly yes\n  UserKnownHostsFile {a.known_hosts}\n"
            )

        with reached(Hosts.load(None, config).find("b")) as shell:
            assert shell.run(["true"]).exit_code == 0

        assert "Accepted publickey" in a.log


def test_a_jump_host_that_forbids_forwarding_is_named_with_the_way_out(tmp_path: Path) -> None:
    with (
        sshd.running(tmp_path / "a", alias="a", settings=("AllowTcpForwarding no",)) as a,
        sshd.running(tmp_path / "b", alias="b") as b,
    ):
        config = tmp_path / "config"
        config.write_text(a.config() + b.config("ProxyJump a"))

        with pytest.raises(HostError, match=r"forbids forwarding .* `hop: ssh:127\.0\.0\.1`"):
            connect(Hosts.load(None, config).find("b"))


def test_jump_none_cuts_what_a_wildcard_says(server: Server) -> None:
    server.config_file.write_text(server.config("ProxyJump none") + "Host *\n  ProxyJump nowhere.invalid\n")

    with reached(Hosts.load(None, server.config_file).find("box")) as shell:
        assert shell.run(["true"]).exit_code == 0


def test_a_proxy_command_gets_its_tokens_and_carries_the_connection(server: Server, tmp_path: Path) -> None:
    proxy = tmp_path / "proxy.py"
    proxy.write_text(
        "import os, socket, sys, threading\n"
        f"open({str(tmp_path / 'seen')!r}, 'w').write(' '.join(sys.argv[1:]))\n"
        "s = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
        "def up():\n"
        "    while (b := os.read(0, 65536)): s.sendall(b)\n"
        "threading.Thread(target=up, daemon=True).start()\n"
        "while (b := s.recv(65536)): os.write(1, b)\n"
    )
    host = host_of(server, f"ProxyCommand python3 {proxy} %h %p %r %n %%")

    with reached(host) as shell:
        assert len(shell.run(["head", "-c", "3000000", "/dev/zero"]).stdout) == 3_000_000

    assert (tmp_path / "seen").read_text() == f"127.0.0.1 {server.port} {server.user} box %"


def test_a_proxy_command_that_ends_is_named_with_what_it_said(server: Server) -> None:
    host = host_of(server, "ProxyCommand sh -c 'echo no route >&2; exit 3'")

    with pytest.raises(HostError, match=r"(?s)ended with exit code 3 .* it said: no route"):
        connect(host)


def test_the_config_is_read_as_ssh_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Include, Match, tokens and first-value-wins, against what `ssh -G` prints for the same name."""
    (tmp_path / "more").write_text("Host gpu\n  HostName 10.1.2.3\n  Port 22013\n")
    config = tmp_path / "config"
    config.write_text(
        f"Include {tmp_path / 'more'}\n"
        "Match host gpu,10.1.2.3 exec true\n  User trainer\n"
        "Match exec false\n  User nobody\n"
        "Host gpu\n  Port 1\n  IdentityFile ~/.ssh/id_%h\n  IdentityFile ${HOME}/keys/%r\n  ConnectTimeout 7\n"
        "Host v6\n  HostName fe80::1%%eth0\n"
        "Host behind\n  ProxyCommand ssh bastion 'exec ${HOME}/bin/nc %h %p'\n  IdentityFile ${KEYS}/id\n"
    )
    monkeypatch.setenv("KEYS", "/keys/%h")

    (found,) = route(Question("gpu", config_file=config))
    (v6,) = route(Question("v6", config_file=config))
    (behind,) = route(Question("behind", config_file=config))

    assert (found.address, found.port, found.user) == ("10.1.2.3", 22013, "trainer")
    assert found.identity_files == (Path.home() / ".ssh/id_10.1.2.3", Path.home() / "keys/trainer")
    assert found.connect_timeout_s == 7
    assert (v6.address, v6.place) == ("fe80::1%eth0", "[fe80::1%eth0]:22")
    assert behind.proxy_command == "ssh bastion 'exec ${HOME}/bin/nc behind 22'"  # whose HOME is a shell's affair
    assert behind.identity_files == (Path("/keys/%h/id"),)


@pytest.mark.parametrize("name", ["/of Jane Doe/id", "/it's", '/a "b"', "/back\\slash", "/a#b", "/50%"])
def test_a_key_file_of_hosts_yaml_may_have_any_name(name: str) -> None:
    (found,) = route(Question("box", identity=(name, "~/x y"), config_file=Path(os.devnull)))

    assert found.identity_files == (Path(name), Path.home() / "x y")
    assert found.identities_only


def test_settings_of_one_host_do_not_leak_into_the_next(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("Host a\n  IdentityFile /k/a\nHost b\n  IdentityFile /k/b\nHost *\n  IdentitiesOnly yes\n")

    keys = {name: route(Question(name, config_file=config))[-1].identity_files for name in ("a", "b", "a")}

    assert keys == {"a": (Path("/k/a"),), "b": (Path("/k/b"),)}


def test_a_jump_that_leads_back_to_itself_is_an_error_and_no_endless_loop(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("Host a\n  ProxyJump b\nHost b\n  ProxyJump a\n")

    with pytest.raises(HostError, match="lead back to itself"):
        route(Question("a", config_file=config))


def test_a_machine_without_an_ssh_client_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(HostError, match="no `ssh` on this machine; install the OpenSSH client"):
        route(Question("box"))


def test_a_config_that_ssh_refuses_is_shown_in_its_words(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("Host a\n  Prot 22\n")

    with pytest.raises(HostError, match=r"line 2: Bad configuration option: prot"):
        route(Question("a", config_file=config))


@pytest.mark.parametrize(
    ("jump", "expected"),
    [
        ("gpu", ("gpu", None, None)),
        ("root@gpu", ("gpu", None, "root")),
        ("root@gpu:2222", ("gpu", 2222, "root")),
        ("ssh://root@gpu:22/", ("gpu", 22, "root")),
        ("[::1]:33", ("::1", 33, None)),
        ("me@[fe80::1%eth0]", ("fe80::1%eth0", None, "me")),
    ],
)
def test_a_jump_is_read_in_every_form(jump: str, expected: tuple[str, int | None, str | None]) -> None:
    from orchestrator.shell.routes import _jump_question

    asked = _jump_question(jump, Question("x"))

    assert (asked.address, asked.port, asked.user) == expected


def test_an_answer_keeps_repeated_keywords_in_order() -> None:
    assert parse_answer("identityfile a\nIdentityFile b\nport 22\n") == {"identityfile": ["a", "b"], "port": ["22"]}


@given(st.text(max_size=200))
def test_nothing_that_ssh_or_its_keygen_could_print_breaks_the_reading(printed: str) -> None:
    parse_answer(printed)
    parse_search(printed, Path("/kh"))
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", told(printed.encode("utf-8", "surrogateescape")))


# Trouble on the way ----------------------------------------------------------------------------------


def test_a_refused_port_and_an_unknown_name_are_told_apart(server: Server) -> None:
    with socket.socket() as held:  # bound and not listening: it refuses, and no other test's server can take it
        held.bind(("127.0.0.1", 0))
        with pytest.raises(HostError, match="refuses TCP connections on port"):
            connect(replace(host_of(server), port=held.getsockname()[1]))
    with pytest.raises(HostError, match=r"no address for the name nowhere\.invalid"):
        connect(Host(name="x", source="test", address="nowhere.invalid", ssh_config=server.config_file))


def ipv6(kind: str) -> str | None:
    """The loopback, or an address that wants a zone; None where this machine has none, which changes while tests run."""
    table = Path("/proc/net/if_inet6")
    rows = [line.split() for line in table.read_text().splitlines()] if table.exists() else []
    if kind == "loopback":
        return "::1" if any(row[5] == "lo" for row in rows) else None
    local = (
        f"{ipaddress.IPv6Address(bytes.fromhex(row[0]))}%{row[5]}"
        for row in sorted(
            rows, key=lambda row: int(row[1], 16)
        )  # the machine's own interfaces before those that come and go
        if row[3] == "20" and not int(row[4], 16) & 0x48
    )
    return next(local, None)


@pytest.mark.skipif(ipv6("loopback") is None, reason="this machine has no IPv6")
def test_a_machine_with_an_ipv6_address_is_reached_and_known(tmp_path: Path) -> None:
    with (
        sshd.running(tmp_path / "far", alias="far", address="::1") as far,
        sshd.running(tmp_path / "near", alias="near", address="::1") as near,
    ):
        jump = f"{near.user}@[::1]:{near.port}"
        config = near.config().replace("Host near", "Host near ::1") + far.config(f"ProxyJump {jump}")
        near.config_file.write_text(config)
        assert far.known_hosts.read_text().startswith(f"[::1]:{far.port} ")
        for host in (host_of(far), Hosts.load(None, near.config_file).find("far")):
            with reached(host) as shell:
                assert shell.run(["echo", "six"]).stdout == b"six\n"


@pytest.mark.parametrize("kind", ["loopback", "link-local"])
def test_an_entry_with_an_ipv6_address_in_every_form_moves_files(tmp_path: Path, kind: str) -> None:
    address = ipv6(kind)
    if address is None:
        pytest.skip(f"this machine has no {kind} IPv6 address")
    with sshd.running(tmp_path / "sshd", address=address) as server:
        for spelled in (f'"{address}"', f'"[{address}]"'):
            file = tmp_path / "hosts.yaml"
            file.write_text(server.hosts_yaml(address=spelled))
            (tmp_path / "content").write_bytes(bytes(range(256)))
            with reached(Hosts.load(file).find("box")) as shell:
                shell.put(tmp_path / "content", f"{tmp_path}/there")
                assert shell.read_range(f"{tmp_path}/there", 250, 100) == bytes(range(250, 256))
                shell.get(f"{tmp_path}/there", tmp_path / "back")
            assert (tmp_path / "back").read_bytes() == bytes(range(256))


def test_a_connection_cut_while_a_command_runs_is_an_error_and_the_next_command_reconnects(server: Server) -> None:
    with reached(host_of(server)) as shell:
        begun = server.home / "begun"
        cutter = threading.Thread(target=lambda: (wait_for(begun.exists), server.cut()))
        cutter.start()
        began = time.monotonic()

        with pytest.raises(HostError, match="lost"):
            shell.run(["sh", "-c", 'touch "$1"; exec sleep 60', "sh", str(begun)])

        assert time.monotonic() - began < 50  # not when the command would have ended
        cutter.join()
        assert shell.run(["echo", "again"]).stdout == b"again\n"


class Cutter:
    """A relay that, once armed, cuts the connection at the next byte from this side and passes none of it on."""

    def __init__(self, target: int) -> None:
        self._target, self.armed = target, threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        """Once nobody is connected any more."""
        self._listener.shutdown(socket.SHUT_RDWR)
        while self._threads:
            self._threads.pop().join()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, far = self._listener.accept()[0], socket.create_connection(("127.0.0.1", self._target))
                for words in ((near, far, self.armed), (far, near, threading.Event())):
                    self._threads.append(threading.Thread(target=self._pass_on, args=words))
                    self._threads[-1].start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, is_over: threading.Event) -> None:
        with contextlib.suppress(OSError), source:
            while (piece := source.recv(65536)) and not is_over.is_set():
                sink.sendall(piece)
            if piece:
                is_over.clear()
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


VERBS: dict[str, Callable[[StreamShell, Path], object]] = {
    "run": lambda shell, home: shell.run(["sh", "-c", 'echo x >> "$1"', "sh", f"{home}/lines"]),
    "spawn": lambda shell, home: shell.spawn(["sh", "-c", 'echo x >> "$1"', "sh", f"{home}/lines"], cwd="/"),
    "put": lambda shell, home: shell.put(home / "there", f"{home}/lines"),
    "get": lambda shell, home: shell.get(f"{home}/there", home / "lines"),
    "read_range": lambda shell, home: (home / "lines").write_bytes(shell.read_range(f"{home}/there", 0, 10)),
    "stat": lambda shell, home: shell.stat(f"{home}/there") and (home / "lines").write_text("x\n"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_what_was_to_begin_on_a_connection_that_was_just_cut_begins_once_on_another(tmp_path: Path, verb: str) -> None:
    with (
        sshd.running(tmp_path / "sshd", settings=("MaxSessions 1",)) as server,
        contextlib.closing(Cutter(server.port)) as cutter,
    ):
        server.known_hosts.write_text(f"[127.0.0.1]:{cutter.port} {server.host_key}\n")
        (server.home / "there").write_text("x\n")
        with reached(replace(host_of(server), port=cutter.port)) as shell:
            shell.run(["sleep", "0.5"])  # it has the one session: none is opened ahead
            cutter.armed.set()

            VERBS[verb](shell, server.home)

        assert not cutter.armed.is_set()  # it was cut
        wait_for(lambda: (server.home / "lines").exists() and (server.home / "lines").read_text() == "x\n")


def test_a_connection_that_the_other_end_has_closed_is_not_used(server: Server) -> None:
    """With a session in reserve a command would be sent into nothing, and nobody could say whether it ran."""
    with reached(host_of(server)) as shell:
        for number in range(5):
            pids = server.connection_pids()
            server.cut()
            wait_for(lambda pids=pids: not set(pids) & set(server.connection_pids()))

            assert shell.run(["echo", str(number)]).stdout == f"{number}\n".encode()


def test_an_exit_code_of_255_is_not_a_lost_connection(server: Server) -> None:
    with reached(host_of(server)) as shell:
        assert shell.run(["sh", "-c", "exit 255"]).exit_code == 255


@pytest.mark.parametrize(
    ("bashrc", "runs"),
    [
        ("echo this is printed; echo and this >&2", True),
        ("printf 'no newline'", True),
        ("return 3", True),
        ('[ -z "$PS1" ] && return\necho interactive only', True),
        ("set -u; set -o noclobber; shopt -s failglob extglob", True),
        ("alias ls=false; cd() { false; }; printf() { :; }", True),
        ("cd /; exec 3</dev/null", True),
        ("exit 7", False),
        ("exec true", False),
    ],
)
def test_rc_files_that_print_or_return_do_not_disturb(server: Server, bashrc: str, runs: bool) -> None:
    (server.home / ".bashrc").write_text(bashrc + "\n")
    if runs:
        with reached(host_of(server)) as shell:
            done = shell.run(["printf", "%s|", "a b", "$x"])
            assert (done.exit_code, done.stdout, done.stderr) == (0, b"a b|$x|", b"")
    else:
        with pytest.raises(HostError, match="the login shell or a forced command ended first"):
            connect(host_of(server))


def test_a_login_banner_does_not_disturb(tmp_path: Path) -> None:
    (tmp_path / "banner").write_text("AUTHORISED USE ONLY\n" * 20)
    with (
        sshd.running(tmp_path / "sshd", settings=(f"Banner {tmp_path / 'banner'}", "PrintMotd yes")) as server,
        reached(host_of(server)) as shell,
    ):
        assert shell.run(["echo", "x"]).stdout == b"x\n"


def test_a_server_without_sftp_can_do_everything(tmp_path: Path) -> None:
    with (
        sshd.running(tmp_path / "sshd", settings=("Subsystem none /bin/false",)) as server,
        reached(host_of(server)) as shell,
    ):
        (tmp_path / "file").write_bytes(b"x" * 100_000)
        shell.put(tmp_path / "file", f"{server.home}/there")
        shell.get(f"{server.home}/there", tmp_path / "back")

        assert (tmp_path / "back").stat().st_size == 100_000


def test_a_forced_command_that_answers_something_else_is_shown(tmp_path: Path) -> None:
    with (
        sshd.running(tmp_path / "sshd", settings=("ForceCommand echo this account is for backups only",)) as server,
        pytest.raises(HostError, match="this account is for backups only"),
    ):
        connect(host_of(server))


def test_a_machine_that_never_stops_printing_is_an_error_and_not_a_full_memory(tmp_path: Path) -> None:
    began = time.monotonic()
    with (
        sshd.running(tmp_path / "sshd", settings=("ForceCommand yes garbage",)) as server,
        pytest.raises(HostError, match=r"prints more than 1 MiB before a command starts.*it begins: garbage"),
    ):
        connect(host_of(server))

    assert time.monotonic() - began < 30


def test_output_without_end_is_over_at_the_deadline(server: Server) -> None:
    with reached(host_of(server)) as shell, pytest.raises(TimedOut):
        shell.stream(["yes"], source=Source.of(b""), sink=lambda _: None, timeout_s=1.0)


def test_what_is_sent_and_cannot_be_read_any_more_is_no_fault_of_the_link(server: Server) -> None:
    class Lost(io.RawIOBase):
        def read(self, _size: int = -1) -> bytes:
            raise FileNotFoundError(2, "No such file or directory", "weights.bin")

    with reached(host_of(server)) as shell:
        with pytest.raises(FileNotFoundError, match=r"weights\.bin"):
            shell.stream(["cat"], source=Source(Lost(), 9), sink=lambda _: None, timeout_s=60, idle=True)  # type: ignore[arg-type]
        assert shell.run(["echo", "x"]).stdout == b"x\n"


def test_nothing_reads_what_was_to_be_sent_once_the_command_has_returned(server: Server) -> None:
    class Slow(io.RawIOBase):
        """Read by a caller that takes it back, as `put` closes its file."""

        has_returned = False
        late = 0

        def read(self, _size: int = -1) -> bytes:
            time.sleep(0.2)
            self.late += self.has_returned
            return b"x" * 1000

    source = Slow()
    with reached(host_of(server)) as shell:
        shell.stream(["true"], source=Source(source, 10**6), sink=lambda _: None, timeout_s=60)  # type: ignore[arg-type]
        source.has_returned = True
        for thread in [each for each in threading.enumerate() if each.name == "draftyard-stdin"]:
            thread.join(30)

    assert source.late == 0


def test_what_a_machine_says_cannot_steer_the_terminal_it_is_shown_on(server: Server) -> None:
    (server.home / ".bashrc").write_text(
        "printf '\\033]0;evil\\007\\033[2Jhello\\033[31m \\342\\200\\256wor\\bld\\177\\r\\n'; exit 3\n"
    )

    with pytest.raises(HostError) as refused:
        connect(host_of(server))

    assert "it said:\n  hello world" in str(refused.value)
    assert all(letter.isprintable() or letter == "\n" for letter in str(refused.value))


@pytest.mark.parametrize("num_sessions", [3, 10])
def test_thirty_commands_on_a_server_with_few_sessions_all_run_and_at_most_four_at_once(
    tmp_path: Path, num_sessions: int
) -> None:
    answers: list[bytes] = []
    (tmp_path / "at work").mkdir()
    words = ["sh", "-c", 'touch "$1/$$"; ls "$1" | wc -l; sleep 0.05; rm "$1/$$"', "sh", f"{tmp_path}/at work"]
    settings = (f"MaxSessions {num_sessions}",)
    with sshd.running(tmp_path / "sshd", settings=settings) as server, reached(host_of(server)) as shell:
        threads = [threading.Thread(target=lambda: answers.append(shell.run(words).stdout)) for _ in range(30)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    counts = sorted(map(int, answers))
    assert len(counts) == 30
    assert 1 <= counts[0] <= counts[-1] <= 4


def test_a_server_that_opens_no_session_is_told_as_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that never ran is an error, whatever has used the sessions up."""
    monkeypatch.setattr("orchestrator.shell.channel.FULL_S", 0.2)
    told = r"opens no further session: .* \(MaxSessions of its sshd\)"
    with (
        sshd.running(tmp_path / "sshd", settings=("MaxSessions 0",)) as server,
        pytest.raises(HostError, match=told),
        reached(host_of(server)) as shell,
    ):
        shell.run(["true"])


def test_a_server_with_one_session_makes_a_command_wait_for_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.shell.channel.FULL_S", 1.0)
    begun = tmp_path / "begun"
    with sshd.running(tmp_path / "sshd", settings=("MaxSessions 1",)) as server, reached(host_of(server)) as shell:
        long = threading.Thread(target=shell.run, args=(["sh", "-c", 'touch "$1"; sleep 3', "sh", str(begun)],))
        long.start()
        wait_for(begun.exists)

        assert shell.run(["echo", "x"]).stdout == b"x\n"
        long.join()


def test_no_command_steals_our_stdin(server: Server) -> None:
    """The shell is used from a program that reads keys: nothing may be read of its input."""
    code = (
        "import sys; from pathlib import Path; from orchestrator.host import Hosts, LOCAL\n"
        "from orchestrator.shell.connect import connect\n"
        f"for host in (LOCAL, Hosts.load(None, Path({str(server.config_file)!r})).find('box')):\n"
        "    shell = connect(host); shell.run(['cat']); shell.run(['sh', '-c', 'head -c 3; cat']); shell.close()\n"
        "sys.stdout.write(sys.stdin.read())\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", code],
        input="keys\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=Path(__file__).parent.parent.parent,
    )

    assert done.stdout == "keys\n"


def test_polling_and_cuts_leave_no_process_behind(server: Server) -> None:
    """Polled by offset: after fifty connections that were cut, nothing of ours runs there."""
    (server.home / "log").write_bytes(bytes(range(100)))
    for offset in range(50):
        with reached(host_of(server)) as shell:
            assert shell.read_range(f"{server.home}/log", offset, 2) == bytes([offset, offset + 1])
            server.cut()

    wait_for(lambda: server.session_pids() == [])


def test_a_partial_download_goes_on_where_it_stopped(server: Server, tmp_path: Path) -> None:
    content = os.urandom(1024) * 8000
    (server.home / "big").write_bytes(content)
    found = (server.home / "big").stat()
    part = tmp_path / f".back.{found.st_ino}-{found.st_size}-{int(found.st_mtime)}.part"
    part.write_bytes(content[:5_000_000])

    with reached(host_of(server)) as shell:
        shell.get(f"{server.home}/big", tmp_path / "back")

    assert (tmp_path / "back").read_bytes() == content
    assert not part.exists()


def test_a_damaged_partial_download_is_noticed_and_thrown_away(server: Server, tmp_path: Path) -> None:
    (server.home / "big").write_bytes(b"a" * 100_000)
    found = (server.home / "big").stat()
    part = tmp_path / f".back.{found.st_ino}-{found.st_size}-{int(found.st_mtime)}.part"
    part.write_bytes(b"b" * 50_000)

    with reached(host_of(server)) as shell:
        with pytest.raises(Exception, match="changed while it was fetched"):
            shell.get(f"{server.home}/big", tmp_path / "back")
        shell.get(f"{server.home}/big", tmp_path / "back")

    assert (tmp_path / "back").read_bytes() == b"a" * 100_000


@pytest.mark.slow
def test_a_server_that_says_nothing_at_first_is_tried_again(tmp_path: Path, server: Server) -> None:
    """A machine that is starting takes TCP connections before sshd answers."""
    with _silent_for(5.0, server.port) as port:
        server.known_hosts.write_text(f"[127.0.0.1]:{port} {server.host_key}\n")

        with reached(replace(host_of(server), port=port)) as shell:
            assert shell.run(["true"]).exit_code == 0


@contextlib.contextmanager
def _stranger(words: bytes) -> Iterator[int]:
    """The port of a server that answers any greeting with these words and hangs up."""

    class Answer(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1000)
            self.request.sendall(words)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (b"HTTP/1.1 400 Bad Request\r\nServer: nginx\r\n\r\n<html>", "HTTP/1.1 400 Bad Request Server: nginx <html>"),
        (b"J\0\0\0\n8.0.36\0\x0c\0\0\0mysql_native_password\0", "J 8.0.36 mysql_native_password"),
        (b"\x1b]0;evil\x07220 \x1b[31mmail\x9b2J \xff\xfe ready\r\n", "220 mail 2J ready"),
        (b"a" * 5000 + b"\r\n", "a" * 80),
    ],
)
def test_a_server_that_is_no_ssh_server_is_told_by_its_first_words(words: bytes, said: str) -> None:
    with _stranger(words) as port:
        began = time.monotonic()

        with pytest.raises(HostError) as refused:
            connect(Host(name="web", source="test", address="127.0.0.1", port=port, ssh_config=Path("/dev/null")))

        assert f'no SSH server on port {port}; it says: "{said}"\n' in str(refused.value)
        assert time.monotonic() - began < 25  # it is not asked again and again


@pytest.mark.slow
def test_a_server_that_never_says_anything_is_an_error_that_says_so() -> None:
    with _silent_for(1000.0, 1) as port:
        began = time.monotonic()

        with pytest.raises(HostError, match="accepts TCP, no SSH banner in 10 s"):
            connect(Host(name="mute", source="test", address="127.0.0.1", port=port, ssh_config=Path("/dev/null")))

        assert 10 < time.monotonic() - began < 45


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before a command", "during a command"])
def test_a_frozen_server_is_an_error_in_under_45_seconds(server: Server, when: str) -> None:
    """Its kernel goes on acknowledging every byte, so TCP itself notices nothing."""
    with reached(host_of(server)) as shell:
        shell.run(["true"])
        if when == "before a command":
            server.freeze()
        else:
            threading.Timer(0.5, server.freeze).start()
        began = time.monotonic()

        with pytest.raises(HostError, match=r"answered none of 3 probes|frozen"):
            shell.run(["sleep", "200"], timeout_s=300)

        assert time.monotonic() - began < 45
        server.freeze(stopped=False)
        assert shell.run(["echo", "back"]).stdout == b"back\n"


def test_a_machine_that_answers_is_not_given_up_however_long_a_command_says_nothing(server: Server) -> None:
    """A real sshd answers our probes: the clock of the pulse is turned, not waited for."""
    with reached(host_of(server)) as shell:
        pulse = shell._connected().pulse  # type: ignore[attr-defined]
        for _ in range(5):
            with pulse._lock:
                pulse._due -= 100
            pulse.check()
            wait_for(lambda: pulse.num_unanswered == 0)

        assert pulse.num_unanswered == 0
        assert shell.run(["true"]).exit_code == 0


@contextlib.contextmanager
def _silent_for(seconds: float, target: int) -> Iterator[int]:
    """A port that accepts and keeps quiet for a while; later connections are passed on to the target."""
    opens = time.monotonic() + seconds
    with socket.create_server(("127.0.0.1", 0), backlog=16) as listener:
        listener.settimeout(0.2)
        held: list[socket.socket] = []
        is_over = threading.Event()

        def accept() -> None:
            while not is_over.is_set():
                with contextlib.suppress(TimeoutError):
                    taken, _ = listener.accept()
                    held.append(taken)
                    if time.monotonic() > opens:
                        threading.Thread(target=_relay, args=(taken, target), daemon=True).start()

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            is_over.set()
            thread.join()
            for taken in held:
                taken.close()


def _relay(near: socket.socket, target: int) -> None:
    with socket.create_connection(("127.0.0.1", target)) as far:

        def back() -> None:
            with contextlib.suppress(OSError):
                while piece := far.recv(65536):
                    near.sendall(piece)

        threading.Thread(target=back, daemon=True).start()
        with contextlib.suppress(OSError):
            while piece := near.recv(65536):
                far.sendall(piece)


def test_over_a_long_line_a_command_costs_one_round_trip(server: Server) -> None:
    """Sessions are opened ahead and no answer is waited for that is not needed. Input costs another: sshd allows none before.

    Two lines, one longer: what a slow machine adds is the same on both.
    """

    def num_round_trips() -> float:
        short_s, long_s = _quickest_command_s(server, one_way_s=0.05), _quickest_command_s(server, one_way_s=0.2)
        return (long_s - short_s) / 0.3

    assert any(0.7 < num_round_trips() < 1.6 for _ in range(5))  # a busy machine may add more to one than to the other


def _quickest_command_s(server: Server, *, one_way_s: float) -> float:
    with delay.line(server.port, one_way_s=one_way_s) as port:
        server.known_hosts.write_text(f"[127.0.0.1]:{port} {server.host_key}\n")
        with reached(replace(host_of(server), port=port)) as shell:
            times = []
            for _ in range(4):
                time.sleep(3 * one_way_s)  # as a follower pauses between two looks
                began = time.monotonic()
                assert shell.run(["echo", "x"]).stdout == b"x\n"
                times.append(time.monotonic() - began)
    return min(times)
