"""remote/run.sh against an sshd of this user's on the loopback address, with a key and settings of its own."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SSHD = shutil.which("sshd", path=os.defpath + ":/usr/sbin:/sbin")
NOT_RUN = "" if SSHD and shutil.which("ssh") else "NOT RUN: there is no sshd"
pytestmark = pytest.mark.skipif(bool(NOT_RUN), reason=NOT_RUN)
PATIENCE_S = 300  # a busy machine takes its time; nothing waits so long where all is well


class Host:
    """`build-host`: the home folder there, and a checkout here. Tools in ``here`` and ``there`` go before the system's."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home, self.repo = folder, folder / "home", folder / "a checkout"
        for name in ("home", "here", "there", "spied", "a checkout/remote"):
            (folder / name).mkdir(parents=True)
        subprocess.run(["ssh-keygen", "-qt", "ed25519", "-N", "", "-f", folder / "key"], check=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        (folder / "known").write_text(f"[127.0.0.1]:{self.port} {(folder / 'key.pub').read_text()}")
        (folder / "ssh_config").write_text(
            f"Host build-host\nHostName 127.0.0.1\nPort {self.port}\nIdentityFile {folder}/key\n"
            f"IdentitiesOnly yes\nUserKnownHostsFile {folder}/known\nStrictHostKeyChecking yes\n"
        )
        self.tool("here/ssh", f'exec {shutil.which("ssh")} -F "{folder}/ssh_config" "$@"')
        self.environment = {**os.environ, "PATH": f"{folder}/here:{os.environ['PATH']}"}
        shutil.copy(ROOT / "remote/run.sh", self.repo / "remote")
        self.git("init", "--quiet")
        self.commit(".gitignore", "/build/\n")
        self.start()

    def tool(self, path: str, script: str) -> None:
        (self.folder / path).write_text(f"#!/bin/sh\n{script}\n")
        (self.folder / path).chmod(0o755)

    def start(self, log_level: str = "INFO") -> None:
        """Returns when it listens."""
        there = f'cd \'{self.home}\'; export HOME="$PWD" KEY=old PATH={self.folder}/there:"$PATH"'
        config = (
            f"ListenAddress 127.0.0.1\nPort {self.port}\nHostKey {self.folder}/key\nStrictModes no\nUsePAM no\n"
            f"AuthorizedKeysFile {self.folder}/key.pub\nPidFile none\nMaxStartups 100\nLogLevel {log_level}\n"
            f'ForceCommand {there}; eval "$SSH_ORIGINAL_COMMAND"\n'
        )
        (self.folder / "sshd_config").write_text(config)
        command = [str(SSHD), "-f", str(self.folder / "sshd_config")]
        # Since 9.8 a client whose connections end as ours do is refused for a while.
        penalties = "-oPerSourcePenalties=no"
        known = subprocess.run([*command, "-t", penalties], capture_output=True).returncode == 0
        command += [penalties] * known
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # root's sshd wants it
        log = self.folder / "sshd.log"
        with log.open("wb") as file:
            self.server = subprocess.Popen([*command, "-D", "-e"], stderr=file)
        wait_until(lambda: "Server listening" in log.read_text())

    def cut(self, *, stop: bool = False) -> None:
        """Ends every connection, as a network that is gone does, and with ``stop`` takes no new ones."""
        sessions = [each for each in below(self.server.pid) if "sshd" in read(f"/proc/{each}/comm")]
        if stop:
            self.server.terminate()
            self.server.wait()
        kill(sessions)

    def git(self, *words: str) -> str:
        command = ["git", "-C", str(self.repo), "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def commit(self, name: str, content: str) -> str:
        self.tool(f"{self.repo.name}/{name}", content)
        self.git("add", "--all")
        self.git("-c", "commit.gpgsign=false", "commit", "--quiet", "--message=change")
        return self.git("rev-parse", "HEAD")

    def run(self, *command: str) -> subprocess.Popen[str]:
        both = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, cwd=self.repo, env=self.environment, text=True, **both)

    def __call__(self, *words: str, code: int = 0) -> tuple[str, str]:
        """What it prints and what it says."""
        with self.run("remote/run.sh", "build-host", *words) as process:
            out, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == code, (words, process.returncode, out, err)
        return out, err

    def detached(self, script: str) -> tuple[str, Path]:
        """A run's ID, and its folder there."""
        run = self("-n", "--", "sh", "-c", script)[0].strip()
        return run, self.home / "tileloss-remote/runs" / run


def read(path: str | Path) -> str:
    """Empty where the process is gone."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def below(process: int) -> list[int]:
    children = read(f"/proc/{process}/task/{process}/children").split()
    return [each for child in map(int, children) for each in (child, *below(child))]


def processes_of(run: str) -> list[int]:
    mark, environs = f"TILELOSS_REMOTE_RUN={run}\0", Path("/proc").glob("[0-9]*/environ")
    return [int(each.parent.name) for each in environs if mark in read(each)]


def kill(processes: list[int]) -> None:
    subprocess.run(["kill", "-KILL", *map(str, processes)], capture_output=True)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    started = Host(tmp_path)
    yield started
    started.cut(stop=True)
    for run in started.home.glob("*/runs/*"):  # of a test that failed
        kill(processes_of(run.name))


WORDS = 'a b|it\'s|"$HOME" `id`||\\n\\\\|two\nlines\n|--|-x|*|é€|!x; :'.split("|")
HOSTILE = "a \n'b"
MAKE = f"""git rev-parse HEAD; tail -n 1 version; git status --porcelain; printf '<%s>' "$@"
mkdir -p "{HOSTILE}"; echo x >"{HOSTILE}/-f"; ln -s /etc/passwd "{HOSTILE}/l"
echo y >r.jsonl; ln r.jsonl report.html; touch other; exit 5"""


def test_a_run_is_the_commit_and_its_files_come_back(host: Host) -> None:
    first = host.commit("version", "one")
    host.commit("version", "two")
    options = ["-c", "HEAD~1", "-d", 'it\'s a "folder" of $HOME', "-p", HOSTILE, "-o", "build/o p"]
    out, err = host(*options, "--", "sh", "-c", MAKE, "sh", *WORDS, code=5)
    assert out == f"{first}\none\n" + "".join(f"<{word}>" for word in WORDS)
    (folder,) = (host.repo / "build/o p").iterdir()
    said = [f"{first} on build-host: remote/run.sh build-host -f {folder.name}"]
    said += [f"exit code 5; files in build/o p/{folder.name}"]
    assert err.splitlines() == [f"remote/run.sh: {each}" for each in said]
    files = {str(each.relative_to(folder)): each for each in folder.rglob("*") if not each.is_dir()}
    made = {"tree/r.jsonl", "tree/report.html", f"tree/{HOSTILE}/-f"}
    assert set(files) == {"log", "status", *made}
    assert files["log"].read_text() == out and files["tree/report.html"].read_text() == "y\n"


# It waits until it has been looked for in the list of processes.
ASKED = """printf %s "$KEY$WANDB_API_KEY" | sha256sum; env | grep -c NOT_ASKED_FOR
touch run.jsonl started; until [ -e seen ]; do sleep 0.05; done"""


def test_only_the_command_gets_a_secret(host: Host) -> None:
    secrets = {"KEY": "canary-1 it's \\ \n$x", "WANDB_API_KEY": "canary-2", "NOT_ASKED_FOR": "3"}
    host.environment |= secrets | {"HF_TOKEN": "canary-3", "exports": "", "value": "", "words": ""}
    tools = (
        "here/git here/ssh here/tee here/tar there/git there/mkdir there/tail there/cat there/tar"
    )
    for (
        tool
    ) in tools.split():  # each writes down its arguments and environment, then is the real one
        real = read(host.folder / tool) or f'exec {shutil.which(Path(tool).name)} "$@"'
        into = f"{host.folder}/spied/{tool.replace('/', '-')}"
        host.tool(tool, f'{{ echo "$*"; env; }} >>"{into}"\n{real}')
    host.cut(stop=True)
    host.start("DEBUG3")
    words = ["-s", "KEY", "-s", "WANDB_API_KEY", "--", "sh", "-c", ASKED]
    with host.run("remote/run.sh", "build-host", *words) as process:
        wait_until(lambda: list(host.home.rglob("started")))
        lists = [read(each) for each in Path("/proc").glob("[0-9]*/cmdline")]
        next(host.home.rglob("started")).with_name("seen").touch()
        out, err = process.communicate(timeout=PATIENCE_S)
    digest = hashlib.sha256((secrets["KEY"] + secrets["WANDB_API_KEY"]).encode()).hexdigest()
    assert out == f"{digest}  -\n0\n" and process.returncode == 0
    assert any("trap : TERM" in line for line in lists)
    assert not [line for line in (*lists, err) if "canary" in line]
    assert len(list((host.folder / "spied").iterdir())) == len(tools.split())
    files = [each for each in host.folder.rglob("*") if each.is_file()]
    assert not [each for each in files if b"canary" in each.read_bytes()]


# In three parts, each of which waits for its file: however slow the machine is, it does not end before its connections are cut.
COUNT = """i=0
for part in 1 2 3; do
  while [ $i -lt $((part * 100)) ]; do i=$((i + 1)); echo line $i; sleep 0.01; done
  until [ -e part$part ]; do sleep 0.05; done
done; exit 7"""


def test_a_cut_connection_loses_and_repeats_nothing(host: Host) -> None:
    run, folder = host.detached(COUNT)
    log = host.repo / f"build/remote/{run}/log"
    with host.run("remote/run.sh", "build-host", "-f", run) as following:
        assert following.stderr is not None
        wait_until(lambda: read(log))
        host.cut()
        (folder / "tree/part1").touch()
        wait_until(lambda: "line 101\n" in read(log))
        host.cut(stop=True)
        (folder / "tree/part2").touch()
        wait_until(lambda: "no connection; again in 1 s" in following.stderr.readline())
        wait_until(lambda: "Connection refused" in following.stderr.readline())
        host.start()
        (folder / "tree/part3").touch()
        out = following.communicate(timeout=PATIENCE_S)[0]
    assert following.returncode == 7
    assert out == read(log) == "".join(f"line {i}\n" for i in range(1, 301))
    assert host("-f", run, code=7)[0] == ""  # goes on where it was left


def test_stop_ends_every_process(host: Host) -> None:
    """One that ignores TERM, in a session of its own, among them. The exit code is the command's."""
    other = "setsid sh -c \"trap '' TERM; echo up; exec sleep 1000\" &"
    run, _ = host.detached(f"{other} trap 'exit 9' TERM; while :; do sleep 0.1; done")
    with host.run("remote/run.sh", "build-host", "-f", run) as reader:
        assert reader.stdout is not None and reader.stdout.readline() == "up\n"
        reader.stdout.close()  # who reads the log may leave
        assert len(processes_of(run)) >= 3
        host("-k", run)
    assert processes_of(run) == []
    host("-f", run, code=9)
    assert "can't cd" in host("-k", "none", code=3)[1]


def test_a_run_that_vanished_and_a_disk_that_is_full(host: Host) -> None:
    run, _ = host.detached("exec sleep 1000")
    kill(processes_of(run))
    assert "the run is gone without an exit code" in host("-f", run, code=3)[1]
    run, folder = host.detached("until [ -e ../probe ]; do sleep 0.05; done; exit 7")
    (folder / "probe").symlink_to("/dev/full")
    assert "the disk there is full: the log may be cut" in host("-f", run, code=7)[1]


def test_what_is_refused(host: Host) -> None:
    for words in ("-c nothing", "-c --all", "-s NOT_SET", "-s KEY=in-argv", "-x", "-f"):
        said = host(*words.split(), code=2)[1]
        expected = {"-c": "-c: expected a commit", "-s": "-s: expected the name of a variable"}
        assert expected.get(words[:2], "") in said and "in-argv" not in said
    for name in ("", "a b", "a/b", "a:b", "-oProxyCommand=x", "--help"):
        with host.run("remote/run.sh", name) as process:
            assert "remote/run.sh HOST" in process.communicate()[1] and process.returncode == 2
    (host.repo / "new \n file").touch()
    assert '?? "new \\n file"' in host(code=2)[1]
    (host.repo / "new \n file").unlink()
    host.cut(stop=True)
    assert "Connection refused" in host(code=3)[1]
    assert not list(host.home.iterdir())


def test_a_hostile_machine_writes_nothing_elsewhere(host: Host) -> None:
    names = ["../escaped", f"{host.folder}/absolute", "tree/../../up", "kept", "link/in", "status"]
    with tarfile.open(host.folder / "archive", "w") as made:
        for name in names:
            link, member = tarfile.TarInfo("link"), tarfile.TarInfo(name)
            link.type, link.linkname, member.size = tarfile.SYMTYPE, str(host.folder), 2
            made.addfile(link)
            made.addfile(member, BytesIO(b"0\n"))
    host.tool("there/tar", f'cat "{host.folder}/archive"')
    before = set(host.folder.iterdir())
    with host.run("remote/run.sh", "build-host", "--", "true") as process:
        process.communicate(timeout=PATIENCE_S)
    assert set(host.folder.iterdir()) == before
    assert {each.name for each in host.repo.iterdir()} == {".git", ".gitignore", "build", "remote"}
    came = list((host.repo / "build").rglob("*"))
    assert "kept" in {each.name for each in came} and not any(each.is_symlink() for each in came)


def test_half_a_script_does_nothing(tmp_path: Path) -> None:
    script = (ROOT / "remote/run.sh").read_text()
    text = f"secrets() {{ :\n}}\nset -- touch '{tmp_path}/done'\n{script}"
    for end in (*range(0, text.index('"$@" && exit'), 97), len(text)):
        subprocess.run(["sh"], input=text[:end], text=True, capture_output=True)
        assert (tmp_path / "done").exists() == (end == len(text)), text[:end]


def test_the_pages_commands_run(host: Host) -> None:
    """In a shallow checkout, whose ./dev makes what they name."""
    page = (ROOT / "docs/users/remote.md").read_text()
    (block,) = re.findall(r"^```sh\n(remote/run.sh .*?)^```$", page, re.M | re.S)
    host.commit("dev", "mkdir -p build/results; touch build/results/x; echo {}")
    host.commit("other", "")
    shallow = host.folder / "shallow"
    host.git("clone", "--quiet", "--depth=2", f"file://{host.repo}", str(shallow))
    host.repo, host.environment["WANDB_API_KEY"] = shallow, "a-key"
    with host.run("bash", "-exc", block) as process:
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, out + err
    assert "exit code 143\n" in out
    results = {each.name for each in (shallow / "build").rglob("*")}
    assert results >= {"x", "bench.jsonl"}
