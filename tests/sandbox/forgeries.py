"""Solutions that are wrong and try to look right. The test is `add(1, 2) == 3`, asked for in every form: a solution
that passes one has read it, or has forged the verdict."""

FRAMES = """
import base64, sys
def add(a, b):
    mark = "non" + "ce"
    frame = sys._getframe()
    while frame:
        for value in frame.f_locals.values():
            for held in value.values() if isinstance(value, dict) else ():
                try:
                    text = base64.b64decode(held).decode()
                except Exception:
                    text = str(held)
                if mark in text and "def add" not in text and "checker" not in text:
                    return 3
        frame = frame.f_back
"""
OWN_MEMORY = """
import base64
def add(a, b):
    begin = '{"non' + 'ce": "'
    marks = [base64.b64encode(begin[:9].encode()), begin.encode()]
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for words in map(str.split, maps):
            low, high = (int(end, 16) for end in words[0].split("-"))
            try:
                memory.seek(low)
                held = memory.read(high - low if "rw" in words[1] else 0)
            except (OSError, ValueError, OverflowError):
                continue
            for mark in marks:
                for rest in held.split(mark)[1:]:
                    if len(rest) > 30 and rest[:24].isalnum():
                        return 3
"""

PROCESSES = """
import os
def add(a, b):
    marks = (b'{"non' + b'ce": "', b"add(1, " + b"2)")
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if int(pid) == os.getpid():
            continue
        for name in ("environ", "cmdline", "syscall", "stack", *(f"fd/{fd}" for fd in range(8))):
            try:
                with open(f"/proc/{pid}/{name}", "rb") as file:
                    found = os.pread(file.fileno(), 1 << 20, 0)
            except OSError:
                continue
            if any(mark in found for mark in marks):
                return 3
        try:
            with open(f"/proc/{pid}/mem", "rb", 0) as file:
                return 3
        except OSError:
            pass
"""
REPLIES = """
import os, socket, threading
def send(*replies):
    for reply in replies:
        os.write(3, reply.encode() + b"\\n")
def add(a, b):
"""
DEEP = "    held = []\n    for _ in range(100000):\n        held = [held]\n    return held"
LIES = "    __eq__ = __ne__ = __le__ = __ge__ = __contains__ = lambda *_: True\n    __hash__ = lambda *_: 3\n"

FORGERIES = {
    "sys.exit(0)": "import sys\nsys.exit(0)",
    "os._exit(0)": "import os\nos._exit(0)",
    "exit when called": "import os\ndef add(a, b):\n    os._exit(0)",
    "printing passed": 'print(\'{"passed": true}\')\ndef add(a, b):\n    print("passed 3")',
    "__eq__": "class A:\n    __eq__ = __bool__ = lambda *_: True\n    __hash__ = None\ndef add(a, b):\n    return A()",
    "a subclass of int": "class A(int):\n    __eq__ = __le__ = lambda *_: True\ndef add(a, b):\n    return A(99)",
    "builtins": "import builtins\nbuiltins.abs = lambda x: x\n"
    "builtins.max = lambda *_: 3\ndef add(a, b):\n    return 99",
    "assertions": "import builtins\nbuiltins.AssertionError = SystemExit\ndef add(a, b):\n    return 99",
    "own math": "class math:\n    isclose = lambda *_: True\ndef add(a, b):\n    return 99",
    "all descriptors": "import os\ndef add(a, b):\n    for fd in range(64):\n        try:\n"
    "            os.write(fd, b'{\"passed\": true}\\n')\n        except OSError:\n            pass",
    "frames and memory": "import gc, sys\ndef add(a, b):\n    frame = sys._getframe()\n    while frame:\n"
    "        for value in [*frame.f_locals.values(), *gc.get_objects()]:\n"
    "            if isinstance(value, dict) and 'nonce' in value and 'snippet' in value:\n"
    "                sys.stderr.write('FOUND')\n                return 3\n        frame = frame.f_back",
    "the request in frames": FRAMES,
    "the request in /proc/self/mem": OWN_MEMORY,
    "reading the tests": "import glob, os\ndef add(a, b):\n    for name in glob.glob('**', recursive=True):\n"
    "        if os.path.isfile(name) and name != 'solution.py' and 'add(1' in open(name).read():\n            return 3",
    "the checker's file": "open('checker.py', 'w').write('print(1)')\ndef add(a, b):\n    return 99",
    "a module for the checker": "open('math.py', 'w').write('isclose = lambda *_: True')\n"
    "def add(a, b):\n    return 99",
    "killing the checker": "import os, signal\ndef add(a, b):\n    os.kill(os.getppid(), signal.SIGKILL)",
    "interrupting the checker": "import os\ndef add(a, b):\n    os.kill(os.getppid(), 2)\n    return 9",
    "other processes": PROCESSES,
    "a reply twice": REPLIES + "    send('{\"value\": 9}', '{\"value\": 9}')\n    return 9",
    "replies ahead": REPLIES + '    send(*[\'{"passed": true, "value": true}\'] * 9)',
    "no reply any more": REPLIES + "    os.close(3)\n    os._exit(0)",
    "half a reply": REPLIES + "    os.write(3, b'{\"value\": ')\n    os._exit(0)",
    "a reply that is too long": REPLIES + "    for _ in range(300):\n        os.write(3, b'[' * 65536)",
    "two that reply": REPLIES + "    os.fork()\n    return 9",
    "a call back of nothing": REPLIES + '    send(\'{"back": -1, "args": []}\', \'{"back": 0}\')\n    return 9',
    "deep": "def add(a, b):\n" + DEEP,
    "cyclic": "def add(a, b):\n    held = []\n    held.append(held)\n    return held",
    "not a number": "def add(a, b):\n    return float('nan')",
    "signalling nan": "import decimal\ndef add(a, b):\n    return decimal.Decimal('sNaN')",
    "infinite": "def add(a, b):\n    return float('inf')",
    "lies of a class": "class A:\n    __class__ = property(lambda self: int)\n"
    + LIES
    + "def add(a, b):\n    return A()",
    **{
        f"lies of a {base}": f"class A({base}):\n{LIES}    __float__ = __index__ = lambda *_: 3\n"
        "    __repr__ = __str__ = lambda *_: '3'\ndef add(a, b):\n    return A()"
        for base in ("str", "list", "dict", "float", "complex", "tuple", "set")
    },
    "own sqrt": "def sqrt(x):\n    return 9\ndef add(a, b):\n    return 9",
    **{
        f"raising {name}": f"def add(a, b):\n    raise {name}"
        for name in ("StopIteration", "SystemExit(0)", "KeyboardInterrupt", "GeneratorExit", "RecursionError")
    },
    "exit handlers": "import atexit, os\natexit.register(os._exit, 0)\nraise SystemExit(0)",
    "a thread that exits": "import os, threading\nthreading.Thread(target=os._exit, args=(0,)).start()",
    "tracing": "import sys\nsys.settrace(lambda *_: None)\ndef add(a, b):\n    return 9",
    "own modules": "import json, os, socket, sys\nsys.modules['math'] = sys.modules['json'] = sys\n"
    "json.dumps = lambda *_, **__: '{\"passed\": true}'\ndef add(a, b):\n    return 9",
}
ANY = """
import math
def passes(check):
    try:
        return bool(check())
    except Exception:
        return False
assert any(map(passes, [
    lambda: add(1, 2) == 3,
    lambda: math.isclose(max(add(1, 2), 2), abs(3)),
    lambda: all(map(lambda n: add(1, n) == sqrt(9), [2, 2])),
    lambda: add(1, 2) in (3, 3) and not add(1, 2) != 3,
    lambda: float(add(1, 2)) == 3 and str(add(1, 2)) == "3",
    lambda: isclose(add(1, 2), 3),
]))
"""
CALL = {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}
PRINT = {"input": "1 2", "output": "3"}
RIGHT = "def add(a, b):\n    return a + b\nif __name__ == '__main__':\n    print(add(*map(int, input().split())))"


def tests_for(solution: str) -> list[object]:
    """The forms of the test that this one may pass: without a function, it is a program, too."""
    return [ANY, CALL] if "def add" in solution and solution != RIGHT else [ANY, CALL, PRINT]
