"""Another project audits its own loss in its CI: the pytest plugin and the GitHub Action, on a sample project."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "users" / "audit.md").read_text()
PLUGIN = "tileloss.tools.audit.pytest_plugin"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A right loss and a wrong one, and a test of its own."""
    shutil.copy(Path(__file__).with_name("audit_losses.py"), tmp_path / "losses.py")
    (tmp_path / "test_own.py").write_text("def test_own():\n    pass\n")
    return tmp_path


def run_pytest(project: Path, *arguments: str) -> tuple[int, str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        PLUGIN,
        "-p",
        "no:cacheprovider",
        "-rA",
        *arguments,
    ]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_cases_are_tests_of_a_projects_own(project: Path) -> None:
    cases = "--tileloss-case=ce/fp32,ce/sum,bug/transformerengine-2476"
    code, out = run_pytest(project, "--tileloss-audit=losses.py:right", cases)
    assert code == 0 and "3 passed, 1 skipped" in out, out
    assert "reduction sum: not offered" in out
    code, out = run_pytest(project, "--tileloss-audit=losses.py:halved", "--tileloss-case=ce/fp32")
    assert code == 1 and "1 failed, 1 passed" in out, out
    assert "FAILED ::losses.py:halved[ce/fp32]" in out and "Traceback" not in out
    assert "ce/fp32 (1000 classes, a fifth of the rows ignored): dlogits/ulp_target 6" in out


def test_without_the_flag_nothing_is_audited_and_a_wrong_name_is_said(project: Path) -> None:
    assert "1 passed" in run_pytest(project)[1]
    code, out = run_pytest(project, "--tileloss-audit=nowhere.py:f")
    assert code == 4 and "--tileloss-audit: expected a Python file, got nowhere.py" in out
    code, out = run_pytest(project, "--tileloss-audit=losses.py:right", "--tileloss-case=ce/spke")
    assert code == 4 and "--tileloss-case: no case matches ce/spke" in out


def test_the_action_runs_the_audit_and_shows_its_table(project: Path) -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    install, audit = action["runs"]["steps"]
    assert 'pip install "${PACKAGE:-$ACTION[audit]}"' in install["run"]
    assert set(audit["env"]) == {"IMPL", "CASES"}
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "RUNNER_TEMP": str(project),
        **{name: str(project / name) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")},
        "CASES": "ce/fp32",
    }
    for function, code in (("right", 0), ("off", 1)):
        environment["IMPL"] = f"losses.py:{function}"
        done = subprocess.run(
            ["bash", "-e", "-c", audit["run"]], cwd=project, env=environment, check=False
        )
        assert done.returncode == code
    lines = [
        json.loads(line) for line in (project / "tileloss-audit.jsonl").read_text().splitlines()
    ]
    assert [line["status"] for line in lines] == ["pass", "failed"]
    assert (project / "GITHUB_OUTPUT").read_text().startswith(f"results={project}")
    summary = (project / "GITHUB_STEP_SUMMARY").read_text()
    assert summary.startswith("```\ncase ") and "FAIL  loss " in summary


def test_the_documents_step_is_the_actions() -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    (block,) = re.findall(r"```yaml\n(.*?)```", DOCUMENT, re.S)
    (step,) = yaml.safe_load(block)
    assert len(block.splitlines()) == 4
    assert set(step["with"]) <= set(action["inputs"]) and step["with"]["impl"]
    metadata = (ROOT / "pyproject.toml").read_text()
    assert f'tileloss = "{PLUGIN}"' in metadata
