"""The command `tileloss`.

command.py      the subcommands, errors and exit codes
arguments.py    arguments that several of them have
gradcheck.py    the kernels, an implementation or a model against the oracle
judge.py        outputs of something else against it, and inputs for them
checks.py       what these two have in common: from a config to its line of results
bench.py        times of a loss's passes, of the kernels or of tileloss.jax, beside the machine's roofs
sweep.py        times of every combination of a config's lists; sweep_cases.py: which there are, sweep_report.py: the best
info.py         what was built, what this machine is and can do
audit/          a list of cases against a list of implementations, each in a process of its own
implementations/  who can compute a case: torch, TRL, Liger, optax, ... and functions of the user's
report/         a page of result lines

config.py       the one reader of configs
requests.py     requests to libtileloss_judge.so, in a process of their own
results.py      the one reader and writer of result files
files.py        where an output may go, and whole files
printable.py    text from outside as messages show it; tables; "did you mean"
progress.py     how far the work is
trackers.py     result lines to wandb, Trackio, TensorBoard
case_file.py    its tensors in safetensors files
models.py       what a causal LM hands to its loss
model_case.py   a case of that
architectures.py  full-size models by name, for random weights
jax_bench.py    the bench's inputs and steps in JAX
timing.py       time and peak memory of a call

Nothing is judged here: tileloss.testing has the cases and the judge.
"""
