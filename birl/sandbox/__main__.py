"""`python -m birl.sandbox [KIND...]`: try every attack in every sandbox of this machine, and print the table."""

import sys

from birl.sandbox.hostile import main

sys.exit(main(sys.argv[1:]))
