#!/usr/bin/env python3
"""The project's own lints. Each prints what is wrong, a line a finding, and exits 1 when there is any.

lint.py includes ROOT            includes point down: frontends -> api -> backends, losses -> core; judge -> roofs ->
                                 support; the oracle alone
lint.py files ROOT               snake_case names; no file in src and frontends over 500 lines
lint.py recipes ROOT             a divergence, options, row outputs and a loss are named by hand in the files of HACKING.md's
                                 recipes alone
lint.py kernels ROOT             the first statement of each CUDA kernel is begin_kernel(): what comes before it may race with the
                                 kernel before; and nothing that devices run calls what nvcc leaves out of their code
lint.py sizes ROOT               no tracked file over 1 MB but those listed here (exit 77 where ROOT is no checkout)
lint.py format ROOT              clang-format has nothing to change (exit 77 when it is not installed)
lint.py symbols LIBRARY HEADER   the library exports the functions of the header and nothing else
lint.py needed LIBRARY           the library needs the C and C++ run times only, without a run path, and has a soname
lint.py isa-objects BUILD        code compiled for one instruction set cannot be picked by the linker for another
lint.py tile-objects BUILD LIBRARY  AMX's tile instructions are in the object that is compiled for them and in no other, and the
                                 library has them
"""

import pathlib
import re
import shutil
import subprocess
import sys

# What each room may include besides its own files. A room may lie in another one.
CPU = "backends/cpu"
CPU_ROOMS = {
    "threads": set(),
    "simd": set(),
    "matmul": {"simd"},
    "amx": {"simd", "matmul"},
    "sweep": {"threads", "simd", "matmul"},
    "head": {"threads", "simd", "matmul", "amx", "sweep"},
    "isa": {"simd", "matmul", "amx", "sweep", "head"},
}
DRIVER = {"core", "schema", "losses", "backends"}
LIBRARY = {*DRIVER, "api"}
# Of the judge, from below: each may include those before it, and strict none of them.
JUDGE_ROOMS = ("judge/oracles", "judge/inputs", "judge/gates")
BELOW = {
    "core": set(),
    "schema": {"core"},
    "losses": {"core", "schema"},
    "backends": {"core", "schema", "losses"},
    **{f"backends/{room}": DRIVER for room in ("host", "device")},
    "backends/cuda": {*DRIVER, "backends/device"},
    **{
        f"{CPU}/{room}": {"core", *(f"{CPU}/{r}" for r in below)}
        for room, below in CPU_ROOMS.items()
    },
    CPU: {*DRIVER, "backends/host", f"{CPU}/plan", *(f"{CPU}/{room}" for room in CPU_ROOMS)},
    f"{CPU}/plan": {*DRIVER, *(f"{CPU}/{room}" for room in CPU_ROOMS)},
    "api": DRIVER,
    "oracle": set(),
    "support": {*LIBRARY, "backends/device", "backends/cuda", "oracle"},
    "roofs": {*LIBRARY, "oracle", "support", f"{CPU}/isa"},
    **{
        room: {*LIBRARY, "oracle", "support", *JUDGE_ROOMS[:place]}
        for place, room in enumerate(JUDGE_ROOMS)
    },
    "judge/strict": {*LIBRARY, "oracle", "support"},
    "judge": {*LIBRARY, "oracle", "support", *JUDGE_ROOMS, "judge/strict", "roofs", f"{CPU}/isa"},
    "frontends": {"api"},
    "public": set(),
}
# The recipes of HACKING.md, each by some that they made, the best and the worst: the files of the product that name it by hand,
# those of the judge and the roofs, those of JAX, the same maths once more, and those that know other libraries. Anything else
# goes over the tables.
RECIPES = {
    "jeffreys|k?Jeffreys": (
        {"src/schema/table.toml", "src/core/divergence.h"},
        {"src/oracle/divergence.cpp"},
        {"frontends/python/tileloss/jax/_sweeps/divergence.py"},
        set(),
    ),
    "kl_clamp": (
        {"src/schema/table.toml", "src/losses/policy/kl.h"},
        {"src/oracle/policy.h", "src/oracle/policy.cpp"},
        {"frontends/python/tileloss/jax/_rows/policy/kl.py"},
        set(),
    ),
    "z_loss": (
        {"src/schema/table.toml", "src/losses/cross_entropy.h"},
        # labels.cpp: a part of a row's trace; row_outputs.cpp: of a budget; unfused_baseline.cpp: what is timed beside it.
        {
            "src/oracle/oracle.h",
            "src/oracle/oracle.cpp",
            "src/judge/oracles/labels.cpp",
            "src/judge/oracles/row_outputs.cpp",
            "src/roofs/unfused_baseline.cpp",
        },
        {"frontends/python/tileloss/jax/_rows/cross_entropy.py"},
        {
            "frontends/python/tileloss/_core/other_names.py",
            "frontends/python/tileloss/tools/audit/cases.py",
            "frontends/python/tileloss/tools/implementations/liger.py",
            "frontends/python/tileloss/tools/implementations/torch_losses.py",
            "frontends/python/tileloss/integrations/_forward_forms.py",
            "frontends/python/tileloss/integrations/_loss_call.py",
        },
    ),
    "mean_logit": (
        {"src/schema/table.toml", "src/losses/row_outputs.h"},
        # inputs.cpp: it has an upstream gradient.
        {
            "src/oracle/oracle.h",
            "src/oracle/oracle.cpp",
            "src/judge/oracles/row_outputs.cpp",
            "src/judge/inputs/inputs.cpp",
        },
        {"frontends/python/tileloss/jax/_rows/stats.py"},
        {"frontends/python/tileloss/integrations/trl.py"},
    ),
    "agreement": (
        {"src/schema/table.toml", "src/losses/row_outputs.h"},
        {
            "src/oracle/distillation.h",
            "src/oracle/distillation.cpp",
            "src/judge/oracles/row_outputs.h",
            "src/judge/oracles/row_outputs.cpp",
            "src/judge/oracles/weighted.cpp",
            "src/judge/gates/mutants.cpp",
            "src/judge/gates/rows.cpp",
        },
        {"frontends/python/tileloss/jax/_sweeps/xla_targets.py"},
        set(),
    ),
    # A loss. functions.py: Python's cross_entropy is this one for class probabilities.
    "soft_cross_entropy|SoftCrossEntropy": (
        {
            "src/schema/table.toml",
            "src/losses/soft_cross_entropy.h",
            "src/losses/all_losses.h",
            "frontends/python/tileloss/_core/functions.py",
        },
        {
            "src/judge/functions.cpp",
            "src/judge/inputs/config.h",
            "src/judge/inputs/probabilities.cpp",
            "src/judge/inputs/targets.h",
            "src/judge/oracles/probabilities.cpp",
        },
        {"frontends/python/tileloss/jax/_apply.py"},
        {
            "frontends/python/tileloss/tools/audit/cases.py",
            "frontends/python/tileloss/tools/audit/bugs/targets.py",
        },
    ),
}
# What ./dev generate writes, and what Python's documentation and help say.
UNCOUNTED = re.compile(r'(?s) generated: .*? end of generated\b|""".*?"""')
# The one file that names the backends there are.
BACKEND_LIST = "src/backends/registry.cpp"
# Rooms that may not see the C ABI's types: core runs on devices, the oracle shares nothing with what it checks.
BLIND = {"core", "oracle"}
# core: no allocation, threads, files or vendor headers.
NOT_IN_CORE = set(
    "vector string memory new deque list map set unordered_map unordered_set functional any thread mutex shared_mutex atomic "
    "future condition_variable semaphore barrier latch fstream iostream sstream ostream istream cstdio cstdlib filesystem "
    "stdio.h stdlib.h pthread.h unistd.h immintrin.h cuda.h cuda_runtime.h hip/hip_runtime.h".split()
)
CODE = {".h", ".hpp", ".c", ".cpp", ".cu", ".cuh"}
# Constexpr functions, which device code may call, whose code in libstdc++ comes to a builtin that devices lack: nvcc says
# nothing and leaves out all that leads there. Of std::countr_zero(word) a 32 is left, of std::popcount() of 64 bits a 0, of a
# kernel that calls std::copy() nothing. Some are right for 32 bits: kernels have __popc().
LEFT_OUT = re.compile(
    r"\bstd::(?:count[lr]_(?:zero|one)|popcount|has_single_bit|bit_(?:width|ceil|floor)|gcd|lcm"
    r"|copy(?:_n|_backward)?|move_backward|equal|rotate)\b"
)
ON_DEVICES = re.compile(r"\b(?:TILELOSS_HOST_DEVICE|__device__|__global__)\b")
INCLUDE = re.compile(r'^\s*#\s*include\s+(["<])([^">]+)[">]', re.M)
SNAKE_CASE = re.compile(r"[a-z0-9]+([_.][a-z0-9]+)*")
PYTHON_NAME = re.compile(
    r"__(init|main)__\.py|_?[a-z0-9]+(_[a-z0-9]+)*\.py"
)  # _name.py: private to its package
ISA_OBJECT = re.compile(r"\w+_(avx\w+|amx\w*|neon\w*)\.cpp\.o")
TILE_OBJECT = re.compile(r"\w+_amx\.cpp\.o")
MAX_TRACKED_BYTES = 1_000_000
# Tracked files that may be larger: every clone takes them along for ever, so each needs its reason here.
MAY_BE_LARGER: set[str] = set()
# Each that the products need, and whatever else works on tiles.
TILE_INSTRUCTIONS = set(
    "ldtilecfg tilezero tileloadd tileloaddt1 tdpbf16ps tilestored tilerelease".split()
)
TILE_INSTRUCTION = re.compile(r"\t(\w*tile\w+|td\w+)\b")
RUN_TIMES = re.compile(
    r"lib(c|m|dl|stdc\+\+|gcc_s|pthread)\.so\.\d+|ld-linux-[a-z0-9-]+\.so\.\d+|linux-vdso\.so\.\d+"
)


def output_of(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def code_files(*folders, suffixes=frozenset(CODE)):
    return sorted(f for folder in folders for f in folder.rglob("*") if f.suffix in suffixes)


def room_of(path, root):
    parts = path.relative_to(root).parts
    return {"include": "public", "frontends": "frontends"}.get(parts[0]) or room_in_src(parts[1:-1])


def room_in_src(folders):
    """The innermost room that the folders lead to; where there is none, the folder that is none."""
    rooms = ["/".join(folders[: n + 1]) for n in range(len(folders))]
    return next((room for room in reversed(rooms) if room in BELOW), "/".join(folders[:1]))


def include_finding(path, room, quote, name, root):
    """What is wrong with one include of a file in `room`, or None."""
    if name.split("/")[0] == "tileloss":
        return f"{room} must not see the public headers" if room in BLIND else None
    if quote == "<":
        return (
            f"{room} includes <{name}>: no allocation, threads, files or vendor headers there"
            if room == "core" and name in NOT_IN_CORE
            else None
        )
    if not (root / "src" / name).is_file():
        return f'"{name}" is no file under src (includes are written from there)'
    target = room_in_src(name.split("/")[:-1])
    is_list = str(path.relative_to(root)) == BACKEND_LIST and target.startswith("backends/")
    if target != room and target not in BELOW[room] and not is_list:
        return f"{room} must not include {target}"
    return None


def lint_includes(root):
    root = pathlib.Path(root)
    files = code_files(root / "src", root / "include", root / "frontends")
    findings = [] if files else [f"no source files under {root}"]
    for path in files:
        room = room_of(path, root)
        if room not in BELOW:
            findings.append(
                f"{path.relative_to(root)}: '{room}' is no room of docs/developers/architecture.md"
            )
            continue
        text = path.read_text()
        for match in INCLUDE.finditer(text):
            finding = include_finding(path, room, match[1], match[2], root)
            if finding:
                line = text.count("\n", 0, match.start(2)) + 1
                findings.append(f"{path.relative_to(root)}:{line}: {finding}")
    return findings


def lint_files(root):
    root = pathlib.Path(root)
    findings = []
    for folder in ("src", "include", "tests", "examples", "benchmarks", "configs", "frontends"):
        for path in sorted((root / folder).rglob("*")):
            name = path.relative_to(root)
            names = PYTHON_NAME if path.suffix == ".py" else SNAKE_CASE
            if (
                path.is_file()
                and path.suffix in CODE | {".py", ".yaml", ".cmake"}
                and not names.fullmatch(path.name)
            ):
                findings.append(f"{name}: not snake_case")
            if folder in ("src", "frontends") and path.suffix in CODE | {".py"}:
                lines = path.read_text().count("\n")
                if lines > 500:
                    findings.append(f"{name}: {lines} lines, over 500")
                elif lines > 400:
                    print(f"note: {name}: {lines} lines; files aim under 400")
    return findings


def lint_recipes(root):
    root = pathlib.Path(root)
    findings = []
    for name, parts in RECIPES.items():
        expected = set().union(*parts)
        word = re.compile(rf"\b({name})\b")
        files = {
            str(path.relative_to(root))
            for path in code_files(
                root / "src", root / "include", root / "frontends", suffixes=CODE | {".py", ".toml"}
            )
            if word.search(UNCOUNTED.sub("", path.read_text()))
        }
        for path in sorted(files - expected):
            findings.append(f"{path}: names {name}, which HACKING.md's recipe has no need of")
        for path in sorted(expected - files):
            findings.append(f"{path}: does not name {name}: HACKING.md's recipe is out of date")
    return findings


def lint_kernels(root):
    root = pathlib.Path(root)
    findings, found = [], 0
    for path in code_files(root / "src"):
        text = re.sub(r"//.*", "", path.read_text())
        for kernel in re.finditer(r"\b__global__\b([^;{]*)\{\s*(begin_kernel\(\);)?", text):
            found += 1
            if not kernel[2]:
                line = text.count("\n", 0, kernel.start()) + 1
                findings.append(
                    f"{path.relative_to(root)}:{line}: a kernel that does not start with begin_kernel()"
                )
        for call in LEFT_OUT.finditer(text) if ON_DEVICES.search(text) else ():
            line = text.count("\n", 0, call.start()) + 1
            findings.append(
                f"{path.relative_to(root)}:{line}: {call[0]}, which nvcc leaves out of a device's code"
            )
    return findings if found else [f"no kernels under {root}"]


def skip(reason):
    print(f"SKIPPED: {reason}")
    sys.exit(77)


def lint_sizes(root):
    root = pathlib.Path(root)
    if not shutil.which("git"):
        skip("no git")
    done = subprocess.run(["git", "-C", str(root), "ls-files", "-z"], capture_output=True)
    tracked = [name for name in done.stdout.decode().split("\0") if name]
    if done.returncode or not tracked:
        skip(done.stderr.decode().strip() or f"git tracks nothing under {root}")
    sizes = {name: (root / name).lstat().st_size for name in tracked if (root / name).is_file()}
    large = {name for name, size in sizes.items() if size > MAX_TRACKED_BYTES}
    return [
        f"{name}: {sizes[name]} bytes, tracked files have at most {MAX_TRACKED_BYTES} (MAY_BE_LARGER lists those with a reason)"
        for name in sorted(large - MAY_BE_LARGER)
    ] + [f"{name}: in MAY_BE_LARGER, but it is not" for name in sorted(MAY_BE_LARGER - large)]


def lint_format(root):
    root = pathlib.Path(root)
    if not shutil.which("clang-format"):
        skip("no clang-format (./dev test installs it)")
    files = code_files(*(root / folder for folder in ("src", "include", "tests", "examples")))
    done = subprocess.run(
        ["clang-format", "--dry-run", *map(str, files)], capture_output=True, text=True
    )
    return [line for line in done.stderr.splitlines() if "clang-format-violations" in line] or (
        [done.stderr] if done.returncode else []
    )


def lint_symbols(library, header):
    declared = set(
        re.findall(r"TILELOSS_API[^;(]*?\b(tileloss_\w+)\(", pathlib.Path(header).read_text())
    )
    symbols = [
        line.split() for line in output_of("nm", "-D", "--defined-only", library).splitlines()
    ]
    exported = {s[-1].split("@")[0] for s in symbols if s[-2] != "A"}  # A: the version node itself
    return [
        f"{library} exports {name}, which {header} does not declare"
        for name in sorted(exported - declared)
    ] + [f"{library} does not export {name} of {header}" for name in sorted(declared - exported)]


def lint_needed(library):
    dynamic = output_of("readelf", "-dW", library)
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic))
    needed |= set(
        re.findall(r"^\s(?:\S*/)?(\S+\.so\S*)", output_of("ldd", library), re.M)
    )  # what those need in their turn
    findings = [
        f"{library} needs {name}" for name in sorted(needed) if not RUN_TIMES.fullmatch(name)
    ]
    findings += [
        f"{library} has a run path: {path}"
        for path in re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", dynamic)
    ]
    if "Dynamic section" not in dynamic:
        findings.append(f"{library} has no dynamic section")
    if not re.search(r"\(SONAME\).*\[libtileloss(\.so\.\d+|_judge\.so)\]", dynamic):
        findings.append(f"{library} has no soname libtileloss.so.N or libtileloss_judge.so")
    return findings


def lint_isa_objects(build):
    """A weak symbol of an object compiled with -mavx512... may be the copy that the linker keeps for everyone, and the baseline
    would then fault. So whatever is weak in <name>_<isa>.cpp must have a namespace called like the instruction set."""
    objects = [
        (path, ISA_OBJECT.fullmatch(path.name)) for path in sorted(pathlib.Path(build).rglob("*.o"))
    ]
    objects = [(path, match[1]) for path, match in objects if match]
    findings = (
        []
        if any(path.name.startswith("kernels_") for path, _ in objects)
        else [f"no kernels_<isa>.cpp.o under {build}"]
    )
    for path, isa in objects:
        for line in output_of("nm", "-C", "--defined-only", str(path)).splitlines():
            _, kind, name = line.split(" ", 2)
            if kind in "WVu" and f"::{isa}::" not in name:
                findings.append(f"{path.name}: weak symbol outside namespace {isa}: {name}")
    return findings


def tile_instructions(binary):
    return set(
        TILE_INSTRUCTION.findall(
            output_of("objdump", "-d", "--no-show-raw-insn", "--no-addresses", str(binary))
        )
    )


def lint_tile_objects(build, library):
    findings = []
    for path in sorted(pathlib.Path(build).rglob("*.o")):
        if not TILE_OBJECT.fullmatch(path.name):
            findings += [
                f"{path.name}: {name}, a tile instruction"
                for name in sorted(tile_instructions(path))
            ]
    objects = [
        path for path in pathlib.Path(build).rglob("*.o") if TILE_OBJECT.fullmatch(path.name)
    ]
    for binary in (*objects, pathlib.Path(library)):
        findings += [
            f"{binary.name}: no {name}"
            for name in sorted(TILE_INSTRUCTIONS - tile_instructions(binary))
        ]
    return findings if objects else [f"no <name>_amx.cpp.o under {build}"]


def main(arguments):
    lints = {
        name.removeprefix("lint_").replace("_", "-"): function
        for name, function in globals().items()
        if name.startswith("lint_")
    }
    if not arguments or arguments[0] not in lints:
        sys.exit(__doc__)
    findings = lints[arguments[0]](*arguments[1:])
    print("\n".join(findings) or f"{arguments[0]}: nothing found")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
