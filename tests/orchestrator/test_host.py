"""Which hosts are known, and what a slip of the pen says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import UsageError
from orchestrator.host import LOCAL, Hop, Hosts, read_env_file


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "more").write_text("Host included\n  HostName 10.0.0.9\n")
    file = tmp_path / "config"
    file.write_text(
        f"Include {tmp_path / 'more'}\n"
        "# Host commented\n"
        "Host gpu gpu-alias # the big one\n  HostName 10.0.0.2\n  Port 22013\n"
        'host="quoted"\n'
        "HOST=equals\n"
        "Host rack-*\n  User root\n"
        "Host * !gpu\n  User me\n"
        "Match host x\n  User y\n"
    )
    return file


def load(tmp_path: Path, text: str, config: Path | None = None) -> Hosts:
    (tmp_path / "hosts.yaml").write_text(text)
    return Hosts.load(tmp_path / "hosts.yaml", config or tmp_path / "no-config")


def test_local_is_always_there_and_runs_this_interpreter(tmp_path: Path) -> None:
    hosts = Hosts.load(None, tmp_path / "absent")

    assert hosts.names() == ["local"]
    assert hosts.find("local") == LOCAL
    assert (LOCAL.is_local, LOCAL.python) == (True, sys.executable)


def test_aliases_of_the_ssh_config_are_hosts_through_includes_and_in_every_spelling(config: Path) -> None:
    hosts = Hosts.load(None, config)

    assert hosts.names() == ["local", "included", "gpu", "gpu-alias", "quoted", "equals"]
    assert hosts.find("gpu").address == "gpu"
    assert hosts.find("gpu").ssh_config == config


def test_a_config_that_includes_itself_is_read_once(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("Host a\n" + f"Include {tmp_path}/*\n" * 8 + "Host b\n")

    assert Hosts.load(None, config).names() == ["local", "a", "b"]


def test_files_that_include_one_another_are_read_once_each(tmp_path: Path) -> None:
    """Read once for each way through them, ten files are ten million."""
    for name in "abcde":
        (tmp_path / name).write_text(f"Include {tmp_path}/*\nHost {name}-*\n")

    hosts = Hosts.load(None, tmp_path / "a")

    assert sorted(hosts.patterns) == ["a-*", "b-*", "c-*", "d-*", "e-*"]


def test_a_name_that_a_wildcard_is_meant_for_is_known_but_a_bare_star_makes_nothing_known(config: Path) -> None:
    hosts = Hosts.load(None, config)

    assert hosts.find("rack-7").address == "rack-7"
    with pytest.raises(UsageError):
        hosts.find("whatever")


def test_an_unknown_host_names_the_known_ones_and_the_nearest(config: Path) -> None:
    with pytest.raises(UsageError) as refused:
        Hosts.load(None, config).find("gqu")

    assert refused.value.exit_code == 2
    assert (
        str(refused.value)
        == "no host 'gqu'; known: local, included, gpu, gpu-alias, quoted, equals; did you mean 'gpu'?"
    )


def test_a_host_unlike_every_known_one_is_told_where_hosts_are_named(config: Path) -> None:
    with pytest.raises(UsageError) as refused:
        Hosts.load(None, config).find("zzzz")

    where = f"a host is an alias in {config} or an entry in hosts.yaml"
    assert str(refused.value) == f"no host 'zzzz'; known: local, included, gpu, gpu-alias, quoted, equals; {where}"


def test_an_entry_of_hosts_yaml_has_every_key(tmp_path: Path, config: Path) -> None:
    hosts = load(
        tmp_path,
        "hosts:\n"
        "  plain:\n"
        "  gpu:\n"
        "    address: 10.0.0.3\n    port: 22013\n    user: trainer\n    jump: admin@pve:2222,second\n"
        "    identity: [~/.ssh/a, /k/b]\n    hop: [ssh:inner, pct:200]\n    work_dir: /data/dy\n"
        "    python: /root/venv/bin/python\n    gpus: [5, 6, GPU-8f2c-1]\n    env_file: /s/env\n"
        "    host_keys: accept-new /k/known\n",
        config,
    )

    gpu = hosts.find("gpu")
    assert (gpu.address, gpu.port, gpu.user, gpu.jump) == ("10.0.0.3", 22013, "trainer", "admin@pve:2222,second")
    assert gpu.identity == ("~/.ssh/a", "/k/b")
    assert gpu.hops == (Hop("ssh", "inner"), Hop("pct", "200"))
    assert (gpu.work_dir, gpu.python, gpu.gpus) == ("/data/dy", "/root/venv/bin/python", ("5", "6", "GPU-8f2c-1"))
    assert (gpu.env_file, gpu.host_keys, gpu.known_hosts) == (Path("/s/env"), "accept-new", Path("/k/known"))
    assert gpu.source == "hosts.yaml:3"
    assert hosts.find("plain").address == "plain"


def test_local_may_be_given_another_folder_but_no_address(tmp_path: Path) -> None:
    assert load(tmp_path, "hosts: {local: {work_dir: /data, gpus: 1}}\n").find("local").work_dir == "/data"
    with pytest.raises(
        UsageError, match=r"hosts\.local\.port: not for `local`; known: hop, work_dir, python, gpus, env_file$"
    ):
        load(tmp_path, "hosts:\n  local:\n    port: 22\n").find("local")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("prot: 22", r":3:5: hosts\.gpu\.prot: no key 'prot'; known: .*; did you mean 'port'\?"),
        ("colour: red", r"no key 'colour'; known: .*address"),
        ("port: 70000", "is 70000; a port is a number from 1 to 65535"),
        ("port: '22'", "is '22'; a port is a number"),
        ("port: true", "is True; a port is a number"),
        ("address: -oProxyCommand=evil", "does not start with a dash"),
        ("address: 10.0.0.2:22013", r"write address: 10\.0\.0\.2, port: 22013$"),
        ('address: "[::1]:2222"', "write address: ::1, port: 2222$"),
        ("address: ssh://me@gpu.lan:22/", r"write address: gpu\.lan, user: me, port: 22$"),
        ("address: me@gpu.lan", r"write address: gpu\.lan, user: me$"),
        ("address: me@fe80::1%eth0", r"write address: fe80::1%eth0, user: me$"),
        ("user: 7", "is 7; expected text"),
        ("hop: pct:web", "named by its number"),
        ("hop: podman:x", "expected KIND:NAME with a kind of pct, docker, lxc, ssh"),
        ("hop: qm:101", "give its own address and jump:"),
        ("hop: docker:-it", "expected KIND:NAME"),
        ("hop: docker", "expected KIND:NAME"),
        ("hop: ssh:a b", "expected KIND:NAME"),
        ("gpus: [all]", "a GPU is an index or a UUID"),
        ("host_keys: no", "expected strict, accept-new, a file"),
        ("host_keys: accept-newest", "expected strict, accept-new"),
        ("identity: [1]", "expected text or a list of texts"),
        ("python: ''", "expected text"),
        ("env_file: ~nobody-here/x.env", "no such user's home folder"),
        ("host_keys: ~nobody-here/known", "no such user's home folder"),
    ],
)
def test_a_slip_in_hosts_yaml_is_named_with_its_place(tmp_path: Path, entry: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        load(tmp_path, f"hosts:\n  gpu:\n    {entry}\n").find("gpu")

    assert f"{tmp_path / 'hosts.yaml'}:3:" in str(refused.value)


def test_all_slips_of_an_entry_are_named_at_once_and_stop_no_other(tmp_path: Path) -> None:
    hosts = load(tmp_path, "hosts:\n  a: {}\n  b:\n    prot: 1\n    gpus: x\n")

    with pytest.raises(UsageError) as refused:
        hosts.find("b")

    assert len(str(refused.value).splitlines()) == 2
    assert (hosts.find("a").name, hosts.find("local").is_local, hosts.knows("b")) == ("a", True, True)


@pytest.mark.parametrize("letter", ["\\0", "\\n", "\\e", "\\x7F", "\\x9B"])
@pytest.mark.parametrize(
    "key", ["address", "user", "jump", "identity", "hop", "work_dir", "python", "gpus", "env_file", "host_keys"]
)
def test_a_control_character_in_any_text_is_one_line_with_its_place(tmp_path: Path, key: str, letter: str) -> None:
    for value in (
        (f'"/a{letter}b"', f'[x, "a{letter}b"]') if key in ("identity", "hop", "gpus") else (f'"/a{letter}b"',)
    ):
        with pytest.raises(UsageError, match=rf"hosts\.yaml:3:5: hosts\.gpu\.{key}: is .*control character") as refused:
            load(tmp_path, f"hosts:\n  gpu:\n    {key}: {value}\n").find("gpu")

        assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    "text", ["[]", "gpu: {}", "hosts: []", "hosts: {gpu: 3}", "hosts: {-x: {}}", "hosts: {a: {port: 1, port: 2}}"]
)
def test_a_file_of_another_shape_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError):
        load(tmp_path, text + "\n").find("gpu")


@pytest.mark.parametrize("text", ["", "hosts:\n", "# only a comment\n", "hosts: {}\n"])
def test_an_empty_file_is_no_fault(tmp_path: Path, text: str) -> None:
    assert load(tmp_path, text).names() == ["local"]


@given(st.text(alphabet=st.sampled_from("Hosti \t\"'*?!#=\\\n\rIncludeMatch -./~é"), max_size=120))
def test_no_ssh_config_whatever_is_in_it_breaks_the_list_of_names(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    file = tmp_path_factory.mktemp("fuzz") / "config"
    file.write_text(text)

    assert Hosts.load(None, file).names()[0] == "local"


def test_an_env_file_is_read_as_a_shell_would(tmp_path: Path) -> None:
    file = tmp_path / "env"
    file.write_text(
        "# tokens\n\nHF_TOKEN=hf_abc=def\nexport A='single $x'\nB=\"two words\"\n C = spaced\nD=\nE=é # kept\n".replace(
            " C = spaced", " C=spaced"
        )
    )

    assert read_env_file(file) == {
        "HF_TOKEN": "hf_abc=def",
        "A": "single $x",
        "B": "two words",
        "C": "spaced",
        "D": "",
        "E": "é # kept",
    }


@pytest.mark.parametrize("line", ["no equals", "1A=x", "A-B=x", "A='open", "A='x' y"])
def test_a_fault_in_an_env_file_names_the_line_and_never_the_value(tmp_path: Path, line: str) -> None:
    file = tmp_path / "env"
    file.write_text(f"OK=1\n{line.replace('x', 'canary')}\n")

    with pytest.raises(UsageError, match=":2") as refused:
        read_env_file(file)

    assert "canary" not in str(refused.value)


def test_a_missing_env_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_env_file(tmp_path / "absent")


@pytest.mark.slow
def test_looking_at_hosts_loads_no_transport() -> None:
    import subprocess

    code = "import sys, orchestrator.host, orchestrator.launch, orchestrator.ship; assert not {'fabric', 'paramiko'} & set(sys.modules)"

    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
