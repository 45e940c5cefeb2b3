"""`python -m syncline` is the command line."""

from syncline.cli import main

main()
