#!/usr/bin/env python3
"""Links a program for an older glibc than this machine's, as wheels for many machines need it.

    stubs.py VERSION FOLDER COMPILER

makes stub libraries of glibc VERSION in FOLDER and prints the linker's flags to use them with. COMPILER is a C compiler, of
another architecture if need be, that finds a glibc newer than VERSION. glibc keeps every old version of its functions; a stub has
each function in the newest version that VERSION had, and no code. So a linker that sees the stubs takes old versions, and a
function that VERSION had not is an undefined symbol. Those that GCC's own static libraries want all the same are in newer.c.
Since 2.34 a program's start is another one: start.c.
"""

import pathlib
import re
import subprocess
import sys

# The functions that had libraries of their own before 2.34.
LIBRARIES = {
    "libpthread.so.0": r"_?_?pthread_\w+|sem_\w+",
    "libdl.so.2": r"dl(open|close|sym|vsym|addr1?|error|info|mopen)",
    "librt.so.1": r"(timer|mq|aio|shm)_\w+|lio_listio\w*",
}
SYMBOL = re.compile(
    r"^ *\d+: \w+ +(\d+) (FUNC|IFUNC|OBJECT) +\w+ +DEFAULT +\d+ ([\w.]+)@@?GLIBC_([\d.]+)\b", re.M
)


def number(version):
    return [int(part) for part in version.split(".")]


def output_of(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def old_symbols(library, newest):
    """{name: (version, type, size)} of what the library had when glibc's version was `newest`."""
    found = {}
    for size, kind, name, version in SYMBOL.findall(
        output_of("readelf", "-W", "--dyn-syms", library)
    ):
        is_newer = name not in found or number(found[name][0]) < number(version)
        if number(version) <= number(newest) and is_newer:
            found[name] = (version, kind, size)
    return found


def write_stub(compiler, path, symbols):
    nodes, code = {}, [".bss"]
    for name, (version, kind, size) in sorted(symbols.items()):
        nodes.setdefault(version, []).append(name)
        kind = "object" if kind == "OBJECT" else "function"
        code += [
            f".globl {name}",
            f".type {name}, %{kind}",
            f".size {name}, {size}",
            f"{name}: .space {size}",
        ]
    path.with_suffix(".s").write_text(
        "\n".join([*code, '.section .note.GNU-stack, "", %progbits', ""])
    )
    script = [
        f"GLIBC_{version} {{ {'; '.join(names)}; }};" for version, names in sorted(nodes.items())
    ]
    path.with_suffix(".map").write_text("\n".join(script))
    given = [f"-Wl,-soname,{path.name}", f"-Wl,--version-script={path.with_suffix('.map')}"]
    output_of(compiler, "-shared", "-nostdlib", *given, path.with_suffix(".s"), "-o", path)


def main(newest, folder, compiler):
    here, folder = pathlib.Path(__file__).parent, pathlib.Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)

    def place_of(library):
        return output_of(compiler, f"-print-file-name={library}").strip()

    libc = old_symbols(place_of("libc.so.6"), newest)
    for library, names in LIBRARIES.items():
        theirs = {name: libc.pop(name) for name in [*libc] if re.fullmatch(names, name)}
        write_stub(compiler, folder / library, theirs)
    write_stub(compiler, folder / "libc.so.6", libc)
    write_stub(compiler, folder / "libm.so.6", old_symbols(place_of("libm.so.6"), newest))
    objects = []
    for source in ("newer", "start"):
        objects.append(folder / f"{source}.o")
        output_of(
            compiler,
            "-O2",
            "-Wall",
            "-Werror",
            "-fPIC",
            "-fvisibility=hidden",
            "-c",
            here / f"{source}.c",
            "-o",
            objects[-1],
        )
    archive = folder / "libnewer.a"
    archive.unlink(missing_ok=True)
    output_of(output_of(compiler, "-print-prog-name=ar").strip(), "rc", archive, *objects)
    # The names that compilers give to the linker.
    shared = " ".join(str(folder / library) for library in ("libc.so.6", *LIBRARIES))
    loader = next(
        name
        for name in ("ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1")
        if pathlib.Path(place_of(name)).is_absolute()
    )
    (folder / "libc.so").write_text(
        f"GROUP ( {archive} AS_NEEDED ( {shared} {place_of(loader)} ) {place_of('libc_nonshared.a')} )\n"
    )
    (folder / "libm.so").write_text(f"INPUT ( AS_NEEDED ( {folder}/libm.so.6 ) )\n")
    for library in ("pthread", "dl", "rt"):
        (folder / f"lib{library}.so").write_text("")
    print(
        f"-L{folder} -Wl,--wrap=__libc_start_main -static-libstdc++ -static-libgcc -Wl,--exclude-libs,ALL"
    )


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
