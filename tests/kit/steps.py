"""What the kit runs, in the order of what one wants to know first. Programs and files are named from the kit's folder."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

KIT = Path(__file__).resolve().parent
PROGRAM = "site/tileloss/bin/tileloss"
# CUDA's own checks look at every access: of the C API's suites those that reach each kernel with the smallest rows.
SANITIZED = "*SpecialValues.*:*RowOutputsOf*:*MergedShards.*:Linear.*-MergedShards.APlan*"
LARGE = (
    "seq_len=5",
    "batch_size=2",
    "vocab_size=3001",
)  # in place of the sizes of configs for whole models


@dataclass(frozen=True)
class Command:
    """`must_print`: a regular expression that its output has where it passes."""

    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    must_print: str = ""


@dataclass(frozen=True)
class Step:
    """`at_once`: how many of its commands run side by side."""

    name: str
    limit_s: float
    commands: tuple[Command, ...]
    at_once: int = 1


def python(name: str, script: str, *arguments: str, **environment: str) -> Command:
    return Command(name, (sys.executable, script, *arguments), environment)


def pytest(name: str, *arguments: str, processes: int = 8, **environment: str) -> Command:
    options = ("-q", "--maxfail=20", "-p", "no:cacheprovider", f"--numprocesses={processes}")
    return Command(name, (sys.executable, "-m", "pytest", *options, *arguments), environment)


def suite(shard: int, shards: int) -> Command:
    environment = {
        "GTEST_TOTAL_SHARDS": str(shards),
        "GTEST_SHARD_INDEX": str(shard),
        "TILELOSS_NUM_THREADS": "2",
    }
    arguments = (
        "bin/api_test",
        "--gtest_brief=1",
        f"--gtest_filter={(KIT / 'suites.txt').read_text().strip()}",
    )
    return Command(f"api_{shard}", arguments, environment, must_print=r"\[  PASSED  \]")


def gradcheck(config: Path, *sets: str) -> Command:
    arguments = [
        PROGRAM,
        "gradcheck",
        "--device",
        "cuda",
        "--mutants",
        "--quiet",
        "--config",
        f"configs/{config.name}",
    ]
    for each in sets:
        arguments += ["--set", each]
    return Command(config.stem, tuple(arguments), {"TILELOSS_NUM_THREADS": "2"})


def gradchecks() -> tuple[Command, ...]:
    commands = []
    for config in sorted((KIT / "configs").glob("gradcheck_*.yaml")):
        if config.stem.endswith("_model"):
            continue
        sets: Sequence[str] = LARGE if "qwen" in config.stem else ()
        if "linear" in config.stem and sets:
            sets = (*sets, "hidden_size=96")
        commands.append(gradcheck(config, *sets))
    return tuple(commands)


def sanitizer(tool: str) -> Command:
    arguments = (
        "compute-sanitizer",
        "--tool",
        tool,
        "--error-exitcode",
        "1",
        "bin/api_test",
        "--gtest_brief=1",
        f"--gtest_filter={SANITIZED}",
    )
    return Command(
        tool,
        arguments,
        {"TILELOSS_NUM_THREADS": "2"},
        must_print=r"ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards",
    )


def check() -> list[Step]:
    return [
        Step(
            "device",
            40,
            (
                Command("info", (PROGRAM, "info"), must_print="cuda"),
                python("versions", "versions.py"),
            ),
            2,
        ),
        Step(
            "first",
            60,
            (python("first", "first.py"), gradcheck(Path("gradcheck_ce_edges.yaml"))),
            2,
        ),
        Step("api", 90, tuple(suite(shard, 8) for shard in range(8)), 8),
        Step("gradchecks", 60, gradchecks(), 8),
        Step(
            "torch",
            90,
            (
                pytest("losses", "tests/python/cuda_losses.py"),
                pytest("models", "tests/python/cuda_models.py", processes=4),
                pytest(
                    "segments",
                    "tests/python/cuda_losses.py",
                    "-k",
                    "values or graph or captur",
                    PYTORCH_ALLOC_CONF="expandable_segments:True",
                ),
            ),
            3,
        ),
        Step("rows", 60, (python("rows", "rows.py"),)),
        Step(
            "sanitizers",
            75,
            tuple(sanitizer(tool) for tool in ("memcheck", "racecheck", "synccheck", "initcheck")),
            4,
        ),
    ]


def measure() -> list[Step]:
    return []


STEPS = {"check": check, "measure": measure}
