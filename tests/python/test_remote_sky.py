"""The SkyPilot tasks in remote/: its parser takes them, their scripts are scripts, what they name exists. None is launched."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
TASKS = sorted((ROOT / "remote").glob("*.sky.yaml"))
ENVIRONMENT = Path(f"{sys.prefix}-sky")  # ./dev makes it beside the tests' own
STATE = ENVIRONMENT / "tileloss_state"
NOT_RUN = "NOT RUN: SkyPilot is not installed"

SCRIPT = """
import json, shlex, sys, click, sky
from sky.client.cli.command import cli
asked = json.load(sys.stdin)
for path in asked["tasks"]:
    try:
        task = sky.Task.from_yaml(path)
        resources = sorted(str(each) for each in task.resources)
        print(json.dumps({"name": task.name, "resources": resources, "secrets": sorted(task.secrets)}))
    except ValueError as error:
        print(json.dumps({"refused": str(error)}))
for line in asked["commands"]:
    name, *arguments = shlex.split(line)[1:]
    try:
        cli.commands[name].make_context(name, arguments)
        print("true")
    except click.ClickException as error:
        print(json.dumps({"refused": str(error)}))
"""


def skypilot(folder: Path, tasks: list[Path], commands: list[str]) -> list[Any]:
    """What it makes of each task, and of each command line. It keeps its files in ``folder``."""
    if not STATE.is_file() or STATE.read_text().strip() == "incomplete":
        pytest.skip(NOT_RUN)
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    own = {"HOME": str(folder), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1", "WANDB_API_KEY": "a"}
    done = subprocess.run(
        [ENVIRONMENT / "bin" / "python", "-c", SCRIPT],
        input=json.dumps({"tasks": [str(each) for each in tasks], "commands": commands}),
        cwd=ROOT,
        env=clean | own,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_skypilot_takes_tasks_and_commands(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.sky.yaml"
    wrong.write_text(TASKS[0].read_text().replace("\nsetup:", "\nset_up:"))
    lines = (ROOT / "docs/users/remote.md").read_text().splitlines()
    commands = [line for line in lines if line.startswith("sky ")]
    assert len(commands) == 5
    answers = skypilot(tmp_path, [*TASKS, wrong], [*commands, "sky launch --nothing x"])
    taken, refused = answers[: len(TASKS)], answers[len(TASKS)]
    assert "set_up" in refused["refused"]
    assert answers[len(TASKS) + 1 : -1] == [True] * len(commands)
    assert "--nothing" in answers[-1]["refused"]

    by_name = {task["name"]: task for task in taken}
    assert list(by_name) == ["tileloss-cpu", "tileloss-gpu", "tileloss-tpu"]
    for task in taken:
        assert task["secrets"] == ["WANDB_API_KEY"]
        assert all("image_id=docker:debian:12" in each for each in task["resources"])
    assert "cpus=16+" in by_name["tileloss-cpu"]["resources"][0]
    assert len(by_name["tileloss-gpu"]["resources"]) == 3
    assert "tpu-v6e-1" in by_name["tileloss-tpu"]["resources"][0]


@pytest.fixture(params=TASKS, ids=lambda path: path.name)
def task(request: pytest.FixtureRequest) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(request.param.read_text())
    return loaded


def test_a_tasks_scripts_are_bash(task: dict[str, Any]) -> None:
    for script in (task["setup"], task["run"]):
        assert script.startswith("set -eu\n")
        done = subprocess.run(["bash", "-n", "-c", script], capture_output=True, text=True)
        assert done.stderr == ""


def test_what_a_task_names_exists(task: dict[str, Any]) -> None:
    text = task["setup"] + task["run"]
    listed = subprocess.run([ROOT / "dev"], capture_output=True, text=True, check=True).stdout
    commands = set(re.findall(r"^  (\w+)", listed, re.M))
    assert set(re.findall(r"\./dev (\w+)", text)) <= commands
    configs = re.findall(r"for config in ([^;]+);", text)
    names = [f"configs/gradcheck_{name}.yaml" for each in configs for name in each.split()]
    assert all((ROOT / name).is_file() for name in names)
    assert bool(names) == ("frontend jax" in text)
    pins = set(re.findall(r"jax\[\w+\](==[\d.]+)", text))
    tested = re.findall(
        r"^jax(==[\d.]+)$", (ROOT / "tests/python/requirements.txt").read_text(), re.M
    )
    assert pins <= set(tested)


def test_a_tree_with_changes_is_not_run(task: dict[str, Any], tmp_path: Path) -> None:
    """The setup's own lines, in a checkout with a new file."""
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    start = task["setup"].index("changes=")
    script = "set -eu\n" + task["setup"][start : task["setup"].index("./dev ")]
    shell = ["bash", "-c", script]
    assert subprocess.run(shell, cwd=tmp_path, capture_output=True).returncode == 0
    (tmp_path / "new").touch()
    refused = subprocess.run(shell, cwd=tmp_path, capture_output=True, text=True)
    assert refused.returncode == 1 and "?? new" in refused.stdout
    assert subprocess.run(shell, cwd="/", capture_output=True).returncode != 0


def test_no_task_has_a_secret_of_its_own(task: dict[str, Any]) -> None:
    assert task["secrets"] == {"WANDB_API_KEY": ""}
    assert not [name for name in task.get("envs", {}) if re.search("KEY|TOKEN|SECRET", name)]
