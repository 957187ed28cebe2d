import http.client
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from birl.view.command import STATIC
from tests.track.traces import ahead, write
from tests.view.browser import serving
from tests.view.runs import make


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("runs")
    make(folder / "demo")
    with serving(folder) as address:
        yield address


def ask(url: str, path: str, method: str = "GET", host: str | None = None) -> tuple[int, dict[str, str], bytes]:
    """As it is: no client that would clean up the path."""
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=10)
    try:
        connection.putrequest(method, path, skip_host=True)
        if host != "":
            connection.putheader("Host", host or where.netloc)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def test_every_answer_forbids_foreign_scripts(url: str) -> None:
    for path in ("/", "/static/app.js", "/api/runs", "/nothing", "/api/runs/x", "/static/../server.py"):
        _, headers, _ = ask(url, path)
        assert headers["content-security-policy"].startswith("default-src 'self';"), path
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff" and "access-control-allow-origin" not in headers


def test_the_report_of_a_run_is_served_and_runs_nothing_else(url: str) -> None:
    run = json.loads(ask(url, "/api/runs")[2])["runs"][0]
    status, headers, body = ask(url, f"/report?run={run['id']}")
    assert status == 200 and b"Training reward" in body and body.count(b"</script>") == 2
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-")
    assert "; sandbox allow-scripts;" in policy
    assert len(run["curve"]) == 30 and run["curve"][-1][0] == 30 and run["curve"][-1][1] == pytest.approx(run["reward"])
    for wrong in ("", "?run=none"):
        status, headers, _ = ask(url, f"/report{wrong}")
        assert status == 400 and headers["content-security-policy"].startswith("default-src 'self'")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    write(make(tmp_path / "demo"), ahead())
    (tmp_path / "demo/summary.json").write_text('{"next": true}')
    (tmp_path / "demo/metrics.jsonl").write_text('{"step": 1}\nx\n{"step": 2}\n')
    (tmp_path / "demo/validation.jsonl").unlink(missing_ok=True)
    with serving(tmp_path) as address:
        run = json.loads(ask(address, "/api/runs")[2])["runs"][0]["id"]
        status, _, body = ask(address, f"/report?run={run}")
        assert status == 400 and b"metrics.jsonl, line 2: not JSON" in body
        assert ask(address, f"/api/waiting/trace?run={run}")[0] == 200  # it needs no other file
        (tmp_path / "demo/metrics.jsonl").write_text("")
        assert ask(address, f"/report?run={run}")[0] == 200
        os.mkfifo(tmp_path / "demo/validation.jsonl")
        status, _, body = ask(address, f"/report?run={run}")
        assert status == 400 and b"validation.jsonl: it is a named pipe" in body


def test_the_figures_of_a_run_are_told_in_order_and_those_that_never_change(url: str) -> None:
    (run,) = json.loads(ask(url, "/api/runs")[2])["runs"]
    told = json.loads(ask(url, f"/api/metrics?run={run['id']}")[2])
    assert [one["name"] for one in told["figures"]][:3] == ["reward/mean", "reward/std", "validation/all/pass@1"]
    assert told["figures"][0]["heading"] == "Training reward, mean [reward]" and told["figures"][0]["about"]
    constant = told["runs"][0]["constant"]
    assert constant["groups/kept"] == 8 and "kl" not in constant and "reward/mean" not in constant


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1", "127.0.0.1:1", "0.0.0.0", "localhost.evil"]
)
def test_another_name_is_refused(url: str, host: str) -> None:
    for path in ("/", "/api/runs", "/static/app.js"):
        status, _, body = ask(url, path, host=host)
        assert status == 403 and "ssh -L" in json.loads(body)["error"]


def test_this_machines_names_are_allowed(url: str) -> None:
    port = urlsplit(url).port
    assert [ask(url, "/", host=f"{name}:{port}")[0] for name in ("127.0.0.1", "localhost", "LOCALHOST")] == [200] * 3
    assert ask(url, "/", host="")[0] in (400, 403)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"])
def test_nothing_can_be_written(url: str, method: str) -> None:
    assert ask(url, "/api/runs", method)[0] == 405


@pytest.mark.parametrize(
    "path",
    [
        *("/static/../server.py", "/static/%2e%2e/server.py", "/static/..%2fserver.py", "/static//etc/passwd"),
        *("/static/", "/static/%00", "/static/....//server.py", "/../../etc/passwd", "/static/..\\server.py"),
    ],
)
def test_only_files_of_the_page_are_served(url: str, path: str) -> None:
    status, _, body = ask(url, path)
    assert status in (400, 404), body[:100]
    assert b"import" not in body and b"root:" not in body


def test_errors_are_json_and_name_the_fix(url: str) -> None:
    for path, words in {
        "/nothing": "the page is at /",
        "/api/metrics": "Choose one or more",
        "/api/metrics?run=x": "no run 'x'",
        "/api/values?run=x&at=what": "a number is needed",
        "/api/curves?run=x&x=y": "no run",
    }.items():
        status, headers, body = ask(url, path)
        assert 400 <= status < 500 and words in json.loads(body)["error"], path
        assert headers["content-type"] == "application/json"


def test_a_name_in_an_error_is_escaped_as_json(url: str) -> None:
    status, headers, body = ask(url, "/api/metrics?run=%3Cscript%3E%ED%A0%80%E2%80%AE%22")
    assert status == 400 and "<script>" in json.loads(body)["error"] and headers["content-type"] == "application/json"


WAYS_IN = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "@import")


def test_the_page_has_no_outside_part_and_no_inline_script() -> None:
    for path in filter(Path.is_file, STATIC.iterdir()):
        text = path.read_text("utf-8")
        addresses = set(re.findall(r"https?://[^\s\"'`)]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not addresses, (path.name, addresses)
        for word in WAYS_IN:
            assert word not in text.replace("innerHTML is never used", ""), (path.name, word)
    index = (STATIC / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=|<style", index)


def test_files_of_the_page_are_short() -> None:
    long = {p.name: n for p in STATIC.glob("*.js") if (n := len(p.read_text("utf-8").splitlines())) > 320}
    assert not long
