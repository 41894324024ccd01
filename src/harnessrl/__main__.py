"""`python -m harnessrl`."""

from harnessrl.cli import main

main()
