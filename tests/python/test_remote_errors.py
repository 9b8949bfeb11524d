"""What `tileloss remote` refuses, and what it says when the other machine cannot: one line each, exit code 2 or 3."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from remote_host import NAME, NOT_RUN, Client, LoopbackHost, Said, loopback_host

pytestmark = pytest.mark.skipif(bool(NOT_RUN), reason=NOT_RUN)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackHost]:
    with loopback_host(tmp_path_factory.mktemp("host")) as started:
        yield started


@pytest.fixture
def client(tmp_path: Path, host: LoopbackHost) -> Client:
    return Client(tmp_path, host)


def line_of(done: Said) -> str:
    """All that it said."""
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("tileloss: ")
    return line.removeprefix("tileloss: ")


def refusal(client: Client, *arguments: str) -> str:
    return line_of(client(*arguments, code=2))


# ------------------------------------------------------------------------------------------------------- what was asked for


def test_a_tree_with_changes_is_refused(client: Client) -> None:
    (client.repo / "README").write_text("changed\n")
    for number in range(11):
        (client.repo / f"new {number:2}").write_text("")
    line = refusal(client, "start", NAME)
    assert line.startswith("--repo: expected a tree without changes, ")
    assert " has M README, ?? " in line and "new 8" in line and " and 2 more: commit" in line
    assert "new 9" not in line
    assert not client.there.exists()
    (client.repo / ".gitignore").write_text("/new*\n.gitignore\n")
    client.git("checkout", "README")
    client("start", NAME, f"--dir={client.directory}", "--", "true")


def test_what_is_no_checkout_is_refused(client: Client, tmp_path: Path) -> None:
    expected = "--repo: expected a folder, got /nowhere"
    assert refusal(client, "start", NAME, "--repo=/nowhere") == expected
    line = refusal(client, "start", NAME, "--repo=/")
    assert line.startswith("--repo: expected a git checkout, got /: fatal: not a git repository")
    bare = tmp_path / "bare"
    client.git("clone", "--quiet", "--bare", ".", str(bare))
    assert "must be run in a work tree" in refusal(client, "start", NAME, f"--repo={bare}")
    client.commit("a", "")
    shallow = tmp_path / "shallow"
    client.git("clone", "--quiet", "--depth=1", f"file://{client.repo}", str(shallow))
    assert "git fetch --unshallow" in refusal(client, "start", NAME, f"--repo={shallow}")


@pytest.mark.parametrize("revision", ["nothing", "--all", "HEAD~7", "f" * 40, ""])
def test_a_commit_that_is_not_there_is_refused(client: Client, revision: str) -> None:
    line = refusal(client, "start", NAME, f"--commit={revision}")
    assert line == f"--commit: expected a commit of {client.repo}, got {revision!r}"


@pytest.mark.parametrize("name", ["", "a host", "a\thost"])
def test_a_host_that_ssh_would_misread_is_refused(client: Client, name: str) -> None:
    assert refusal(client, "start", name).startswith("HOST: expected a name for ssh, ")


def test_a_host_is_no_option(client: Client, tmp_path: Path) -> None:
    spaced = f"-oProxyCommand=touch {tmp_path}/ran"  # argparse takes it for no option
    assert refusal(client, "start", spaced).startswith("HOST: expected a name for ssh, ")
    for arguments in (["-oPort=1"], ["--", "-oPort=1"], ["--", "--", spaced]):
        assert "tileloss remote start: error: " in client("start", *arguments, code=2).stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["~other/folder", "a\nb"])
def test_a_folder_that_a_shell_would_misread_is_refused(client: Client, name: str) -> None:
    assert refusal(client, "start", NAME, f"--dir={name}").startswith("--dir: expected a folder, ")


def test_a_secret_is_a_variable_that_is_set(client: Client) -> None:
    line = refusal(client, "start", NAME, "--secret=NOT_SET_ANYWHERE")
    assert line == "--secret: expected a variable that is set here, got NOT_SET_ANYWHERE"
    assert "value-in-argv" not in refusal(client, "start", NAME, "--secret=KEY=value-in-argv")


@pytest.mark.parametrize("run", ["20200101-000000-ffff", "../../etc/passwd", ""])
@pytest.mark.parametrize("action", [["follow"], ["status"], ["stop"], ["fetch", "-o", "x"]])
def test_an_unknown_run_is_refused(client: Client, action: list[str], run: str) -> None:
    line = refusal(client, *action, run)
    assert (
        line.startswith("ID: expected a run of ") and f"got {run!r}; `tileloss remote list`" in line
    )


def test_a_torn_state_file_is_named(client: Client) -> None:
    run = client.start("true")
    path = client.state / "tileloss" / "remote" / f"{run}.json"
    path.write_text(path.read_text()[:40])
    assert refusal(client, "status", run).startswith(f"ID: {path} is no run: ")


def test_a_command_belongs_to_start(client: Client) -> None:
    assert refusal(client, "list", "--", "ls") == "expected no command, got -- ls"
    assert "unrecognized arguments: ls" in client("start", NAME, "ls", code=2).stderr


def test_a_program_that_is_not_there_is_refused(client: Client) -> None:
    for name in ("./dev", "no such program"):
        start = ["start", NAME, f"--dir={client.directory}", "--quiet", "--", name]
        expected = f"{NAME}: COMMAND: expected a program that is there or in the commit, got {name}"
        assert refusal(client, *start) == expected
    assert not list((client.there / "runs").iterdir())
    assert client("list").stdout == ""


@pytest.mark.parametrize("seconds", ["-1", "1.5", "soon"])
def test_seconds_are_a_whole_number(client: Client, seconds: str) -> None:
    said = client("stop", "any", f"--grace={seconds}", code=2)
    assert f"argument --grace: expected whole seconds from 0 on, got '{seconds}'" in said.stderr


def test_what_fetch_cannot_bring_is_refused(client: Client, tmp_path: Path) -> None:
    run = client.shell("touch made")
    client("follow", run)
    output = tmp_path / "output"
    fetch = ["fetch", run, "-o", str(output)]
    for path in ("/etc/passwd", "../log", "a/../../log", ""):
        line = refusal(client, *fetch, f"--path={path}")
        assert line == f"--path: expected a path in the run's tree, got {path!r}"
    line = refusal(client, *fetch, "--path=made", "--path=not made")
    assert line == f"{NAME}: --path: expected a file or folder that the run has, got not made"
    assert list(output.iterdir()) == []
    output.rmdir()
    output.write_text("")
    assert refusal(client, *fetch) == f"-o: expected a folder, got {output}"


# ---------------------------------------------------------------------------------------------------------- the other machine


def failure(client: Client, *arguments: str) -> str:
    line = line_of(client(*arguments, code=3))
    assert line.startswith(f"{NAME}: ")
    return line


def test_a_host_that_is_not_there(client: Client, host: LoopbackHost) -> None:
    run = client.start("true")
    host.stop()
    try:
        for arguments in (["start", NAME], ["status", run], ["follow", run], ["stop", run]):
            assert "Connection refused" in failure(client, *arguments)
    finally:
        host.start()


def test_a_run_whose_folder_is_gone(client: Client) -> None:
    run = client.start("true")
    shutil.rmtree(client.run_folder(run))
    for action in ("status", "follow", "stop"):
        assert "the run's folder " in failure(client, action, run)
    client("remove", run)
    assert client("list").stdout == ""


@pytest.fixture
def path_there(host: LoopbackHost, tmp_path: Path) -> Iterator[Path]:
    """The only folder of PATH on the host. It has what the scripts need."""
    folder = tmp_path / "bin"
    folder.mkdir()
    tools = "sh dd git setsid grep sed tar cat mkdir mv rm sleep wc tail head date stat tr true"
    for tool in tools.split():
        found = shutil.which(tool)
        assert found
        (folder / tool).symlink_to(found)
    host.restart(SetEnv=f"HOME={host.home} PATH={folder}")
    yield folder
    host.restart()


@pytest.mark.parametrize("tool", ["git", "setsid"])
def test_a_tool_that_is_not_there(client: Client, path_there: Path, tool: str) -> None:
    client.start("true")
    (path_there / tool).unlink()
    assert f"there is no {tool}: it needs git, " in failure(client, "start", NAME)


def failing(path: Path, tool: str, when: str, message: str) -> None:
    real = (path / tool).resolve()
    (path / tool).unlink()
    (path / tool).write_text(
        f'#!/bin/sh\ncase "$*" in *{when}*) echo "{message}" >&2; exit 1;; esac\nexec {real} "$@"\n'
    )
    (path / tool).chmod(0o755)


FULL = "No space left on device"


@pytest.mark.parametrize(
    ("tool", "when"),
    [("cat", ""), ("git", "fetch"), ("git", "checkout"), ("git", "bare"), ("mkdir", "runs")],
)
def test_a_disk_that_is_full(client: Client, path_there: Path, tool: str, when: str) -> None:
    failing(path_there, tool, when, FULL)
    assert FULL in failure(client, "start", NAME, "--quiet", f"--dir={client.directory}")
    assert not list(client.there.glob("incoming-*"))
    assert not list(client.there.glob("runs/*"))
    assert client("list").stdout == ""


def test_a_disk_that_fills_up_is_told(client: Client) -> None:
    """A write to /dev/full fails as one to a full disk. The exit code has its place already."""
    run = client.shell("until [ -e ../full ]; do sleep 0.05; done; exit 7")
    for name in ("probe", "status.new"):
        (client.run_folder(run) / name).symlink_to("/dev/full")
    (client.run_folder(run) / "full").touch()
    expected = f"{NAME}: the disk there is full, the log may be cut: "
    for action in ("follow", "status"):
        error = client(action, run, code=7 if action == "follow" else 0).stderr
        assert error.startswith(f"tileloss: warning: {expected}") and FULL in error
        assert error.count("\n") == 1
    assert client.status(run)["exit_code"] == 7


def test_a_file_that_cannot_be_written(client: Client, host: LoopbackHost) -> None:
    """A real write that fails: the shell there may write 4 KB a file."""
    client.commit("large", os.urandom(50_000).hex())
    host.restart(ForceCommand="trap '' XFSZ; ulimit -f 8; eval \"$SSH_ORIGINAL_COMMAND\"")
    try:
        start = ["start", NAME, "--quiet", f"--dir={client.directory}"]
        assert "the commit could not be stored: cat: " in failure(client, *start)
    finally:
        host.restart()
    assert not list(client.there.glob("incoming-*"))


@pytest.mark.parametrize("missing", ["ssh", "git"])
def test_a_tool_that_is_not_here(client: Client, tmp_path: Path, missing: str) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in {"ssh", "git"} - {missing}:
        found = shutil.which(tool)
        assert found
        (folder / tool).symlink_to(found)
    client.environment["PATH"] = str(folder)
    assert line_of(client("start", NAME, code=3)).startswith(f"{missing} is not installed here")
