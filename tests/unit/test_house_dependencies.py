"""Dependencies: each has a reason, and the lock files agree with pyproject.toml, with each other and with all Pythons."""

from __future__ import annotations

import platform
import re
import tomllib
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from steps.locks import Lock, normalised, read_lock

REPO = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text("utf-8"))["project"]
PYTHONS = ("3.11.9", "3.12.3")
LINUX = {"sys_platform": "linux", "platform_system": "Linux", "implementation_name": "cpython"}


def direct_requirements(*extras: str) -> list[Requirement]:
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    return [Requirement(line) for line in lines]


def pinned_versions(lock: Lock, python: str = PYTHONS[0]) -> dict[str, str]:
    machine = {**LINUX, "python_full_version": python, "python_version": python.rpartition(".")[0]}
    pins = [pin for pin in lock.pins if not pin.marker or Marker(pin.marker).evaluate(machine)]
    pinned = {pin.name: pin.version for pin in pins}
    assert len(pinned) == len(pins), "a package is pinned twice for one machine"
    return pinned


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize(("profile", "extras"), [("cpu", ()), ("gpu", ("gpu",)), ("test", ("test",))])
def test_every_lock_pins_versions_that_the_project_file_allows(profile: str, extras: tuple[str, ...], python: str) -> None:
    pinned = pinned_versions(read_lock(profile), python) | (
        pinned_versions(read_lock("cpu"), python) if profile == "test" else {}
    )
    for requirement in direct_requirements(*extras):
        version = pinned.get(normalised(requirement.name))
        assert version is not None, f"{requirement.name} is not in {profile}.txt"
        assert requirement.specifier.contains(version.partition("+")[0]), f"{requirement} against {version}"


def test_every_dependency_has_a_reason() -> None:
    text = (REPO / "pyproject.toml").read_text("utf-8")
    lists = re.findall(r"^(?:dependencies|gpu|test) = \[\n(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    assert len(lists) == 3
    assert not [line for block in lists for line in block.splitlines() if not re.search(r'",\s+# \S', line)]


@pytest.mark.parametrize("profile", ["cpu", "gpu", "test"])
def test_every_supported_python_installs_the_same_packages(profile: str) -> None:
    first, *others = (set(pinned_versions(read_lock(profile), python)) for python in PYTHONS)
    assert all(other == first for other in others)


def test_the_project_file_lists_the_tested_pythons() -> None:
    named = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: \d+\.\d+$", line)]
    assert named == [python.rpartition(".")[0] for python in PYTHONS]
    assert PROJECT["requires-python"] == f">={named[0]}"


def test_the_lock_file_repeats_the_reasons() -> None:
    text = (REPO / "installer" / "requirements" / "cpu.txt").read_text("utf-8").split("# What these need in turn")[0]
    assert (
        len(re.findall(r"^# .+\n\w", text, re.MULTILINE)) == len(direct_requirements()) + 1
    )  # torch is listed for Linux and for other systems


def test_profiles_pin_the_same_version_of_a_shared_package() -> None:
    cpu, gpu = pinned_versions(read_lock("cpu")), pinned_versions(read_lock("gpu"))
    differing = {name for name in cpu if cpu[name].partition("+")[0] != gpu[name].partition("+")[0]}
    assert not differing


def test_the_cpu_profile_has_no_gpu_packages() -> None:
    names = set(pinned_versions(read_lock("cpu")))
    assert not {name for name in names if name.startswith(("nvidia-", "cuda-", "triton"))} - {"nvidia-ml-py"}
    assert pinned_versions(read_lock("cpu"))["torch"].endswith("+cpu")


def test_the_triton_lock_pins_both_ends_of_the_supported_range() -> None:
    (range_of_triton,) = (wanted for wanted in direct_requirements("gpu") if wanted.name == "triton")
    pins = read_lock("triton").pins
    assert {pin.name for pin in pins} == {"triton"}
    oldest, newest = (tuple(map(int, pin.version.split("."))) for pin in pins)
    assert oldest < newest
    assert all(range_of_triton.specifier.contains(pin.version) for pin in pins)
    assert not range_of_triton.specifier.contains(f"{oldest[0]}.{oldest[1] - 1}.9")
    assert not range_of_triton.specifier.contains(f"{newest[0]}.{newest[1] + 1}.0")


def test_the_cpu_lock_contains_every_transitive_dependency() -> None:
    from importlib import metadata

    pinned = pinned_versions(read_lock("cpu"), platform.python_version())
    missing = set()
    for name in pinned:
        try:
            installed, needs = metadata.version(name), metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # this interpreter was not made from the lock; the others are still compared
        if installed != pinned[name]:
            continue  # another version, or another build, may need something else
        for line in needs:
            requirement = Requirement(line)
            wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if wanted and normalised(requirement.name) not in pinned:
                missing.add(f"{name} needs {requirement.name}")
    assert not missing
