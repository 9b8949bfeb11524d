"""The library without a framework: what every front end is made of. Nothing here imports torch, jax or numpy.

library.py    finds and loads libtileloss.so, turns its statuses into exceptions
structs.py    the C ABI's structs and numbers
functions.py  functions and their options, as the library itself describes them; options by name, and as the library's struct
arguments.py  what the front ends' functions take by keyword; other_names.py  their signatures, and what others call it
slots.py      the one table of tensors: their places in the arguments, types, roles; each function's; what row state there is
views.py      how rows lie in memory, in the ABI's words
calls.py      the arguments of a call, plan and call
row_states.py row states of parts of a vocabulary
pages.py      memory on huge pages
text.py       text from outside as messages show it
"""
