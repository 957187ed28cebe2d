"""An MCP server on standard input and output, without a package, which starts at once and can misbehave."""

import json
import os
import socket
import sys
import time

TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
calls = 0


def said(request: dict) -> dict:
    global calls
    match request["method"]:
        case "initialize":
            version = request["params"]["protocolVersion"]
            about = {"capabilities": {"tools": {}}, "serverInfo": {"name": "test", "version": "1"}}
            return {"result": {"protocolVersion": version, **about}}
        case "tools/list":
            about = f"Repeats a text, for {os.environ.get('BIRL_TEST_USER', 'nobody')}."
            about += f" It could {', '.join(could()) or 'nothing'}." if "probe" in sys.argv else ""
            tool = {"name": os.environ.get("BIRL_TEST_TOOL", "echo"), "description": about, "inputSchema": TEXT}
            return {"result": {"tools": [], "nextCursor": "next"} if "endless" in sys.argv else {"tools": [tool]}}
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
        case "refuse":
            return {"error": {"code": -32602, "message": "text must be longer"}}
        case "break":
            return {"error": {"code": -32603, "message": "the database is gone"}}
        case "fail":
            return {"result": {"content": [{"type": "text", "text": "there is none"}], "isError": True}}
        case "picture":
            return {"result": {"content": [{"type": "image", "data": "AAAA", "mimeType": "image/png"}]}}
        case "long":
            text = "a" * 20_000
    return {"result": {"content": [{"type": "text", "text": f"{calls}: {text}"}]}}


print("this line is no message", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if "id" in request:
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **said(request)}), flush=True)
