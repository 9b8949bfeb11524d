"""Barriers and races of whole_rows, cross_entropy's with default options in bfloat16, as a static verifier of PTX sees them.

sentryward_test.py SENTRYWARD NVCC FLAG...: NOT RUN without the verifier (PyPI's sentryward 0.1.1) or nvcc. It knows no addresses
in other blocks of a cluster, and follows one way through branches that depend on data: so the kernel is looked at for one row, in
place, by a block alone, and what decides its way is told it. It has to find no race there, and one as soon as any barrier or wait
is taken out.
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile

COLUMNS, PADDED, STRIDE, LABEL = 4203, 4206, 4224, 17
# The kernel's arguments by their place, as whole_rows.cu has them; what is not here is 0.
JOB = {
    0: "logits",
    8: STRIDE,
    32: "logits",
    40: STRIDE,
    64: COLUMNS,
    72: PADDED,
    88: 1,
    96: "transform",
}
ROWS = ("labels", "states", "stats", "results")
ARGUMENTS = (
    (176, JOB | {112 + 8 * i: name for i, name in enumerate(ROWS)}),
    (16, {0: "loss"}),
    (8, {0: 1}),
)


def specialised(ptx: str) -> str:
    """The same with a cluster of one block, a label that is known, and a loss whose options are 0 or null."""
    for register, parameter in re.findall(r"mov\.b64\s+(%rd\d+), (\w+_param_\d);", ptx):
        copies = re.findall(rf"mov\.u64\s+(%rd\d+), {register};", ptx)
        for name in (register, *copies):
            ptx = re.sub(rf"\[{name}(?=[+\]])", "[" + parameter, ptx)
    ptx = ptx.replace("%cluster_nctaid.x", "1").replace("%cluster_ctarank", "0")
    ptx = re.sub(r"mapa\.u64 (%rd\d+), (%rd\d+), %r\d+;", r"mov.u64 \1, \2;", ptx)
    label = r"(ld\.param\.u64\s+%rd\d+, \[\w+_param_0\+112\];(?:(?!ld\.global).)*)ld\.global\.u64\s+(%rd\d+), \[%rd\d+\];"
    ptx = re.sub(label, rf"\1mov.b64 \2, {LABEL};", ptx, flags=re.S)
    for loss in re.findall(r"ld\.param\.u64\s+(%rd\d+), \[\w+_param_1\];", ptx):
        for register in re.findall(rf"cvta\.to\.global\.u64\s+(%rd\d+), {loss};", ptx):
            ptx = re.sub(
                rf"ld\.global\.u64\s+(%rd\d+), \[{register}\b.*?\];", r"mov.b64 \1, 0;", ptx
            )
            ptx = re.sub(
                rf"ld\.global\.u8\s+(%rs\d+), \[{register}\b.*?\];", r"mov.u16 \1, 0;", ptx
            )
    return ptx


def kernel_input(kernel: str) -> dict:
    arguments, declarations = [], []
    for number, (size, values) in enumerate(ARGUMENTS):
        for offset in range(0, size, 8):
            place = {"parameter": f"{kernel}_param_{number}", "offset": offset}
            value = values.get(offset, 0)
            if isinstance(value, str):
                declarations.append(place | {"type": "pointer", "space": "global", "object": value})
            else:
                kind = "u8" if size == 8 else "s64"
                arguments.append(place | {"type": kind, "value": value})
    launch = {"grid_dim": [1, 1, 1], "block_dim": [64, 1, 1], "cluster_dim": [1, 1, 1]}
    return {
        "schema": "spverify.kernel-input/v1",
        "entry": kernel,
        "launch": launch | {"dynamic_shared_bytes": (COLUMNS + 7) // 8 * 16},
        "arguments": arguments,
        "declarations": declarations,
        "assumptions": {"representative_branches": True},
    }


def main() -> int:
    sentryward, nvcc, *flags = sys.argv[1:]
    for what, path in (("sentryward", sentryward), ("nvcc", nvcc)):
        if path.endswith("NOTFOUND") or not path:
            print(f"NOT RUN: there is no {what}")
            return 0
    with tempfile.TemporaryDirectory() as folder:
        source, ptx_file, input_file = (
            pathlib.Path(folder, name) for name in ("0.ptx", "1.ptx", "in.json")
        )
        kernel = pathlib.Path(__file__).with_name("whole_rows.cu")
        command = [nvcc, *flags, "-ptx", "-arch", "sm_100a", str(kernel), "-o", str(source)]
        subprocess.run(command, check=True)
        ptx = specialised(source.read_text())
        name = re.search(r"\.entry (\w+)", ptx)
        assert name
        input_file.write_text(json.dumps(kernel_input(name[1])))

        def verdict(text: str) -> str:
            """Its exit status is 0 whatever it finds."""
            ptx_file.write_text(text)
            said = subprocess.run(
                [sentryward, str(ptx_file), "--input", str(input_file), "--timeout", "120"],
                capture_output=True,
                text=True,
            ).stdout
            result = json.loads(said)
            return result["result"] + "".join(
                f"; {d['code']}: {d['message']}" for d in result["diagnostics"]
            )

        parts = list(re.finditer(r"barrier\.cluster\.(arrive|wait)\.aligned;", ptx))
        whole = verdict(ptx)
        print("whole:", whole)
        ok = whole == "race_free" and [part[1] for part in parts] == 2 * ["arrive", "wait"]
        for number, (arrive, wait) in enumerate(zip(parts[::2], parts[1::2], strict=True)):
            between = ptx[arrive.end() : wait.start()]
            without = verdict(ptx[: arrive.start()] + between + ptx[wait.end() :])
            print(f"without barrier {number} -> {without}")
            ok = ok and without.startswith("potential_race")
        without = verdict(re.sub(r"cp\.async\.wait_group\s+\d+;", "", ptx))
        print("without cp.async.wait_group ->", without)
        return 0 if ok and without.startswith("potential_race") else 1


if __name__ == "__main__":
    sys.exit(main())
