"""The commit that `tileloss remote start` sends, and the bundle that it travels in."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tileloss.check.remote.ssh import environment_without

_LISTED = 10


class _GitError(OSError):
    pass


class Checkout:
    """A git checkout on this machine."""

    def __init__(self, folder: Path, secrets: Sequence[str] = ()) -> None:
        """``secrets``: variables that git does not get to see. Raises ValueError where ``folder`` is in no checkout."""
        self._environment = environment_without(secrets)
        self.top = folder
        if not folder.is_dir():
            raise ValueError(f"--repo: expected a folder, got {folder}")
        try:
            top = self._git("rev-parse", "--show-toplevel")
        except _GitError as error:
            raise ValueError(f"--repo: expected a git checkout, got {folder}: {error}") from None
        self.top = Path(top.removesuffix("\n"))
        if self._git("rev-parse", "--is-shallow-repository").strip() == "true":
            raise ValueError(
                f"--repo: expected a checkout with its history, got the shallow {self.top}: git fetch --unshallow"
            )

    def commit(self, revision: str) -> str:
        """Its hash. Raises ValueError where there is no such commit, or the tree has changes that are in none."""
        try:
            commit = self._git(
                "rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}"
            )
        except _GitError:
            raise ValueError(
                f"--commit: expected a commit of {self.top}, got {revision!r}"
            ) from None
        if changes := self._changes():
            more = f" and {len(changes) - _LISTED} more" if len(changes) > _LISTED else ""
            raise ValueError(
                f"--repo: expected a tree without changes, as commits are sent; {self.top} has "
                f"{', '.join(changes[:_LISTED])}{more}: commit, stash or ignore them"
            )
        return commit.strip()

    def _changes(self) -> list[str]:
        listing = self._git(
            "--no-optional-locks",
            "status",
            "--porcelain",
            "-z",
            "--no-renames",
            "--untracked-files",
        )
        return [" ".join(entry.split()) for entry in listing.split("\0") if entry]

    def known(self, commits: Iterable[str]) -> list[str]:
        """Those that are here, too."""
        return [each for each in commits if self._has(each)]

    def is_part_of(self, commit: str, known: Sequence[str]) -> bool:
        """Whether the commit is one of ``known`` or of their history."""
        return not self._git("rev-list", "--max-count=1", commit, "--not", *known)

    @contextmanager
    def bundle(self, commit: str, known: Sequence[str]) -> Iterator[IO[bytes]]:
        """A bundle whose refs/heads/run is the commit, without the history of ``known``.

        A bundle needs a reference: it is made in a repository of its own, on top of this one's objects.
        """
        objects = self._git("rev-parse", "--path-format=absolute", "--git-path", "objects")
        with tempfile.TemporaryDirectory(prefix="tileloss-") as name:
            bare, file = Path(name) / "repo.git", Path(name) / "bundle"
            self._git("init", "--quiet", "--bare", str(bare))
            (bare / "objects" / "info" / "alternates").write_text(objects)
            here = f"--git-dir={bare}"
            self._git(here, "update-ref", "refs/heads/run", commit)
            without = [f"^{each}" for each in known]
            self._git(here, "bundle", "create", "--quiet", str(file), "refs/heads/run", *without)
            with open(file, "rb") as opened:
                yield opened

    def _has(self, commit: str) -> bool:
        try:
            self._git("cat-file", "-e", f"{commit}^{{commit}}")
        except _GitError:
            return False
        return True

    def _git(self, *arguments: str) -> str:
        """What it prints. Raises _GitError with git's own words."""
        try:
            done = subprocess.run(
                ["git", *arguments],
                cwd=self.top,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="surrogateescape",
                check=False,
            )
        except FileNotFoundError:
            raise OSError("git is not installed here") from None
        if done.returncode:
            raise _GitError(" ".join(done.stderr.split()) or f"git ended with {done.returncode}")
        return done.stdout
