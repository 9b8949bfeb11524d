"""A list of cases against a list of implementations, each in a process of its own; and what moves where nothing should.

command.py           the command line
cells.py             a cell: case, outputs, verdict
bugs/                known bugs, a case each, and an implementation that has it
calls.py             how an implementation is called where one call is not enough
cases.py             the cases: gradcheck configs, and tensors that no config can draw
child.py, worker.py  the process of an implementation, from outside and from inside
table.py             the tables
releases.py          a package release by release
invariance.py        the same numbers with another batch, order, chunk, number of threads or shards
invariance_model.py  head against body of a causal LM
"""
