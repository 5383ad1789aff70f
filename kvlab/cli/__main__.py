"""`python -m kvlab.cli` is the same as `kvlab`."""

from kvlab.cli import main

main()
