#!/usr/bin/env python3
"""Plants one violation of each kind and expects the lint to name it, and a clean sample that it must let pass."""

import pathlib
import subprocess
import tempfile
import unittest
import unittest.mock

import lint


class LintTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        self.write("src/core/row.h", "#include <cmath>\n")
        self.write("src/api/call.cpp", '#include <tileloss/tileloss.h>\n#include "core/row.h"\n')

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return str(path)

    def compile(self, name, text, *flags):
        source = self.write(name + ".cpp", text)
        subprocess.run(
            ["g++", "-std=c++20", "-O0", source, "-o", str(self.root / name), *flags], check=True
        )
        return str(self.root / name)

    def assert_names(self, findings, *words):
        self.assertEqual(len(findings), 1, findings)
        for word in words:
            self.assertIn(word, findings[0])


class Includes(LintTest):
    # A file, what it includes, and what is said of it: nothing, or these words.
    PLANTED = (
        ("src/core/up.h", '"api/call.cpp"', "core must not include api"),
        ("src/core/pool.h", "<thread>", "<thread>"),
        ("src/losses/loss.cpp", '"backends/backend.h"', "losses must not include backends"),
        ("src/api/plan.cpp", '"backends/cpu/isa/isa.h"', "api must not include backends/cpu/isa"),
        ("src/api/plan.cpp", '"backends/cuda/library.h"', "api must not include backends/cuda"),
        ("src/api/plan.cpp", '"backends/device/steps.h"', "api must not include backends/device"),
        # Rooms of a backend have an order, and one file lists the backends.
        (
            "src/backends/cpu/simd/lanes.h",
            '"backends/cpu/head/lm_head.h"',
            "simd must not include backends/cpu/head",
        ),
        ("src/backends/registry.cpp", '"backends/cpu/cpu_backend.h"', ""),
        ("src/backends/backend.h", '"backends/cpu/a.h"', "backends must not include backends/cpu"),
        # The judge's rooms include downwards; it stands on the roofs, and support sees none of the tools.
        ("src/judge/oracles/b.cpp", '"judge/inputs/a.h"', "oracles must not include judge/inputs"),
        ("src/judge/inputs/b.cpp", '"judge/gates/a.h"', "inputs must not include judge/gates"),
        ("src/judge/strict/b.cpp", '"judge/inputs/a.h"', "strict must not include judge/inputs"),
        ("src/judge/gates/b.cpp", '"judge/run.h"', "judge/gates must not include judge"),
        ("src/judge/gates/b.cpp", '"judge/inputs/a.h"', ""),
        ("src/judge/gates/b.cpp", '"judge/oracles/a.h"', ""),
        ("src/judge/judge.cpp", '"judge/judge.h"', ""),
        ("src/judge/judge.cpp", '"roofs/roofs.h"', ""),
        ("src/roofs/up.cpp", '"judge/judge.h"', "roofs must not include judge"),
        ("src/support/inputs.h", '"judge/judge.h"', "support must not include judge"),
        # The oracle stands alone.
        ("src/oracle/oracle.cpp", '"core/row.h"', "oracle must not include core"),
        (
            "src/oracle/oracle.cpp",
            "<tileloss/tileloss.h>",
            "oracle must not see the public headers",
        ),
        ("include/tileloss/tileloss.h", '"core/row.h"', "public must not include core"),
    )

    def test_includes_point_down(self):
        self.assertEqual(lint.lint_includes(self.root), [])
        for path, included, words in self.PLANTED:
            with self.subTest(path=path, included=included):
                self.setUp()
                target = "src/" + included.strip('"')
                if included.startswith('"') and not (self.root / target).exists():
                    self.write(target, "")
                self.write(path, f"#pragma once\n#include {included}\n")
                findings = lint.lint_includes(self.root)
                if words:
                    self.assert_names(findings, f"{path}:2", words)
                else:
                    self.assertEqual(findings, [])

    def test_relative_include_is_refused(self):
        self.write("src/core/near.h", '#include "row.h"\n')
        self.assert_names(lint.lint_includes(self.root), "is no file under src")

    def test_unknown_room_is_refused(self):
        self.write("src/utils/misc.h", "")
        self.assert_names(lint.lint_includes(self.root), "'utils' is no room")

    def test_an_empty_tree_does_not_pass(self):
        self.assert_names(lint.lint_includes(self.root / "nowhere"), "no source files")


class Files(LintTest):
    PLANTED = (
        ("tests/core/RowTest.cpp", "", "not snake_case"),
        ("frontends/python/tileloss/_rowOutputs.py", "", "not snake_case"),
        ("src/core/long.h", "\n" * 501, "501 lines"),
        ("frontends/python/tileloss/long.py", "\n" * 501, "501 lines"),
    )

    def test_names_and_lengths(self):
        self.write("frontends/python/tileloss/__init__.py", "")
        self.write("frontends/python/tileloss/_library.py", "")
        self.assertEqual(lint.lint_files(self.root), [])
        for path, text, words in self.PLANTED:
            with self.subTest(path=path):
                self.setUp()
                self.write(path, text)
                self.assert_names(lint.lint_files(self.root), path, words)


class Recipes(LintTest):
    def setUp(self):
        super().setUp()
        for name, parts in lint.RECIPES.items():
            for path in set().union(*parts):
                self.add(path, name)

    def add(self, path, text):
        file = self.root / path
        self.write(path, (file.read_text() if file.exists() else "") + text + "\n")

    def test_a_tree_that_keeps_to_them_passes(self):
        self.add("src/losses/policy/kl.h", "kl_clamp_max")
        self.add("src/api/tensors.cpp", "// generated: tensors\nagreement\n// end of generated")
        self.add("frontends/f.py", '    """Options of f:\n        z_loss: zeta.\n    """\n')
        self.assertEqual(lint.lint_recipes(self.root), [])

    def test_a_file_that_lists_an_option_or_output_by_hand_is_named(self):
        self.add("src/api/validate.cpp", "args.mean_logit")
        self.assert_names(lint.lint_recipes(self.root), "src/api/validate.cpp", "mean_logit")

    def test_by_hand_is_also_what_lies_beside_generated_lines(self):
        self.add("src/api/a.cpp", "// generated: a\n// end of generated\nagreement")
        self.assert_names(lint.lint_recipes(self.root), "src/api/a.cpp: names agreement")
        self.write("src/api/a.cpp", "")
        self.add("frontends/f.py", '    """Options of f:\n        beta: b.\n    """\n    z_loss\n')
        self.assert_names(lint.lint_recipes(self.root), "frontends/f.py: names z_loss")

    def test_a_recipe_with_a_file_too_many_is_out_of_date(self):
        self.write("src/oracle/policy.cpp", "")
        self.assert_names(
            lint.lint_recipes(self.root), "oracle/policy.cpp", "kl_clamp", "out of date"
        )

    def test_the_recipes_are_no_longer_than_promised(self):
        most = {
            "jeffreys|k?Jeffreys": 4,
            "kl_clamp": 5,
            "z_loss": 8,
            "mean_logit": 7,
            "agreement": 10,
        }
        most["soft_cross_entropy|SoftCrossEntropy"] = 10
        for name, (*by_hand, _) in lint.RECIPES.items():
            self.assertLessEqual(sum(map(len, by_hand)), most[name], name)
            is_loss = name.startswith("soft")
            self.assertLessEqual(len(by_hand[0]), 4 if is_loss else 2, name)


class Kernels(LintTest):
    BEGINS = (
        "template <class T>\n__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 2 : 1)\n"
        "    rows(Job job, T* to) {\n  begin_kernel();\n  *to = job();\n}\n"
    )

    def test_a_kernel_that_begins_passes(self):
        self.write("src/backends/cuda/rows.h", self.BEGINS)
        declared = "// A __global__ function {\ntemplate __global__ void rows<int>(Job, int*);\n"
        self.write("src/backends/cuda/rows.cu", declared + "void f() {}\n")
        self.assertEqual(lint.lint_kernels(self.root), [])

    def test_what_stands_before_it_is_named_with_its_line(self):
        late = self.BEGINS.replace("  begin_kernel();", "  const int i = to[0];\n  begin_kernel();")
        self.write("src/backends/cuda/rows.h", self.BEGINS + late)
        self.assert_names(lint.lint_kernels(self.root), "src/backends/cuda/rows.h:8: a kernel")

    def test_a_kernel_without_it_is_named(self):
        without = self.BEGINS.replace("  begin_kernel();\n", "  // begin_kernel();\n")
        self.write("src/backends/cuda/rows.cu", without)
        self.assert_names(lint.lint_kernels(self.root), "rows.cu:2")

    def test_what_nvcc_leaves_out_is_named_wherever_devices_run_it(self):
        counts = "__device__ int f(unsigned x) { return std::countr_zero(x); }\n"
        self.write("src/backends/cuda/rows.h", self.BEGINS + counts)
        own = "TILELOSS_HOST_DEVICE inline void f(int* x) { std::copy(x, x + 3, x + 3); }\n"
        self.write("src/core/rows.h", own)
        kernels, core = lint.lint_kernels(self.root)
        self.assert_names([kernels], "cuda/rows.h:7: std::countr_zero, which nvcc")
        self.assert_names([core], "core/rows.h:1: std::copy,")

    def test_what_the_host_alone_runs_may_call_it(self):
        self.write("src/backends/cuda/rows.h", self.BEGINS)
        self.write("src/backends/cuda/plan.cpp", "int f(unsigned x) { return std::popcount(x); }\n")
        self.assertEqual(lint.lint_kernels(self.root), [])

    def test_no_kernels_do_not_pass(self):
        self.assert_names(lint.lint_kernels(self.root), "no kernels")


class Sizes(LintTest):
    """A file that git does not track, or that was tracked and is gone, is nobody's burden."""

    def setUp(self):
        super().setUp()
        self.git("init", "-q")
        self.git("add", ".")

    def git(self, *arguments):
        subprocess.run(["git", "-C", str(self.root), *arguments], check=True, capture_output=True)

    def write_bytes(self, name, size, tracked=True):
        self.write(name, "x" * size)
        if tracked:
            self.git("add", "--force", name)

    def test_a_megabyte_passes_and_what_is_not_tracked_does_not_count(self):
        self.write_bytes("data", 1_000_000)
        self.write_bytes("build/out", 1_000_001, tracked=False)
        self.write_bytes("gone", 1_000_001)
        (self.root / "gone").unlink()
        self.assertEqual(lint.lint_sizes(self.root), [])

    def test_a_tracked_file_over_a_megabyte_is_named_with_its_size(self):
        self.write_bytes("tests/data/dw2", 1_000_001)
        self.assert_names(lint.lint_sizes(self.root), "tests/data/dw2: 1000001 bytes")

    def test_a_listed_file_may_be_larger_and_must_be(self):
        self.write_bytes("data", 1_000_001)
        with unittest.mock.patch.object(lint, "MAY_BE_LARGER", {"data"}):
            self.assertEqual(lint.lint_sizes(self.root), [])
            self.write("data", "small now")
            self.assert_names(lint.lint_sizes(self.root), "data: in MAY_BE_LARGER, but it is not")

    def test_a_folder_without_tracked_files_is_skipped(self):
        with tempfile.TemporaryDirectory() as folder, self.assertRaises(SystemExit) as stopped:
            lint.lint_sizes(folder)
        self.assertEqual(stopped.exception.code, 77)


class Format(LintTest):
    def setUp(self):
        super().setUp()
        self.write(".clang-format", "BasedOnStyle: Google\n")
        self.write("src/api/call.cpp", "int call();\n")

    def test_formatted_code_passes(self):
        self.assertEqual(lint.lint_format(self.root), [])

    def test_bad_indentation_is_named(self):
        self.write("src/core/bad.h", "struct Row {\n          int width;\n};\n")
        self.assert_names(lint.lint_format(self.root), "bad.h:1")


class Symbols(LintTest):
    HEADER = "#define TILELOSS_API\nTILELOSS_API int tileloss_a(void);\n"

    def library(self, text, *flags, name="libtileloss.so", soname="libtileloss.so.0"):
        return self.compile(name, text, "-shared", "-fPIC", f"-Wl,-soname,{soname}", *flags)

    def test_declared_functions_alone_pass(self):
        header = self.write("tileloss.h", self.HEADER)
        self.assertEqual(
            lint.lint_symbols(self.library('extern "C" int tileloss_a() { return 1; }'), header), []
        )

    def test_leaked_symbol_is_named(self):
        header = self.write("tileloss.h", self.HEADER)
        library = self.library(
            'extern "C" int tileloss_a() { return 1; }\nint helper() { return 2; }'
        )
        self.assert_names(lint.lint_symbols(library, header), "exports _Z6helperv")

    def test_missing_symbol_is_named(self):
        header = self.write(
            "tileloss.h", self.HEADER + "TILELOSS_API const char* tileloss_b(int);\n"
        )
        library = self.library('extern "C" int tileloss_a() { return 1; }')
        self.assert_names(lint.lint_symbols(library, header), "does not export tileloss_b")

    def test_run_times_alone_pass(self):
        self.assertEqual(lint.lint_needed(self.library("int a() { return 1; }")), [])

    def test_further_library_is_named(self):
        other = self.library("int b() { return 1; }", name="libother.so", soname="libother.so.1")
        library = self.library("int b(); int a() { return b(); }", other)
        self.assert_names(lint.lint_needed(library), "needs libother.so.1")

    def test_library_behind_a_run_time_is_named(self):
        third = self.library("int c() { return 1; }", name="libthird.so", soname="libthird.so.1")
        of_third = "int c(); int b() { return c(); }"
        other = self.library(of_third, third, name="libm.so.6", soname="libm.so.6")
        library = self.library(
            "int b(); int a() { return b(); }", other, "-Wl,-rpath-link," + str(self.root)
        )
        with unittest.mock.patch.dict("os.environ", LD_LIBRARY_PATH=str(self.root)):
            self.assert_names(lint.lint_needed(library), "needs libthird.so.1")

    def test_run_path_is_named(self):
        self.assert_names(
            lint.lint_needed(self.library("int a() { return 1; }", "-Wl,-rpath,/opt")),
            "run path: /opt",
        )

    def test_missing_soname_is_named(self):
        library = self.compile("libtileloss.so", "int a() { return 1; }", "-shared", "-fPIC")
        self.assert_names(lint.lint_needed(library), "no soname")


class IsaObjects(LintTest):
    G = "namespace tileloss::cpu::avx512 { int g() { return f(); } }"

    def test_weak_symbols_of_the_own_namespace_pass(self):
        own = "namespace tileloss::cpu::avx512 { inline int f() { return 1; } }"
        self.compile("kernels_avx512.cpp.o", own + self.G, "-c")
        self.assertEqual(lint.lint_isa_objects(self.root), [])

    def test_shared_inline_function_is_named(self):
        shared = "namespace tileloss { inline int f() { return 1; } }"
        self.compile("kernels_avx512.cpp.o", shared + self.G, "-c")
        self.assert_names(lint.lint_isa_objects(self.root), "tileloss::f()")

    def test_every_room_is_looked_at(self):
        self.compile("kernels_avx512.cpp.o", "int f();" + self.G, "-c")
        roof = "inline int f() { return 1; } int g() { return f(); }"
        self.compile("roof_avx2.cpp.o", roof, "-c")
        self.assert_names(lint.lint_isa_objects(self.root), "roof_avx2.cpp.o", "f()")

    def test_no_objects_does_not_pass(self):
        self.assert_names(lint.lint_isa_objects(self.root), "no kernels_")


class TileObjects(LintTest):
    ALL = (
        "ldtilecfg (%0); tilezero %%tmm0; tileloadd (%0,%0,1), %%tmm1; tileloaddt1 (%0,%0,1), %%tmm2; "
        "tdpbf16ps %%tmm2, %%tmm1, %%tmm0; tilestored %%tmm0, (%0,%0,1); tilerelease"
    )

    def object(self, name, instructions):
        code = f'void f(void* p) {{ asm volatile("{instructions}" : : "r"(p)); }}'
        return (
            self.compile(name, code, "-shared", "-fPIC")
            if name.endswith(".so")
            else self.compile(name, code, "-c")
        )

    def test_the_object_for_them_passes(self):
        library = self.object("libtileloss.so", self.ALL)
        self.object("matmul_amx.cpp.o", self.ALL)
        self.object("plain.cpp.o", "add %0, %0")
        self.assertEqual(lint.lint_tile_objects(self.root, library), [])

    def test_a_tile_instruction_elsewhere_is_named(self):
        library = self.object("libtileloss.so", self.ALL)
        self.object("matmul_amx.cpp.o", self.ALL)
        self.object("kernels_avx512.cpp.o", "tilerelease")
        self.assert_names(
            lint.lint_tile_objects(self.root, library), "kernels_avx512.cpp.o: tilerelease"
        )

    def test_a_missing_instruction_is_named(self):
        library = self.object("libtileloss.so", self.ALL.replace("tilezero %%tmm0; ", ""))
        self.object("matmul_amx.cpp.o", self.ALL)
        self.assert_names(lint.lint_tile_objects(self.root, library), "libtileloss.so: no tilezero")

    def test_no_object_does_not_pass(self):
        self.assert_names(
            lint.lint_tile_objects(self.root, self.object("libtileloss.so", self.ALL)),
            "no <name>_amx.cpp.o",
        )


if __name__ == "__main__":
    unittest.main()
