"""What of the command `tileloss` needs Python.

command.py      the subcommands, errors and exit codes
gradcheck.py    a case's inputs from the compiled program, outputs by the front end, and back to be judged
bench.py        the times of the front end's passes, beside the machine's roofs
jax_case.py     a case's outputs by tileloss.jax
jax_bench.py     the bench's inputs and steps in JAX
case_file.py    a case's tensors in safetensors files
memory.py       the peak memory of this process

The compiled program draws the inputs, holds the outputs against the oracle and measures the roofs; nothing is judged here.
"""
