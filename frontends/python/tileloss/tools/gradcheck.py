"""`tileloss gradcheck`: the kernels, or another implementation, against the double-precision oracle, forward and backward, on one
config or a model's own numbers."""

from __future__ import annotations

import argparse
from typing import Any

from tileloss.tools import arguments
from tileloss.tools.checks import FAILED, Job
from tileloss.tools.printable import escaped

_OWN = "tileloss"  # the library's own kernels
_index = arguments.integer(0, 2**63 - 1)
_FOOTER = """\
Keys of the config, besides the options of the loss:
  level (logits, linear), loss, batch_size, seq_len, vocab_size, dtype, seed, ignore_prob, token_weights and class_weights
  (none, random), allowed (none, all, sparse, half, runs, shared), allowed_rows, upstream (ones, random, per_row), outputs,
  mutants, strict, expect_mostly_zero, output
  source: kind (synthetic, safetensors); synthetic: distribution, std, offset; safetensors: path, and the names of its
    tensors logits, labels and allowed
  kernel: device, isa, threads, schedule, row_block, vocab_block, cuda_kernel, in_place, row_groups
  tolerances: ulp, loss_atol, logp_max_abs, dlogits_max_abs, dlogits_max_rel
Of policy losses also
  preset, sequences (batch, offsets), mask_prob, old_logp_noise_scale, ref_logp_noise_scale, sampler_logp_noise_scale
  source: the names of mask, advantages, old_logp, ref_logp, sampler_logp
Of distillation also
  mask_prob; source: teacher (near, same, a distribution; the name of a tensor), teacher_path, teacher_noise, special_rows,
    the name of mask
Of soft_cross_entropy also
  mask_prob; source: probs_dtype, probs_zeros, special_rows, the name of mask
Of sparse_distillation also
  mask_prob; source: teacher_columns, teacher_std, special_rows, the name of mask
Of logprobs also
  labels_per_row (1 to 1024)
With level: linear (fused with the LM head) also
  hidden_size, compute_dtype (auto, float32, bfloat16), head_layout (vh, hv), bias (none, random), rank (0 to 512),
  gradients (dhidden, dhead, dbias, dhidden_r, dhead_r), dhead_dtype (float32, head), accumulate
  source: the names of hidden, lm_head, hidden_r and head_r; kernel: workspace_bytes; of distillation: teacher_hidden_size,
    source: teacher_std
Of a transformers model, in place of source
  model_path, teacher_model_path, text
Where lines of results go besides the file: tracker, wandb_project, wandb_mode, wandb_name
Old names: kernel.block_size, kernel.time_block, mesh_shape
docs/users/gradcheck.md says more, configs/ has examples.
Checked: every row output asked for, the loss, and the gradient both from value_and_grad and from a backward that starts
from the forward's row state. --row shows one row at every stage instead. The last line is PASS, or FAIL and what failed.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _FOOTER
    parser.add_argument("--frontend", choices=["jax"], help="the same as --impl tileloss-jax")
    parser.add_argument(
        "--impl",
        metavar="NAME",
        help="who computes: a name of `tileloss audit --list`, module:function or FILE.py:function (docs/users/audit.md)",
    )
    arguments.implementation(parser)
    arguments.config(parser, "kernel.in_place=true")
    arguments.mutants(parser)
    own = parser.add_argument_group("of the library's own kernels")
    own.add_argument(
        "--strict",
        action="store_true",
        help="run them on guard-page buffers as well; an access outside any tensor fails",
    )
    own.add_argument(
        "--device", metavar="NAME", help="cpu, cuda or cuda:N, over copies of all tensors"
    )
    own.add_argument(
        "--row",
        type=_index,
        metavar="N",
        help="show one row at every stage, kernel beside oracle, in place of all gates",
    )
    own.add_argument(
        "--column",
        type=_index,
        metavar="N",
        help="with --row: the gradient at this column, in place of the worst",
    )
    arguments.quiet(parser)


def run(options: argparse.Namespace) -> int:
    name = _name(options)
    sets = [] if options.device is None else [f"kernel.device={options.device}"]
    job = Job(options, sets, strict=options.strict)

    def work() -> int:
        if name != _OWN:
            return _judge(job, name, options)
        if options.row is None:
            return job.check("gradcheck", mutants=options.mutants, strict=options.strict)
        column = {} if options.column is None else {"column": options.column}
        return job.check("trace", row=options.row, **column)

    return job.run(work)


def _name(options: argparse.Namespace) -> str:
    """Who computes. Looks at what does not go together."""
    if options.frontend and options.impl:
        raise ValueError("expected one of --impl and --frontend")
    name = "tileloss-jax" if options.frontend else str(options.impl or _OWN)
    if options.implementation is not None and name != "tileloss-jax":
        raise ValueError(f"--implementation: expected --impl tileloss-jax, got --impl {name}")
    own = ("strict", "device", "row", "column")
    if name != _OWN and any(getattr(options, flag) not in (None, False) for flag in own):
        raise ValueError(
            f"--strict, --device, --row and --column are of the library's own kernels, got --impl {name}"
        )
    if options.row is not None and (options.mutants or options.strict):
        raise ValueError("--row: expected neither --mutants nor --strict beside it")
    if options.column is not None and options.row is None:
        raise ValueError("--column: expected --row beside it")
    if name == _OWN:
        return name
    from tileloss.tools.implementations import check_name, hide_gpus

    check_name(name)
    if name != "tileloss-jax":
        hide_gpus()
    return name


def _judge(job: Job, name: str, options: argparse.Namespace) -> int:
    """1 as well where the implementation raises, or leaves out what the case asks for."""
    from tileloss.testing.case import Case
    from tileloss.testing.outputs import Missing, prepare

    drawn = job.draw()
    case = Case(drawn.tensors, **drawn.event("case")["case"])
    returned, producer = _compute(case, name, options.implementation)
    if producer is None:
        return FAILED
    try:
        outputs = prepare(case, returned)
    except (Missing, TypeError) as error:
        print(f"FAIL: {escaped(str(error))}")
        return FAILED
    return job.judge(outputs, producer, mutants=options.mutants or case.mutants)


def _compute(case: Any, name: str, variant: str | None) -> tuple[Any, str | None]:
    """What was returned and who made it; None in the latter's place where the implementation raised, which is said."""
    if name == "tileloss-jax":
        from tileloss.tools.implementations import own

        return own.through_jax(case, variant), own.jax_producer(variant)

    from tileloss.testing.case import Refused
    from tileloss.testing.outputs import describe
    from tileloss.tools.implementations import load

    implementation = load(name)
    try:
        return implementation(case), f"{name}, {implementation.package}"
    except Refused as refusal:
        raise ValueError(f"--impl {name}: refused: {refusal}") from refusal
    except Exception as error:
        print(f"FAIL: {escaped(describe(error))}")
        return None, None
