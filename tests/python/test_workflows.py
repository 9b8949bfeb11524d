"""The hosted workflows run commands that ./dev has. They run on the host's machines only; here their files are read."""

import subprocess
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]


def test_each_command_of_a_workflow_is_one_of_devs() -> None:
    listed = subprocess.run([ROOT / "dev"], capture_output=True, text=True, check=True).stdout
    commands = {line.split()[0] for line in listed.splitlines()[1:]}
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    job = workflow["jobs"]["dev"]
    assert "./dev ${{ matrix.command }}" in [step.get("run") for step in job["steps"]]
    given = [command.split()[0] for command in job["strategy"]["matrix"]["command"]]
    assert set(given) == {"test", "lint", "sanitize"}
    assert set(given) <= commands
