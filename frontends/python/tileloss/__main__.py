"""`python -m tileloss`: the console script where it is not installed."""

from tileloss._program import main

main()
