"""An MCP server on standard input and output, without a package, which starts at once and can misbehave."""

import json
import os
import socket
import subprocess
import sys
import time

TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
calls = 0


def said(request: dict) -> dict:
    global calls
    match request["method"]:
        case "initialize":
            version = "1999-01-01" if "old" in sys.argv else request["params"]["protocolVersion"]
            about = {"capabilities": {"tools": {}}, "serverInfo": {"name": "test", "version": "1"}}
            return {"result": {"protocolVersion": version, **about}}
        case "tools/list":
            about = f"Repeats a text, for {os.environ.get('BIRL_TEST_USER', 'nobody')}."
            about += f" It could {', '.join(could()) or 'nothing'}." if "probe" in sys.argv else ""
            tool = {"name": os.environ.get("BIRL_TEST_TOOL", "echo"), "description": about, "inputSchema": TEXT}
            if "bare" in sys.argv:
                del tool["inputSchema"]
            if "endless" in sys.argv:
                return {"result": {"tools": [], "nextCursor": "next"}}
            return {"result": {"tools": [tool, tool] if "twice" in sys.argv else [tool]}}
        case "tools/call":
            calls += 1
            return answer(request["params"]["arguments"].get("text"))
        case other:
            return {"error": {"code": -32601, "message": f"there is no method {other}"}}


def could() -> list[str]:
    """What a confined server could not."""
    result = []
    for name, attempt in (
        ("read", lambda: open("/etc/passwd").close()),
        ("write", lambda: open(__file__, "a").close()),
        ("connect", lambda: socket.socket().close()),
    ):
        try:
            attempt()
            result.append(name)
        except OSError:
            continue
    return result


def answer(text: object) -> dict:
    match text:
        case "die":
            print("the disk is full", file=sys.stderr, flush=True)
            os._exit(3)
        case "hang":
            time.sleep(1000)
        case "flood":
            os.write(1, b"x" * (100 << 20))
        case "broken":
            print('{"jsonrpc": "2.0", "id": 3, "result": {"content": [', flush=True)
            time.sleep(1000)
        case "close":
            os.close(1)
            time.sleep(1000)
        case "leave":
            subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(1000)  # {os.getcwd()}"])
            os._exit(4)
        case "stray":
            where = "import time; time.sleep(1000)  # a stray of mcp_server"
            subprocess.Popen([sys.executable, "-c", where], start_new_session=True)
        case "noise":
            for method in ("notifications/of_its_own", "notifications/tools/list_changed", "sampling/of_its_own"):
                id = {} if method.startswith("n") else {"id": "its own"}
                print(json.dumps({"jsonrpc": "2.0", "method": method, **id}), flush=True)
        case "refuse":
            return {"error": {"code": -32602, "message": "text must be longer"}}
        case "break":
            return {"error": {"code": -32603, "message": "the database is gone"}}
        case "fail":
            return {"result": {"content": [{"type": "text", "text": "there is none"}], "isError": True}}
        case "picture":
            return {"result": {"content": [{"type": "image", "data": "AAAA", "mimeType": "image/png"}]}}
        case "video":
            return {"result": {"content": [{"type": "video"}, {"type": "resource", "resource": {"uri": "file:///a"}}]}}
        case "long":
            text = "a" * 20_000
    return {"result": {"content": [{"type": "text", "text": f"{calls}: {text}"}]}}


print("this line is no message", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if "id" in request and "method" in request:
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **said(request)}), flush=True)
        if request.get("params", {}).get("arguments") == {"text": "last"}:
            os._exit(5)
