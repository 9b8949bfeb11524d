"""A commit of a checkout, run on another machine that ssh reaches.

command.py   the actions of `tileloss remote`: start, follow, status, fetch, stop, remove, list
git.py       the checkout, and a bundle of what the other machine lacks
ssh.py       a script on the other machine, secrets to it by standard input
scripts.py   those scripts, for any POSIX shell
follow.py    a log from where it was, across lost connections
fetch.py     a run's files
state.py     the runs that were started from here
"""
