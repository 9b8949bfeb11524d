"""`tileloss remote`: a commit of a checkout, run on another machine that ssh reaches. The run outlives the connection; its log is
followed, its results are fetched."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tileloss.check import arguments
from tileloss.check.remote import scripts, state
from tileloss.check.remote.git import Checkout
from tileloss.check.remote.ssh import ConnectionLost, Host, call

_DEFAULT_COMMAND = ["./dev", "test"]


class _Parser(argparse.ArgumentParser):
    """What follows the first `--` is the command, word for word."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        end = words.index("--") if "--" in words else len(words)
        parsed, rest = super().parse_known_args(words[:end], namespace)
        parsed.command = words[end + 1 :]
        return parsed, rest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION", parser_class=_Parser)

    start = _action(actions, "start", _start, "run a commit there; prints the run's id")
    start.usage = "tileloss remote start HOST [OPTION...] [-- COMMAND...]   (default: ./dev test)"
    start.add_argument("host", metavar="HOST", help="what ssh calls it: host, user@host, ...")
    start.add_argument(
        "--repo", type=Path, default=Path(), help="a git checkout; default: the one around here"
    )
    start.add_argument("--commit", default="HEAD", help="of that checkout; default: HEAD")
    start.add_argument(
        "--dir",
        default="tileloss-remote",
        metavar="REMOTE_DIR",
        help="the folder there; a relative one starts at the home folder; default: %(default)s",
    )
    secret = "a variable of the environment here that the command gets there"
    arguments.repeatable(start, "--secret", "NAME", secret)
    arguments.repeatable(start, "--ssh-option", "NAME=VALUE", "as ssh -o: Port=2222")
    arguments.quiet(start, "print the id alone")

    follow = _action(actions, "follow", _follow, "the log, to the run's end; exits with its code")
    follow.add_argument(
        "--all", action="store_true", help="from the log's beginning, not from where it was left"
    )
    _add_seconds(follow, "--retry-for", 3600, "how long to try after the connection was lost")
    arguments.quiet(follow, "say nothing of lost connections")

    status = _action(actions, "status", _status, "running, ended or lost")
    status.add_argument("--json", action="store_true", help="one JSON object")

    fetch = _action(actions, "fetch", _fetch, "log, exit code and results")
    fetch.add_argument(
        "-o", "--output", required=True, type=Path, metavar="DIR", help="made where it is missing"
    )
    path = "a file or folder of the run's tree besides *.jsonl and *report*.html"
    arguments.repeatable(fetch, "--path", "PATH", path)

    stop = _action(actions, "stop", _stop, "end the run's processes: TERM, then KILL")
    _add_seconds(stop, "--grace", 10, "between the two")

    _action(actions, "remove", _remove, "delete an ended run's folder there, and its id")

    listing = _action(actions, "list", _list, "the runs that were started from this machine")
    listing.add_argument("--json", action="store_true", help="one JSON object a line")


def run(program: Path, options: argparse.Namespace) -> int:
    """The exit code: of ``follow`` the run's."""
    if options.command and options.action is not _start:
        raise ValueError(f"expected no command, got -- {shlex.join(options.command)}")
    code: int = options.action(options)
    return code


def _action(actions: Any, name: str, action: Any, summary: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=summary, description=summary, allow_abbrev=False
    )
    parser.set_defaults(action=action)
    if name not in ("start", "list"):
        parser.add_argument("id", metavar="ID", help="what start printed")
    return parser


def _add_seconds(parser: argparse.ArgumentParser, flag: str, default: int, summary: str) -> None:
    summary += "; default: %(default)s"
    parser.add_argument(flag, type=_seconds, default=default, metavar="SECONDS", help=summary)


def _seconds(text: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", text):
        raise argparse.ArgumentTypeError(f"expected whole seconds from 0 on, got {text!r}")
    return int(text)


def _start(options: argparse.Namespace) -> int:
    exports = _values(options.secret)
    host = Host(_host(options.host), tuple(options.ssh_option), tuple(exports))
    folder = _remote_folder(options.dir)
    command = options.command or _DEFAULT_COMMAND
    checkout = Checkout(options.repo, host.secrets)
    commit = checkout.commit(options.commit)
    now = datetime.now(UTC)
    run_id = state.new_id(now)

    directory, *there = call(host, scripts.PREPARE, folder).splitlines()
    known = checkout.known(there)
    if not checkout.is_part_of(commit, known):
        with checkout.bundle(commit, known) as bundle:
            size = os.fstat(bundle.fileno()).st_size
            _say(options, f"sending {commit[:12]} to {host.name}, {size / 1e6:.1f} MB")
            call(host, scripts.RECEIVE, directory, run_id, commit, data=bundle)
    run = state.Run(
        id=run_id,
        host=host.name,
        ssh_options=options.ssh_option,
        directory=directory,
        commit=commit,
        command=command,
        secrets=options.secret,
        started=now.isoformat(timespec="seconds"),
    )
    names = " ".join(exports)
    # Before it starts: a run whose connection is lost here can be found.
    state.save(run)
    try:
        call(
            host,
            scripts.START,
            directory,
            run_id,
            commit,
            scripts.LEADER,
            names,
            *command,
            exports=exports,
        )
    except ConnectionLost as error:
        raise OSError(f"{error}; it may have started: tileloss remote status {run_id}") from None
    except (ValueError, OSError):
        state.forget(run)
        raise
    _say(options, f"started {shlex.join(command)}; its log: tileloss remote follow {run_id}")
    print(run_id)
    return 0


def _follow(options: argparse.Namespace) -> int:
    from tileloss.check.remote.follow import follow

    try:
        return follow(
            state.load(options.id),
            from_start=options.all,
            retry_for=options.retry_for,
            quiet=options.quiet,
        )
    except BrokenPipeError:  # who read the log has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _status(options: argparse.Namespace) -> int:
    run = state.load(options.id)
    return _print_status(
        run, call(run.connection(), scripts.STATUS, run.directory, run.id), options.json
    )


def _stop(options: argparse.Namespace) -> int:
    run = state.load(options.id)
    script = scripts.STOP + scripts.STATUS
    answer = call(run.connection(), script, run.directory, run.id, str(options.grace))
    return _print_status(run, answer, as_json=False)


def _fetch(options: argparse.Namespace) -> int:
    from tileloss.check.remote.fetch import fetch

    run = state.load(options.id)
    for path in options.path:
        if path.startswith("/") or ".." in path.split("/") or not path:
            raise ValueError(f"--path: expected a path in the run's tree, got {path!r}")
    for file in fetch(run, options.path, options.output):
        print(file)
    return 0


def _remove(options: argparse.Namespace) -> int:
    run = state.load(options.id)
    call(run.connection(), scripts.REMOVE, run.directory, run.id)
    state.forget(run)
    return 0


def _list(options: argparse.Namespace) -> int:
    for run in state.load_all():
        if options.json:
            line = {
                name: getattr(run, name) for name in ("id", "host", "commit", "command", "started")
            }
            print(json.dumps(line))
        else:
            print(f"{run.id}  {run.host}  {run.commit[:12]}  {shlex.join(run.command)}")
    return 0


def _print_status(run: state.Run, answer: str, as_json: bool) -> int:
    word, code, size, seconds = answer.split()
    exit_code = None if code == "-" else int(code)
    if as_json:
        line = {"id": run.id, "host": run.host, "commit": run.commit, "command": run.command}
        numbers = {"exit_code": exit_code, "seconds": int(seconds), "log_bytes": int(size)}
        print(json.dumps({**line, "started": run.started, "state": word, **numbers}))
    else:
        ended = "" if exit_code is None else f", exit code {exit_code}"
        print(f"{run.id} on {run.host}: {word}{ended}, {seconds} s, {size} bytes of log")
    return 0


def _say(options: argparse.Namespace, text: str) -> None:
    if not options.quiet:
        print(f"tileloss: {text}", file=sys.stderr)


def _values(names: Sequence[str]) -> dict[str, str]:
    for name in names:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(
                "--secret: expected the name of a variable, its value never, got something else"
            )
        if name not in os.environ:
            raise ValueError(f"--secret: expected a variable that is set here, got {name}")
    return {name: os.environ[name] for name in names}


def _host(name: str) -> str:
    if not name or name.startswith("-") or not name.isprintable() or " " in name:
        raise ValueError(
            f"HOST: expected a name for ssh, without spaces or a - in front, got {name!r}"
        )
    return name


def _remote_folder(name: str) -> str:
    """`~/`, which the shell there does not see, is where it begins anyway."""
    folder = name.removeprefix("~/") or "."
    if folder.startswith("~") or "\n" in folder:
        raise ValueError(
            f"--dir: expected a folder, relative to the home folder there or absolute, got {name!r}"
        )
    return folder
