#!/usr/bin/env python3
"""Checks README.md, HACKING.md and docs/**/*.md against the tree. --root is the repository.

snippets         each code block under <!-- examples/FILE --> or <!-- configs/FILE --> is that file, letter for letter; each
                 example is shown
example PROGRAM NAME  PROGRAM prints the one block under <!-- output of NAME --> and exits 0
links            each relative link, and each path named with a folder we have, exists
dev-commands     each `./dev COMMAND` named anywhere is a command of ./dev
quick-commands   each line of each ```sh block runs and exits 0: the subcommands of `tileloss`, by ./dev or not, in this Python,
                 and the shell's own. Not the other commands of ./dev (those take minutes: dev-commands looks at their names,
                 continuous integration runs ./dev test itself), those that need another machine (tests/python/test_remote.py and
                 test_remote_sky.py) and those that change this one (tests/python/test_install.py does what pip install does)
self-test        each check above rejects a planted mistake
"""

import argparse
import functools
import os
import pathlib
import re
import subprocess
import sys
import tempfile

# Blocks may be indented (in a list); the marker comment is optional.
BLOCK = re.compile(
    r"(?:<!-- (?P<marker>[^\n]*?) -->\s*\n)?^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^ *```$",
    re.M | re.S,
)
TOOLS = "gradcheck|judge|bench|sweep|audit|report|info"
NEVER_RUN = ("git clone", "cd ", "sudo ", "apt-get ", "pip install ")
NEVER_RUN += ("build/kit/run ",)  # tests/python/test_kit.py
NEVER_RUN += ("remote/run.sh ", "run=$(remote/run.sh ", "ssh build-host ", "sky ")
# tests/python/test_audit_releases.py has releases of a package made for it.
NEVER_RUN += ("tileloss audit --versions ", "tileloss report liger.jsonl ")


def documents(root):
    return [
        path
        for path in (
            root / "README.md",
            root / "HACKING.md",
            *sorted((root / "docs").rglob("*.md")),
        )
        if path.is_file()
    ]


def blocks(text):
    return list(BLOCK.finditer(text))


def check_snippets(root):
    findings, shown = [], set()
    for document in documents(root):
        for block in blocks(document.read_text()):
            marker = block["marker"] or ""
            if not marker.startswith(("examples/", "configs/")):
                continue
            shown.add(marker)
            example = root / marker
            if not example.is_file():
                findings.append(f"{document.name} shows {marker}, which does not exist")
            elif example.read_text() != block["text"]:
                findings.append(f"{document.name}: the block of {marker} differs from the file")
    for example in sorted(
        path for path in (root / "examples").iterdir() if path.suffix in (".c", ".cpp", ".py")
    ):
        if f"examples/{example.name}" not in shown:
            findings.append(f"examples/{example.name} is shown nowhere")
    return findings


def check_example(root, program, name):
    marker = f"output of {name}"
    expected = [
        b["text"]
        for document in documents(root)
        for b in blocks(document.read_text())
        if b["marker"] == marker
    ]
    if len(expected) != 1:
        return [f"there are {len(expected)} blocks under <!-- {marker} -->, expected 1"]
    done = subprocess.run([program], capture_output=True, text=True)
    if done.returncode or done.stdout != expected[0]:
        return [
            f"{program} exited {done.returncode} and printed {done.stdout!r} {done.stderr!r}, the document says {expected[0]!r}"
        ]
    return []


def check_links(root):
    findings = []
    for document in documents(root):
        text = document.read_text()
        named = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
        named_here = [(document.parent / name, name) for name in named]
        folders = "src|include|tests|examples|configs|docs|benchmarks|frontends|remote"
        named_here += [
            (root / name, name) for name in re.findall(rf"`((?:{folders})/[\w./-]*)`", text)
        ]
        findings += [
            f"{document.name}: {name} does not exist"
            for path, name in named_here
            if not path.exists()
        ]
    return findings


def dev_commands(root):
    listing = subprocess.run(["./dev"], cwd=root, capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"^  (\w+)", listing, re.M))


def check_dev_commands(root):
    known = dev_commands(root)
    findings = [] if known else ["./dev lists no command"]
    for document in documents(root):
        for name in re.findall(r"\./dev (\w[\w-]*)", document.read_text()):
            if name not in known:
                findings.append(f"{document.name}: ./dev has no command '{name}'")
    return findings


def command_lines(text):
    for block in blocks(text):
        if block["language"] == "sh":
            joined = block["text"].replace("\\\n", " ")
            for line in joined.splitlines():
                command, _, comment = re.sub(r"\s+#", "  #", line, count=1).partition("  #")
                if command.strip() and not command.startswith("#"):
                    yield command.strip(), comment


def is_run(line):
    if line.startswith("./dev report build/"):  # of what ./dev compare has measured
        return False
    if line.startswith("./dev"):
        return re.match(rf"\./dev ({TOOLS})\b", line) is not None
    return not line.startswith(NEVER_RUN)


def check_quick_commands(root):
    """Runs them in a folder that looks like the repository, so that what they write does not land in it. ./dev and tileloss are
    `python -m tileloss` of this Python there, with the package and the library that the environment names."""
    findings, ran = [], 0
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for entry in root.iterdir():
            if entry.name not in ("build", "dev"):
                (folder / entry.name).symlink_to(entry)
        (folder / "build").mkdir()
        if library := os.environ.get("TILELOSS_LIBRARY"):
            (folder / "build" / "release").symlink_to(pathlib.Path(library).parent)
        (folder / "bin").mkdir()
        # Not a link: an environment's Python knows its packages by where it lies.
        (folder / "bin" / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        (folder / "bin" / "python").chmod(0o755)
        for command in (folder / "dev", folder / "bin" / "tileloss"):
            command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tileloss "$@"\n')
            command.chmod(0o755)
        for document in documents(root):
            for line, comment in command_lines(document.read_text()):
                if not is_run(line):
                    continue
                ran += 1
                done = subprocess.run(
                    ["bash", "-c", line],
                    cwd=folder,
                    capture_output=True,
                    text=True,
                    timeout=900,
                    env={**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}"},
                )
                print(f"exit {done.returncode}: {line}")
                may_fail = "may fail" in comment and done.returncode == 1
                if not may_fail and bool(done.returncode) != ("fails, as it should" in comment):
                    findings.append(
                        f"{document.name}: exit {done.returncode} of: {line}\n{done.stdout[-800:]}{done.stderr[-800:]}"
                    )
    return findings if ran else ["no command found to run"]


def self_test():
    """Returns what a check failed to catch."""
    findings = []
    with tempfile.TemporaryDirectory() as name:
        root = pathlib.Path(name)
        (root / "examples").mkdir()
        (root / "examples" / "a.c").write_text("int main;\n")
        (root / "dev").write_text("#!/bin/sh\necho '  test   runs'\n")
        (root / "dev").chmod(0o755)
        (root / "program").write_text("#!/bin/sh\necho right\n")
        (root / "program").chmod(0o755)

        (root / "docs" / "users").mkdir(parents=True)
        shown = "<!-- examples/a.c -->\n```c\nint main;\n```\n"
        output = "<!-- output of a -->\n```text\nright\n```\n"
        of_example = functools.partial(check_example, program=str(root / "program"), name="a")
        # By check: what the document has, and whether that is to be caught.
        planted = {
            check_snippets: {
                "true snippet": (shown, False),
                "changed snippet": (shown.replace("main", "mean"), True),
                "example shown nowhere": ("none\n", True),
            },
            of_example: {
                "true output": (output, False),
                "wrong output": (output.replace("right", "wrong"), True),
            },
            check_links: {
                "true link": ("[a](examples/a.c) `examples/a.c`\n", False),
                "broken link": ("[b](examples/b.c)\n", True),
                "broken path": ("`examples/b.c`\n", True),
                "broken link on a page of a shelf": ("[b](b.md)\n", True),
                "true link on a page of a shelf": ("[b](../../examples/a.c)\n", False),
            },
            check_dev_commands: {
                "known command": ("`./dev test -R x`\n", False),
                "unknown command": ("`./dev fly`\n", True),
            },
            check_quick_commands: {
                "good command": ("```sh\ntrue  # fine\n```\n", False),
                "failing command": ("```sh\ntrue\nfalse\n```\n", True),
                "failing command in a list": ("1. do\n   ```sh\n   false\n   ```\n", True),
                "no command": ("text\n", True),
            },
        }
        for check, samples in planted.items():
            for what, (text, is_caught) in samples.items():
                page = root / ("docs/users/page.md" if "shelf" in what else "README.md")
                page.write_text(text)
                if bool(check(root)) != is_caught:
                    findings.append(f"{what}: {'not caught' if is_caught else 'refused'}")
                page.unlink()
    return findings


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=pathlib.Path, required=True)
    checks = {
        "snippets": lambda: check_snippets(root),
        "example": lambda: check_example(root, options.program, options.name),
        "links": lambda: check_links(root),
        "dev-commands": lambda: check_dev_commands(root),
        "quick-commands": lambda: check_quick_commands(root),
        "self-test": self_test,
    }
    parser.add_argument("check", choices=checks)
    parser.add_argument("program", nargs="?")
    parser.add_argument("name", nargs="?")
    options = parser.parse_args()
    root = options.root.resolve()
    findings = checks[options.check]()
    print("\n".join(findings) or f"{options.check}: nothing found")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
