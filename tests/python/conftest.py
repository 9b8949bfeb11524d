"""What every Python test shares: no network, one torch thread a process (pytest-xdist runs several), fixed seeds.

torch may be missing: the newest JAX is tested without it. What needs another package that is missing says NOT RUN.

TILELOSS_TEST_NOT_RUN=fail makes a failure of every test that is not run, as on a machine that should have all it needs;
"fail: no trl, GPUs than 2" but for those that have one of these words in their reason.
"""

import gc
import hashlib
import os
import random
import re
from collections.abc import Generator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path


def jax_cache() -> Path:
    """A folder outside the tree for JAX's compiled programs: one for each version of jaxlib and kind of processor, whose
    instructions are in them."""
    facts = re.findall(r"^(?:model name|flags)\s*:.*$", Path("/proc/cpuinfo").read_text(), re.M)
    processor = hashlib.sha256("\n".join(sorted(set(facts))).encode()).hexdigest()[:12]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "tileloss" / f"jax-programs-{version('jaxlib')}-{processor}"


def is_failure(reason: str) -> bool:
    """Whether what is not run for this reason is a failure here."""
    wish, _, fine = os.environ.get("TILELOSS_TEST_NOT_RUN", "").partition(":")
    assert wish in ("", "fail"), (
        f"TILELOSS_TEST_NOT_RUN: expected fail or fail: REASON, ..., got {wish}"
    )
    return wish == "fail" and not any(
        word.strip() in reason for word in fine.split(",") if word.strip()
    )


# Before torch, transformers and jax are imported: they read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
# With libtpu installed JAX would look for a TPU first.
ON_GPU = os.environ.get("TILELOSS_TEST_DEVICE") == "gpu"
os.environ.setdefault("JAX_PLATFORMS", "cuda" if ON_GPU else "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# For tests of arrays cut over devices: others use the first.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
# JAX's programs run once: without optimisations they take half the time to compile.
if not ON_GPU:
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
if find_spec("jaxlib"):
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(jax_cache()))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import numpy as np  # noqa: E402
import pytest  # noqa: E402

if find_spec("torch"):
    import torch


# Files of the second tier; single tests of it have the mark `full` themselves.
FULL = """
audit_examples audit_invariance audit_packages check_models check_trackers compare docs fsdp install jax_devices
jax_linear_programs jax_rows_programs jax_shards jax_tpu_blocks jax_tpu_compile jax_tpu_head jax_tpu_logits
jax_tpu_mutants remote remote_sky report_page third_party_policies
third_party_shapes torch_compile torch_distributed torch_memory torch_processes transformers_families
transformers_trainer trl_distillation trl_distillation_heads trl_heads trl_policy trl_trainers
""".split()


# What only some tests need, each of which imports it: of the front ends', no user of another must have it.
OPTIONAL = """
accelerate datasets flax jinja2 liger_kernel matplotlib optax peft playwright scikit_build_core tokamax transformers trl wandb
""".split()
_MISSING = re.compile(rf"^E +ModuleNotFoundError: No module named '({'|'.join(OPTIONAL)})\b", re.M)
Report = pytest.TestReport | pytest.CollectReport


def told(report: Report) -> Report:
    """The report of a test, or of a module's import, with what is NOT RUN said, and a failure where it should be one."""
    place = (report.nodeid.partition("::")[0], 0)
    if report.failed and (missing := _MISSING.search(str(report.longrepr))):
        report.outcome, report.longrepr = "skipped", (*place, f"Skipped: NOT RUN: no {missing[1]}")
    if (
        report.skipped
        and not hasattr(report, "wasxfail")
        and is_failure(reason := report.longrepr[2])
    ):
        report.outcome = "failed"
        report.longrepr = f"{reason}, which TILELOSS_TEST_NOT_RUN does not allow here"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Report, Report]:
    return told((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Report, Report]:
    return told((yield))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem.removeprefix("test_") in FULL:
            item.add_marker(pytest.mark.full)


def pytest_collection_finish() -> None:
    """What the test modules imported stays: a trainer collects garbage at the end of each run, and looking through a million
    objects of torch, transformers and TRL took more time than the runs."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup() -> None:
    """On a machine without the GPU that was asked for: all has been imported and collected."""
    if ON_GPU and not torch.cuda.is_available():
        pytest.fail("no device: torch sees no GPU", pytrace=False)


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Every test draws the same numbers, alone or after others."""
    random.seed(0)
    np.random.seed(0)
    if find_spec("torch"):
        torch.manual_seed(0)


@pytest.fixture(params=["cuda"] if ON_GPU else ["xla", "cpu"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which implementation the functions of tileloss.jax take where the caller names none."""
    from tileloss.jax import _implementations

    # The few calls that "cpu" and "cuda" cannot do fall to "xla", as they do for users.
    names = dict.fromkeys((request.param, "xla"))
    monkeypatch.setattr(_implementations, "DEFAULT", tuple(names))
    return str(request.param)
