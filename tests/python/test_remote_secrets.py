"""The command gets the secret; nothing else does: no file, list of processes, bundle, log or other child, here or there."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from remote_host import NOT_RUN, Client, LoopbackHost, loopback_host

pytestmark = pytest.mark.skipif(bool(NOT_RUN), reason=NOT_RUN)

# It waits until it has been looked for in the list of processes.
COMMAND = """
printf %s "$WANDB_API_KEY" | sha256sum
printf %s "$OTHER" | sha256sum
env | grep -c "^NOT_ASKED_FOR=" || true
touch run.jsonl started
until [ -e seen ]; do sleep 0.05; done
"""


@pytest.fixture
def host(tmp_path: Path) -> Iterator[LoopbackHost]:
    (tmp_path / "host").mkdir()
    with loopback_host(tmp_path / "host") as started:
        yield started


def spy(folder: Path, tool: str, into: Path) -> None:
    """A ``tool`` that writes down its arguments and its environment, then is the real one."""
    real = shutil.which(tool)
    assert real
    folder.mkdir(exist_ok=True)
    into.mkdir(exist_ok=True)
    path = folder / tool
    path.write_text(f'#!/bin/sh\n{{ echo "$*"; env; }} >>"{into}/{tool}.$$"\nexec {real} "$@"\n')
    path.chmod(0o755)


class Watch(threading.Thread):
    """The command lines of all processes, again and again."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: set[bytes] = set()
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.is_set():
            for entry in Path("/proc").iterdir():
                try:
                    self.seen.add((entry / "cmdline").read_bytes())
                except OSError:
                    continue


def files_with(folder: Path, text: str) -> list[Path]:
    return [
        each
        for each in folder.rglob("*")
        if each.is_file() and not each.is_symlink() and text.encode() in each.read_bytes()
    ]


def test_only_the_command_gets_a_secret(host: LoopbackHost, tmp_path: Path) -> None:
    client = Client(tmp_path, host)
    canary = f"canary-{secrets.token_hex(8)} it's \\"
    for tool in ("git", "mv", "mkdir", "tar", "setsid"):
        spy(tmp_path / "there", tool, tmp_path / "spied-there")
    spy(host.bin, "git", tmp_path / "spied")
    host.write_ssh(f'{{ echo "$*"; env; }} >>"{tmp_path}/spied/ssh.$$"')
    path = f"{tmp_path / 'there'}:{os.environ['PATH']}"
    host.restart(SetEnv=f"HOME={host.home} PATH={path}", LogLevel="DEBUG3")
    client.environment |= {
        "WANDB_API_KEY": canary,
        "OTHER": f"two\nlines of {canary}",
        "NOT_ASKED_FOR": "1",
        "TMPDIR": str(tmp_path),
    }

    watch = Watch()
    watch.start()
    try:
        run = client.shell(COMMAND, ["--secret=WANDB_API_KEY", "--secret", "OTHER"])
        client("status", run)
        (client.run_folder(run) / "tree" / "seen").touch()
        log = client("follow", run).stdout
        client("fetch", run, "-o", str(tmp_path / "output"), "--path=started")
        client("stop", run)
    finally:
        watch.done.set()
        watch.join()

    digests = [
        hashlib.sha256(client.environment[name].encode()).hexdigest()
        for name in ("WANDB_API_KEY", "OTHER")
    ]
    assert log.splitlines() == [f"{digests[0]}  -", f"{digests[1]}  -", "0"]
    secret = canary.split()[0]
    assert any(
        run.encode() in line for line in watch.seen
    )  # the leader's: the watch did see the run
    assert not [line for line in watch.seen if secret.encode() in line]
    spied = [each.name.split(".")[0] for each in tmp_path.glob("spied*/*")]
    assert {"git", "ssh", "mv", "mkdir", "tar"} <= set(spied)
    # The one child that is to have it: it becomes the command's leader.
    (leader,) = files_with(tmp_path, secret)
    assert leader.name.startswith("setsid.")
    assert leader.read_text().splitlines()[0].count(secret) == 0


def test_the_key_is_kept_from_ssh_where_nobody_asks_for_it(
    host: LoopbackHost, tmp_path: Path
) -> None:
    client = Client(tmp_path, host)
    client.environment |= {"WANDB_API_KEY": "canary-2", "ASKED_FOR": "canary-3"}
    spied = tmp_path / "spied"
    spied.mkdir()
    host.write_ssh(f'env >>"{spied}/ssh.$$"')
    run = client.shell("true", ["--secret=ASKED_FOR"])
    client("follow", run)
    client("status", run)
    assert len(list(spied.iterdir())) == 5
    assert files_with(tmp_path, "canary-") == []


def test_an_existing_variable_there_does_not_carry_it(host: LoopbackHost, tmp_path: Path) -> None:
    """A variable that the machine exports already is the command's alone to be replaced."""
    client = Client(tmp_path, host)
    client.environment["KEY"] = "canary-4"
    spy(tmp_path / "there", "git", tmp_path / "spied-there")
    path = f"{tmp_path / 'there'}:{os.environ['PATH']}"
    host.restart(SetEnv=f"HOME={host.home} PATH={path} KEY=theirs")
    run = client.shell('[ "$KEY" = canary-4 ]', ["--secret=KEY"])
    assert client("follow", run).stdout == ""
    assert files_with(tmp_path, "KEY=theirs")
    assert files_with(tmp_path, "=canary-4") == []
