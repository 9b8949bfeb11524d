"""`tileloss remote` against an sshd on the loopback address: from start to fetch, and across connections that are cut."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tarfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest

from remote_host import (
    NAME,
    NOT_RUN,
    PATIENCE_S,
    Client,
    LoopbackHost,
    loopback_host,
    processes_of,
    wait_until,
)
from tileloss.check.remote.fetch import _unpack
from tileloss.check.remote.ssh import _assemble

pytestmark = pytest.mark.skipif(bool(NOT_RUN), reason=NOT_RUN)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackHost]:
    with loopback_host(tmp_path_factory.mktemp("host")) as started:
        yield started


@pytest.fixture
def client(tmp_path: Path, host: LoopbackHost) -> Client:
    return Client(tmp_path, host)


def test_a_run_is_the_commit_and_its_files_come_back(client: Client, tmp_path: Path) -> None:
    first = client.git("rev-parse", "HEAD")
    client.commit("README", "two\n")
    made = "mkdir -p build/deep && echo '{}' >build/deep/r.jsonl && touch report.html other"
    link = "ln -s /etc/passwd build/link"
    printed = "git rev-parse HEAD; cat README; echo to stderr >&2; exit 5"
    run = client.shell(f"{made}; {link}; {printed}", [f"--commit={first}"])
    followed = client("follow", run, code=5)
    assert followed.stdout == f"{first}\none\nto stderr\n"
    assert followed.stderr == ""
    status = client.status(run)
    assert status["state"] == "ended" and status["exit_code"] == 5
    assert status["commit"] == first and status["log_bytes"] == len(followed.stdout)
    assert client("status", run).stdout.startswith(f"{run} on {NAME}: ended, exit code 5, ")

    output = tmp_path / "output" / "folder"
    fetched = client("fetch", run, "-o", str(output), "--path=build", "--path=other").stdout
    expected = {"log", "status", "tree/build/deep/r.jsonl", "tree/other", "tree/report.html"}
    files = {str(each.relative_to(output)) for each in output.rglob("*") if each.is_file()}
    assert files == expected
    assert {str(Path(line).relative_to(output)) for line in fetched.splitlines()} == expected
    assert (output / "log").read_text() == followed.stdout
    assert (output / "status").read_text() == "5\n"

    (line,) = client("list", "--json").stdout.splitlines()
    assert json.loads(line)["id"] == run
    assert client("list").stdout.startswith(f"{run}  {NAME}  {first[:12]}  sh -c ")
    client("remove", run)
    assert not client.run_folder(run).exists()
    assert client("list").stdout == ""


WORDS = ["a b", "it's", '"$HOME" `id`', "", "\\n\\\\", "two\nlines", "--", "-x", "*", "é€", "!x; :"]


def test_words_arrive_as_they_were_given(client: Client) -> None:
    run = client.start("printf", "<%s>", *WORDS)
    assert client("follow", run).stdout == "".join(f"<{word}>" for word in WORDS)
    assert client.run_folder(run).is_dir()


def test_ssh_options_and_the_default_command(
    client: Client, host: LoopbackHost, tmp_path: Path
) -> None:
    dev = client.repo / "dev"
    dev.write_text("#!/bin/sh\necho dev $*\n")
    dev.chmod(0o755)
    client.commit("other", "")
    options = [f"--ssh-option={name}={value}" for name, value in host.options()]
    client.environment["PATH"] = os.environ[
        "PATH"
    ]  # the system's ssh, which does not know the host
    run = client("start", "127.0.0.1", f"--dir={tmp_path}/there", *options).stdout.strip()
    assert client("follow", run).stdout == "dev test\n"


def test_only_what_is_not_there_is_sent(client: Client) -> None:
    def sent() -> float | None:
        answer = client("start", NAME, f"--dir={client.directory}", "--", "true").stderr
        _, found, rest = answer.partition(" sending ")
        return float(rest.splitlines()[0].split()[-2]) if found else None

    client.commit("large", os.urandom(150_000).hex())
    assert sent() == 0.2  # MB
    assert sent() is None
    commit = client.commit("small", "1")
    assert sent() == 0.0
    (folder,) = [
        each for each in (client.there / "runs").iterdir() if (each / "tree" / "small").exists()
    ]
    checked_out = ["git", "-C", folder / "tree", "rev-parse", "HEAD"]
    assert subprocess.run(checked_out, capture_output=True, text=True).stdout.strip() == commit
    client.git("checkout", "--quiet", "HEAD~1")  # a part of what is there
    assert sent() is None
    assert client.git("for-each-ref", "--format=%(refname)").startswith("refs/heads/")
    assert not list(client.there.glob("incoming-*"))


# ------------------------------------------------------------------------------------------------------- lost connections

# In three parts, each of which waits for its file: however slow the machine is, it does not end before its connections are cut.
COUNT = """i=0
for part in 1 2 3; do
  while [ $i -lt $((part * 100)) ]; do i=$((i + 1)); echo line $i; sleep 0.01; done
  until [ -e part$part ]; do sleep 0.05; done
done
exit 7"""
COUNTED = "".join(f"line {i}\n" for i in range(1, 301))


def follow_scripts(folder: Path) -> list[int]:
    """The processes at the other end of `follow`: they are in the run's folder, the run itself is below it."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if (entry / "cwd").readlink() == folder:
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_a_cut_connection_loses_and_repeats_nothing(
    client: Client, host: LoopbackHost, tmp_path: Path
) -> None:
    run = client.shell(COUNT)
    tree = client.run_folder(run) / "tree"
    log, errors = tmp_path / "followed", tmp_path / "errors"
    with open(log, "wb") as out, open(errors, "wb") as err:
        command = client.command("follow", run)
        following = subprocess.Popen(command, env=client.environment, stdout=out, stderr=err)
    try:
        wait_until(lambda: log.stat().st_size > 0)
        assert host.cut() > 0
        wait_until(lambda: "again in" in errors.read_text())
        (tree / "part1").touch()
        wait_until(lambda: "line 101\n" in log.read_text())
        host.stop(cut=True)
        (tree / "part2").touch()
        wait_until(lambda: "Connection refused" in errors.read_text())
        host.start()
        (tree / "part3").touch()
        assert following.wait(timeout=PATIENCE_S) == 7
    finally:
        following.kill()
        host.restart()
    assert log.read_text() == COUNTED
    assert client("follow", run, code=7).stdout == ""  # goes on where it was left
    assert client("follow", run, "--all", code=7).stdout == COUNTED


def test_follow_gives_up_when_told_to(client: Client, host: LoopbackHost) -> None:
    run = client.shell("echo ready; sleep 100")
    command = client.command("follow", run, "--retry-for=1", "--quiet")
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=client.environment, stdout=pipe, stderr=pipe) as following:
        assert following.stdout is not None and following.stderr is not None
        assert following.stdout.readline() == b"ready\n"
        host.stop(cut=True)
        try:
            assert following.wait(timeout=PATIENCE_S) == 3
            wait_until(lambda: not follow_scripts(client.run_folder(run)))
        finally:
            host.start()
        (line,) = following.stderr.read().decode().splitlines()
    assert "Connection refused" in line and f"follow {run}" in line
    client("stop", run)


def test_whoever_reads_the_log_may_leave(client: Client) -> None:
    run = client.shell("while :; do echo again; sleep 0.1; done")
    command = client.command("follow", run)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=client.environment, stdout=pipe, stderr=pipe) as following:
        assert following.stdout is not None and following.stderr is not None
        assert following.stdout.readline() == b"again\n"
        following.stdout.close()
        assert following.wait(timeout=PATIENCE_S) == 141
        assert following.stderr.read() == b""
    client("stop", run)


# ------------------------------------------------------------------------------------------------------------------- stop


def test_stop_ends_every_process(client: Client) -> None:
    elsewhere = "trap 'echo elsewhere; exit' TERM; while :; do sleep 0.1; done"
    run = client.shell(
        f"""trap 'echo bye; exit 9' TERM
        setsid sh -c "{elsewhere}" & echo up; while :; do sleep 0.1; done"""
    )
    folder = client.run_folder(run)
    wait_until(lambda: (folder / "log").read_text() == "up\n")
    leader = int((folder / "pid").read_text())
    assert os.getsid(leader) == os.getpgid(leader) == leader
    assert len(processes_of(run)) >= 3
    assert "is running" in client("remove", run, code=2).stderr
    assert ": ended, exit code 9, " in client("stop", run).stdout
    assert processes_of(run) == []
    log = client("follow", run, code=9).stdout.splitlines()
    assert {"up", "bye", "elsewhere"} <= set(log)  # and what the shell says of its children
    client("stop", run)  # there is nothing left to stop


def test_stop_kills_what_ignores_it(client: Client) -> None:
    run = client.shell("trap '' TERM; setsid sleep 1000 & echo up; while :; do sleep 0.1; done")
    wait_until(lambda: client.status(run)["log_bytes"] == 3)
    assert ": ended, exit code 137, " in client("stop", run, "--grace=0").stdout
    assert processes_of(run) == []


def test_a_run_that_vanished_is_lost(client: Client) -> None:
    run = client.shell("echo up; sleep 1000")
    log = client.run_folder(run) / "log"
    wait_until(lambda: log.read_text() == "up\n")
    for process in processes_of(run):
        os.kill(process, signal.SIGKILL)
    wait_until(lambda: not processes_of(run))
    status = client.status(run)
    assert status["state"] == "lost" and status["exit_code"] is None
    followed = client("follow", run, code=3)
    assert followed.stdout == "up\n" and "the run is gone without an exit code" in followed.stderr


# -------------------------------------------------------------------------------------------------------- its own protocol


def test_half_a_script_does_nothing(tmp_path: Path) -> None:
    script = f"touch '{tmp_path}/done'\n" + 20 * ": further on\n"
    text = _assemble(script, ["a", "b"], {"NAME": "value"}, "marker")
    for end in range(0, len(text) - 3, 7):
        subprocess.run(["sh", "-c", text[:end]], capture_output=True)
        assert not (tmp_path / "done").exists(), text[:end]
    subprocess.run(["sh", "-c", text], check=True, capture_output=True)
    assert (tmp_path / "done").exists()


def test_what_the_login_shell_prints_is_dropped(client: Client, host: LoopbackHost) -> None:
    host.restart(ForceCommand='printf "welcome\\nhome"; eval "$SSH_ORIGINAL_COMMAND"')
    try:
        run = client.shell("echo here")
        assert client("follow", run).stdout == "here\n"
        assert client.status(run)["exit_code"] == 0
    finally:
        host.restart()


def test_an_archive_writes_nothing_elsewhere(tmp_path: Path) -> None:
    archive, folder = tmp_path / "archive", tmp_path / "folder"
    folder.mkdir()
    with tarfile.open(archive, "w") as made:
        for name in ("../escaped", f"{tmp_path}/absolute", "tree/../../up", "tree/kept"):
            member = tarfile.TarInfo(name)
            member.size = 1
            made.addfile(member, BytesIO(b"x"))
        link = tarfile.TarInfo("tree/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        made.addfile(link)
    assert _unpack(archive, folder / ".new", folder) == [folder / "tree" / "kept"]
    assert {each.name for each in tmp_path.iterdir()} == {"archive", "folder"}
    assert [each.name for each in (folder / "tree").iterdir()] == ["kept"]
