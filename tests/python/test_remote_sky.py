"""The SkyPilot tasks in remote/: its own parser takes them, their scripts are scripts, what they name exists. None is launched."""

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

PARSE = """
import json, sys, sky
for path in sys.argv[1:]:
    try:
        task = sky.Task.from_yaml(path)
        resources = sorted(str(each) for each in task.resources)
        secrets = sorted(task.to_yaml_config(use_user_specified_yaml=False).get("secrets", {}).items())
        print(json.dumps({"name": task.name, "resources": resources, "secrets": secrets}))
    except ValueError as error:
        print(json.dumps({"refused": str(error)}))
"""


def parsed(folder: Path, *tasks: Path) -> list[dict[str, Any]]:
    """What SkyPilot makes of each. It keeps its files in ``folder``."""
    if not STATE.is_file() or STATE.read_text().strip() == "incomplete":
        pytest.skip(NOT_RUN)
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    own = {"HOME": str(folder), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    done = subprocess.run(
        [ENVIRONMENT / "bin" / "python", "-c", PARSE, *tasks],
        cwd=ROOT,
        env=clean | own,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_skypilot_takes_each_task(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.sky.yaml"
    wrong.write_text(TASKS[0].read_text().replace("\nsetup:", "\nset_up:"))
    *taken, refused = parsed(tmp_path, *TASKS, wrong)
    assert "set_up" in refused["refused"]
    by_name = {task["name"]: task for task in taken}
    assert list(by_name) == ["tileloss-cpu", "tileloss-gpu", "tileloss-tpu"]
    for task in taken:
        assert [name for name, _ in task["secrets"]] == ["WANDB_API_KEY"]
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
    script = "set -eu\n" + task["setup"][start : task["setup"].index("./dev build")]
    shell = ["bash", "-c", script]
    assert subprocess.run(shell, cwd=tmp_path, capture_output=True).returncode == 0
    (tmp_path / "new").touch()
    refused = subprocess.run(shell, cwd=tmp_path, capture_output=True, text=True)
    assert refused.returncode == 1 and "?? new" in refused.stdout
    assert subprocess.run(shell, cwd="/", capture_output=True).returncode != 0


def test_no_task_has_a_secret_of_its_own(task: dict[str, Any]) -> None:
    assert task["secrets"] == {"WANDB_API_KEY": ""}
    assert not [name for name in task.get("envs", {}) if re.search("KEY|TOKEN|SECRET", name)]
