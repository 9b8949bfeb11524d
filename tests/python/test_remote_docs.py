"""The commands of docs/users/remote.md, on the loopback host; those of SkyPilot are parsed (test_remote_sky.py)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from remote_host import NOT_RUN, Client, loopback_host

pytestmark = pytest.mark.skipif(bool(NOT_RUN), reason=NOT_RUN)

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", (ROOT / "docs/users/remote.md").read_text(), re.M | re.S)

# What the checkout of the documents has, as far as the commands go.
DEV = """#!/bin/sh
mkdir -p build/results build/release
echo '{}' >build/results/test.jsonl
printf '#!/bin/sh\\necho "{}"\\n' >build/release/tileloss
chmod +x build/release/tileloss
echo "dev $*"
"""


def test_the_documents_commands_run(tmp_path: Path) -> None:
    with loopback_host(tmp_path) as host:
        client = Client(tmp_path, host)
        client.commit(".gitignore", "/build/\n/results/\n")
        dev = client.repo / "dev"
        dev.write_text(DEV)
        dev.chmod(0o755)
        client.commit("other", "")
        client.commit("another", "")  # HEAD~1 has ./dev, too
        program = host.bin / "tileloss"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m tileloss "$@"\n')
        program.chmod(0o755)
        ours = [block for block in BLOCKS if "tileloss remote" in block]
        assert len(ours) == 2
        end = 'for each in $(tileloss remote list | cut -d" " -f1); do tileloss remote follow $each; done\n'
        done = subprocess.run(
            ["bash", "-e", "-x", "-c", "".join(ours) + end],
            cwd=client.repo,
            env={**client.environment, "WANDB_API_KEY": "a-key"},
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.startswith("dev test\n")
        assert "dev test cpp -R api/avx512\n" in done.stdout and "dev test python\n" in done.stdout
        results = client.repo / "results"
        assert (results / "status").read_text() == "0\n"
        assert (results / "tree" / "build" / "results" / "test.jsonl").read_text() == "{}\n"
        (bench,) = (host.home / "scratch" / "tileloss").rglob("bench.jsonl")
        assert bench.read_text() == "{}\n"
