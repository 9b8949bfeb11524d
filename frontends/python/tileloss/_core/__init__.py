"""The library without a framework: what every front end is made of. Nothing here imports torch, jax or numpy.

library.py    finds and loads libtileloss.so, turns its statuses into exceptions
structs.py    the C ABI's structs and numbers
slots.py      the one table of tensors: their places in the arguments, types, roles; what row outputs and row state there are
functions.py  functions and their options, as the library itself describes them
options.py    options by name: checked, encoded as a string and numbers, and as the library's struct
views.py      addresses, shapes and strides as the ABI's views
calls.py      plan and call
pages.py      memory on huge pages
"""
