"""A run's files, from a tar archive that arrives as it is made."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from tileloss.check.files import naming, output_place
from tileloss.check.remote import state
from tileloss.check.remote.scripts import FETCH
from tileloss.check.remote.ssh import Script


def fetch(run: state.Run, paths: Sequence[str], folder: Path) -> list[Path]:
    """Log, status, results and ``paths`` of the tree, as they lie in the run's folder there. The files, in ``folder``.

    What was in ``folder`` is replaced only when all has arrived. Raises ConnectionLost, ValueError for a path that is not there.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"-o: expected a folder, got {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as name:
        arrived = Path(name)
        archive = arrived / "archive"
        script = Script(run.connection(), FETCH, run.directory, run.id, *paths)
        try:
            with naming(folder), open(archive, "wb") as file:
                for chunk in script.output():
                    file.write(chunk)
            script.finish()
        finally:
            script.kill()
        return _unpack(archive, arrived / "files", folder)


def _unpack(archive: Path, beside: Path, folder: Path) -> list[Path]:
    """Regular files alone: links and devices of a machine that may be anyone's are left out."""
    names = []
    with tarfile.open(archive, "r:") as members:
        for member in members:
            path = PurePosixPath(member.name)
            if not member.isreg() or path.is_absolute() or ".." in path.parts:
                continue
            target = beside / path
            target.parent.mkdir(parents=True, exist_ok=True)
            content = members.extractfile(member)
            assert content is not None
            with naming(folder), open(target, "wb") as file:
                shutil.copyfileobj(content, file)
            names.append(path)
    places = {path: output_place("-o", folder / path) for path in names}
    for path, final in places.items():
        final.parent.mkdir(parents=True, exist_ok=True)
        (beside / path).replace(final)
    return [folder / path for path in places]
