#!/usr/bin/env python3
"""Installs and packs the build in --build and uses the result as a stranger would. --source is the repository, --work a folder
for all that is made here.

  tree                          installs, moves the folder, looks for files that are missing or know where they were built
  judge                         the installed libtileloss_judge.so answers
  cmake C|CXX EXAMPLE           EXAMPLE, built with find_package, shared and static, prints what it prints in the build
  pkg-config C|CXX EXAMPLE      the same with pkg-config
  packages                      makes WORK/packages/*.deb and *.tar.gz; they are whole and what is in them runs
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

FILES = """include/tileloss/tileloss.h include/tileloss/tileloss.hpp include/tileloss/views.hpp lib/libtileloss.a
    lib/libtileloss.so lib/libtileloss_judge.so lib/cmake/tileloss/tileloss-config.cmake
    lib/cmake/tileloss/tileloss-config-version.cmake lib/cmake/tileloss/tileloss-targets.cmake
    lib/pkgconfig/tileloss.pc share/doc/tileloss/LICENSE share/doc/tileloss/LICENSE-THIRD-PARTY
    share/doc/tileloss/copyright""".split()
COMPILERS = {"C": ["cc", "-std=c11"], "CXX": ["c++", "-std=c++20"]}


# A gradcheck by the one C function (src/judge/judge.h); prints the version in its line of results.
ASK_JUDGE = """
import ctypes, json, sys
Event = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p)
class Answer(ctypes.Structure):
    _fields_ = [("context", ctypes.c_void_p), ("event", Event), ("tensor", ctypes.c_void_p)]
def node(key, text):
    return {"key": key, "kind": "scalar", "text": text}
sizes = {"batch_size": "1", "seq_len": "4", "vocab_size": "64", "dtype": "bf16"}
children = [node(*each) for each in ({"loss": "cross_entropy"} | sizes).items()]
request = {"do": "gradcheck", "name": "a check", "config": {"kind": "map", "children": children}}
events = []
answer = Answer(None, Event(lambda _, text: events.append(json.loads(text))), None)
judge = ctypes.CDLL(sys.argv[1]).tileloss_judge
assert judge(json.dumps(request).encode(), None, ctypes.c_int64(0), ctypes.byref(answer)) == 0, events
print(events[-1]["line"]["version"])
"""


class Failure(Exception):
    pass


def run(*command, environment=None, cwd=None):
    command = [str(part) for part in command]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env={**os.environ, **(environment or {})}
    )
    if done.returncode:
        raise Failure(
            f"exit {done.returncode} of {' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
    return done.stdout


def expect(condition, message):
    if not condition:
        raise Failure(message)


def check_files(root):
    missing = [name for name in FILES if not (root / name).exists()]
    expect(not missing, f"{root} lacks {missing}")
    soname = re.search(r"\(SONAME\).*\[(.*)\]", run("readelf", "-dW", root / "lib/libtileloss.so"))
    expect(soname and (root / "lib" / soname[1]).exists(), f"{root}/lib has no file for the soname")


class Test:
    def __init__(self, options):
        self.build, self.source, self.work = (
            path.resolve() for path in (options.build, options.source, options.work)
        )
        self.prefix = self.work / "moved"

    def ask_judge(self, root):
        """The judge of an installed tree checks a small loss. The version that it names."""
        ask = [sys.executable, "-c", ASK_JUDGE, root / "lib" / "libtileloss_judge.so"]
        return run(*ask, cwd="/").strip()

    def tree(self):
        shutil.rmtree(self.work, ignore_errors=True)
        staged = self.work / "staged"
        run("cmake", "--install", self.build, "--prefix", staged)
        staged.rename(self.prefix)
        check_files(self.prefix)
        for path in self.prefix.rglob("*"):
            if path.is_file():
                content = path.read_bytes()
                for place in (self.source, self.build, staged):
                    expect(
                        str(place).encode() not in content,
                        f"{path.relative_to(self.prefix)} names {place}",
                    )

    def judge(self):
        version = self.ask_judge(self.prefix)
        expect(
            f'"{version}"' in (self.prefix / "include/tileloss/tileloss.h").read_text(),
            f"the header is not of version {version}",
        )

    def expected_output(self, language):
        return run(next(self.build.rglob(f"example_{'c' if language == 'C' else 'cpp'}")))

    def cmake(self, language, example):
        build = self.work / f"cmake_{language}"
        version = run(self.prefix / "bin/tileloss", "--version").strip()
        run(
            "cmake",
            "-S",
            self.source / "tests/install/consumer",
            "-B",
            build,
            "-G",
            "Ninja",
            f"-DLANGUAGE={language}",
            f"-DEXAMPLE={example}",
            f"-DVERSION={version}",
            f"-DCMAKE_PREFIX_PATH={self.prefix}",
        )
        run("cmake", "--build", build)
        for library in ("tileloss", "tileloss_static"):
            expect(
                run(build / f"with_{library}") == self.expected_output(language),
                f"with {library} it prints something else",
            )

    def pkg_config(self, language, example):
        environment = {"PKG_CONFIG_PATH": str(self.prefix / "lib" / "pkgconfig")}
        flags = run("pkg-config", "--cflags", "--libs", "tileloss", environment=environment).split()
        program = self.work / f"pkg_config_{language}"
        run(
            *COMPILERS[language],
            "-Wall",
            "-Wextra",
            "-Werror",
            example,
            *flags,
            f"-Wl,-rpath,{self.prefix}/lib",
            "-o",
            program,
        )
        expect(
            str(self.prefix / "lib") in run("ldd", program), "it does not use the installed library"
        )
        expect(run(program) == self.expected_output(language), "it prints something else")
        static = run(
            "pkg-config", "--static", "--cflags", "--libs", "tileloss", environment=environment
        )
        expect("-ltileloss " in static, f"no -ltileloss in: {static}")
        flags = static.replace("-ltileloss ", "-l:libtileloss.a ").split()
        run(*COMPILERS[language], example, *flags, "-o", program)
        expect("libtileloss" not in run("ldd", program), "the static one needs a libtileloss.so")
        expect(
            run(program) == self.expected_output(language), "the static one prints something else"
        )
        version = run("pkg-config", "--modversion", "tileloss", environment=environment).strip()
        expect(
            version == self.ask_judge(self.prefix),
            f"tileloss.pc is of version {version}",
        )

    def packages(self):
        folder = self.work / "packages"
        shutil.rmtree(folder, ignore_errors=True)
        run("cpack", "--config", self.build / "CPackConfig.cmake", "-B", folder)
        shutil.rmtree(folder / "_CPack_Packages")
        (deb,), (archive,) = folder.glob("*.deb"), folder.glob("*.tar.gz")
        with tempfile.TemporaryDirectory() as name:
            unpacked = pathlib.Path(name)
            run("dpkg-deb", "-x", deb, unpacked)
            check_files(unpacked / "usr")
            version = self.ask_judge(unpacked / "usr")
            (unpacked / "tar").mkdir()
            run("tar", "xzf", archive, "-C", unpacked / "tar", "--strip-components=1")
            check_files(unpacked / "tar")
            expect(
                self.ask_judge(unpacked / "tar") == version, f"{archive.name} has another version"
            )
        fields = {
            name: run("dpkg-deb", "-f", deb, name).strip()
            for name in ("Package", "Version", "Depends", "Maintainer", "Description")
        }
        expect(
            fields["Package"] == "tileloss" and fields["Version"] == version,
            f"{deb.name}: {fields}",
        )
        expect(all(fields.values()), f"{deb.name}: a field is empty: {fields}")
        needed = set(re.findall(r"([\w+.-]+)(?: \([^)]*\))?(?:, |$)", fields["Depends"]))
        expect(
            needed == {"libc6", "libstdc++6", "libgcc-s1"},
            f"{deb.name} depends on more or less than the run times: {needed}",
        )
        expect(
            "ldconfig" in run("dpkg-deb", "-I", deb, "postinst"),
            f"{deb.name} does not tell ldconfig",
        )
        print(run("dpkg-deb", "-I", deb) + run("dpkg-deb", "-c", deb) + f"{deb}\n{archive}")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("source", "build", "work"):
        parser.add_argument(f"--{name}", type=pathlib.Path, required=True)
    parser.add_argument("check", choices=["tree", "judge", "cmake", "pkg-config", "packages"])
    parser.add_argument("arguments", nargs="*")
    options = parser.parse_args()
    try:
        getattr(Test(options), options.check.replace("-", "_"))(*options.arguments)
    except Failure as failure:
        print(failure)
        return 1
    print(f"{options.check}: as it should be")
    return 0


if __name__ == "__main__":
    sys.exit(main())
