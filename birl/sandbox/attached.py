"""The first thing in a sandbox whose program is talked to while it runs: gives up its rights, and becomes the program.

Standard library only, because an interpreter without packages runs it.
"""

import json
import os
import sys

from birl.sandbox import confine, program


def main() -> None:
    order = json.loads(sys.argv[1])
    os.chdir(order["folder"])
    if os.geteuid() == 0 and order["kind"] not in program.NAMESPACES:
        confine.drop_capabilities()  # the user's own id is root's
    program.confined(order["limits"], order)
    command = order["command"]
    try:
        os.execve(command[0], command, order["environment"])
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")
