#!/usr/bin/env python3
"""TileLoss on a machine with a GPU and without a network.

    run check [FOLDER] [--only STEP,STEP]      does everything work: suites, oracle, bits, sanitizers
    run measure [FOLDER] [--only STEP,STEP]    how fast it is, beside this GPU's roofs and other packages

Each step has a time limit, logs, and one line in FOLDER/summary as soon as it ends; one that fails, hangs or crashes costs its
own limit only. All steps together end within 330 s. FOLDER (kit-results in the working directory, if none is given) gets
`summary`, `results.jsonl` (a line a command), `logs.tar.gz`, and what the steps measure. A test that skips itself is a failure.
Exit codes: 0 all passed, 1 a step failed, 2 usage, 3 there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from steps import KIT, STEPS, Command, Step

TOTAL_S = 330.0
# Of a command's output, so that all logs fit in some megabytes: the beginning and the end.
HEAD_BYTES, TAIL_BYTES = 64 << 10, 192 << 10

# What a command that asked for a device says without one. It has been loaded, has found its files, and got as far as a GPU.
NO_DEVICE = re.compile(
    r"no (CUDA )?device|device: expected one of this machine|NOT RUN: there is no gpu"
)
BROKEN = re.compile(r"ImportError|ModuleNotFoundError|No such file|cannot open|error while loading")
LIVE: set[int] = set()  # process groups of the commands that run
SKIPPED = re.compile(r"NOT RUN|^\[  SKIPPED \]", re.M)


@dataclass
class Result:
    """`outcome` is "ok", "no device", or the words for what went wrong."""

    command: str
    outcome: str
    seconds: float
    log: bytes

    @property
    def is_good(self) -> bool:
        return self.outcome in ("ok", "no device")


def captured(child: subprocess.Popen[bytes], deadline: float) -> tuple[bytes, bool]:
    """What it prints, its middle left out where that is much; and whether it ended by itself before the deadline. Afterwards all
    of its process group is gone, and nobody waits for others who may still hold its output open."""
    head, tail, left_out = bytearray(), bytearray(), 0
    assert child.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while time.monotonic() < deadline:
            if not selector.select(0.1):
                if child.poll() is not None:
                    break
                continue
            data = os.read(child.stdout.fileno(), 1 << 16)
            if not data:
                break
            room = HEAD_BYTES - len(head)
            head += data[:room]
            tail += data[room:]
            if len(tail) > 2 * TAIL_BYTES:
                left_out += len(tail) - TAIL_BYTES
                del tail[:-TAIL_BYTES]
    has_ended = True
    try:
        child.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        has_ended = False
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.wait()
    child.stdout.close()
    middle = f"\n[{left_out} bytes left out]\n".encode() if left_out else b""
    return bytes(head + middle + tail), has_ended


def outcome_of(command: Command, code: int, log: str, has_device: bool) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    if not has_device and NO_DEVICE.search(log) and not BROKEN.search(log):
        return "no device"
    if code != 0:
        return f"exit code {code}"
    if SKIPPED.search(log):
        return "tests were skipped"
    if not re.search(command.must_print, log):
        return f"did not print {command.must_print}"
    return "ok"


def run_command(
    command: Command, environment: Mapping[str, str], deadline: float, has_device: bool
) -> Result:
    begin = time.monotonic()
    if begin >= deadline:
        return Result(command.name, "no time was left", 0, b"")
    arguments = [
        argument.replace("{output}", environment["OUTPUT"]) for argument in command.arguments
    ]
    if "/" not in arguments[0] and shutil.which(arguments[0], path=environment["PATH"]) is None:
        missing = f"there is no {arguments[0]} here" if has_device else "no device"
        return Result(command.name, missing, 0, b"")
    try:
        child = subprocess.Popen(
            arguments,
            cwd=KIT,
            env={**environment, **command.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        return Result(command.name, f"could not be started: {error}", 0, b"")
    LIVE.add(child.pid)
    try:
        log, has_ended = captured(child, deadline)
    finally:
        LIVE.discard(child.pid)
    seconds = time.monotonic() - begin
    if has_ended:
        text = log.decode(errors="replace")
        outcome = outcome_of(command, child.returncode, text, has_device)
    else:
        outcome = f"stopped after {seconds:.0f} s"
    return Result(command.name, outcome, seconds, log)


def run_step(
    step: Step, environment: Mapping[str, str], end: float, has_device: bool
) -> list[Result]:
    deadline = min(time.monotonic() + step.limit_s, end)
    with ThreadPoolExecutor(step.at_once) as pool:
        return list(
            pool.map(
                lambda command: run_command(command, environment, deadline, has_device),
                step.commands,
            )
        )


DEVICE_NAME = """
import ctypes
driver, count, name = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.create_string_buffer(128)
if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value:
    driver.cuDeviceGetName(name, 128, 0)
    print(name.value.decode())
"""


def device_name() -> str:
    """Of the first GPU that the driver sees, or empty; asked in a process of its own, as what hangs there must not hang here."""
    try:
        asked = subprocess.run(
            [sys.executable, "-c", DEVICE_NAME], capture_output=True, text=True, timeout=60
        )
    except subprocess.TimeoutExpired:
        return ""
    return asked.stdout.strip()


class Results:
    """The folder's files. All are whole after every step."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._logs = tempfile.TemporaryDirectory()
        for name in ("summary", "results.jsonl"):
            (folder / name).write_text("")

    def say(self, line: str) -> None:
        print(line, flush=True)
        with (self._folder / "summary").open("a") as summary:
            summary.write(line + "\n")

    def add(self, step: Step, results: list[Result]) -> None:
        seconds = max((r.seconds for r in results), default=0)
        bad = [r for r in results if not r.is_good]
        word = "FAILED" if bad else "ok" if all(r.outcome == "ok" for r in results) else "no device"
        note = f"{len(results) - len(bad)} of {len(results)}"
        note += "".join(f"; {r.command}: {r.outcome}" for r in bad[:3]) + (
            "; ..." if len(bad) > 3 else ""
        )
        self.say(f"{word:<10}{step.name:<14}{seconds:6.1f} s  {note}")
        with (self._folder / "results.jsonl").open("a") as lines:
            for r in results:
                line = {
                    "step": step.name,
                    "command": r.command,
                    "outcome": r.outcome,
                    "seconds": round(r.seconds, 2),
                }
                lines.write(json.dumps(line) + "\n")
                Path(self._logs.name, f"{step.name}.{r.command}.log").write_bytes(r.log)
        packed = self._folder / "logs.tar.gz.new"
        with tarfile.open(packed, "w:gz") as archive:
            archive.add(self._logs.name, "logs")
        packed.rename(self._folder / "logs.tar.gz")
        for r in bad[:2]:
            print(f"--- the end of {step.name}.{r.command}:")
            print("\n".join(r.log.decode(errors="replace").splitlines()[-12:]), flush=True)


def child_environment(scratch: str, output: Path) -> dict[str, str]:
    """What commands see: of the caller's environment only what tells where programs and libraries are."""
    kept = ("PATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "VIRTUAL_ENV", "LANG")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    path = environment.get("PATH", "/usr/local/bin:/usr/bin:/bin")
    environment["PATH"] = f"{Path(sys.executable).parent}:{path}:/usr/local/cuda/bin"
    environment |= {
        "PYTHONPATH": os.pathsep.join(
            [
                str(KIT / "site"),
                str(KIT / "tests/python"),
                str(KIT / "benchmarks"),
                f"{scratch}/site-packages",
                f"{scratch}/site-packages/nvidia_cutlass_dsl/dsl_packages",
            ]
        ),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONNOUSERSITE": "1",
        "HF_HUB_OFFLINE": "1",
        # Compilers of kernels keep what they make below these.
        "HOME": scratch,
        "TMPDIR": scratch,
        "XDG_CACHE_HOME": scratch,
        "TILELOSS_TEST_DEVICE": "gpu",
        # TRL and peft are not everywhere, and one GPU is enough.
        "TILELOSS_TEST_NOT_RUN": "fail: no trl, no peft, GPUs than 2",
        "OUTPUT": str(output),
    }
    # cuBLASLt for programs that load no torch: of the Python package, as torch has it.
    for folder in sys.path:
        for found in Path(folder).glob("nvidia/c*/lib/libcublasLt.so.1[23]"):
            environment["TILELOSS_CUBLASLT"] = str(found)
    return environment


def unpack_packages(folder: Path, *, with_quack: bool) -> None:
    """Those that the machine lacks: compressed, as they are large. QuACK looks for itself in `site-packages` alone."""
    quack = [KIT.with_name("kit-quack.tar.xz")] if with_quack else []
    for archive in (KIT / "peers.tar.xz", *quack):
        if archive.exists():
            with tarfile.open(archive) as peers:
                peers.extractall(folder, filter="data")


def stop(*_: object) -> None:
    """Of Ctrl-C and SIGTERM: what runs is ended, the results of the steps before are there."""
    for child in list(LIVE):
        os.killpg(child, signal.SIGKILL)
    os._exit(130)


def run(name: str, steps: list[Step], folder: Path) -> int:
    begin = time.monotonic()
    results = Results(folder)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        environment = child_environment(scratch, folder.resolve())
        unpack_packages(Path(scratch, "site-packages"), with_quack=name == "measure")
        device = device_name()
        facts = (KIT / "facts").read_text().strip()
        results.say(
            f"{name}: {facts}; {device or 'no device'}, {os.cpu_count()} CPUs, Python {sys.version.split()[0]}"
        )
        good = 0
        for step in steps:
            outcome = run_step(step, environment, begin + TOTAL_S, bool(device))
            results.add(step, outcome)
            good += all(r.is_good for r in outcome)
        results.say(
            f"{name}: {good} of {len(steps)} steps passed, {time.monotonic() - begin:.0f} s"
        )
    if good < len(steps):
        return 1
    return 0 if device else 3


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="run", description=(__doc__ or "").split("\n", maxsplit=1)[0]
    )
    parser.add_argument("what", choices=list(STEPS))
    parser.add_argument("folder", type=Path, nargs="?", default=Path("kit-results"))
    parser.add_argument("--only", metavar="STEP,STEP", help="these steps alone")
    options = parser.parse_args()
    steps = STEPS[options.what]()
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    if options.only:
        names = options.only.split(",")
        unknown = set(names) - {step.name for step in steps}
        if unknown:
            parser.error(
                f"--only: expected some of {', '.join(s.name for s in steps)}, got {', '.join(sorted(unknown))}"
            )
        steps = [step for step in steps if step.name in names]
    return run(options.what, steps, options.folder)


if __name__ == "__main__":
    sys.exit(main())
