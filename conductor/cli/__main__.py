"""`python -m conductor.cli`."""

from conductor.cli import main

main()
