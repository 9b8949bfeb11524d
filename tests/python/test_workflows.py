"""The hosted workflows run commands that ./dev has. They run on the host's machines only; here their files are read."""

import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "file, job, expected",
    [("test", "dev", {"test", "lint", "sanitize"}), ("wheels", "build", {"wheels"})],
)
def test_each_command_of_a_workflow_is_one_of_devs(file: str, job: str, expected: set[str]) -> None:
    listed = subprocess.run([ROOT / "dev"], capture_output=True, text=True, check=True).stdout
    commands = {line.split()[0] for line in listed.splitlines()[1:]}
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / f"{file}.yml").read_text())
    described = workflow["jobs"][job]
    assert "./dev ${{ matrix.command }}" in [step.get("run") for step in described["steps"]]
    given = [command.split()[0] for command in described["strategy"]["matrix"]["command"]]
    assert set(given) == expected <= commands


def test_a_tag_alone_publishes_and_after_all_tests() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "wheels.yml").read_text())["jobs"]
    assert set(jobs["publish"]["needs"]) == set(jobs) - {"publish"}
    assert jobs["publish"]["if"] == "startsWith(github.ref, 'refs/tags/v')"
    tried = [row["command"] for row in jobs["oldest"]["strategy"]["matrix"]["include"]]
    assert tried == jobs["build"]["strategy"]["matrix"]["command"]
