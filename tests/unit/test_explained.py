"""`kvxfer plan --observed` from the outside: log lines, files and URLs, and one error for each that is wrong."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from test_prometheus import TEXT
from test_vllm_log import LINE as VLLM_LINE

from kvxfer import explained, plan, reading

LINE = "bytes=328204288,descriptors=40064,ms=173.8,post_ms=129.1"


def explained_as(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert plan.main([*argv, "--json", "-"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def refused(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 2) -> str:
    assert plan.main([*argv]) == status
    captured = capsys.readouterr()
    assert not captured.out
    (line,) = captured.err.splitlines()
    return line


@contextmanager
def serving(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """A server on this host whose GET is answered so; its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/metrics"
        finally:
            server.shutdown()
            thread.join(10)


def sends(text: bytes, status: int = 200) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.end_headers()
        handler.wfile.write(text)

    return answer


def test_a_log_line_is_answered_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--observed", LINE]) == 0
    text = capsys.readouterr().out
    assert "descriptor posting binds; a faster link wins at most 26 %" in text
    assert "8,192 bytes a descriptor, 3.2 µs to post a descriptor" in text
    assert "assumed" in text
    assert "400 Gb/s, the fastest of --link" in text


def test_what_is_open_says_what_to_measure(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--observed", "bytes=524288000,descriptors=32000,ms=58"]) == 0
    text = capsys.readouterr().out
    assert "undetermined" in text
    assert "measure  post_ms" in text


def test_figures_a_little_off_are_told_whether_one_or_several(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--observed", "bytes=1.018e9,ms=20", "--link", "400"]) == 0
    assert "its figures fit what is assumed within 2 % only" in capsys.readouterr().out
    assert plan.main([*("--observed", "bytes=4e9,ms=100"), *("--observed", "bytes=4e9,ms=108")]) == 0
    assert "they fit together within 5 % only" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["--measured", "/nonexistent.json"], ["--model", "nonsense"], ["--tokens", "abc"]])
def test_options_that_it_does_not_look_at_are_named(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert f"does not look at {argv[0]};" in refused(capsys, "--observed", LINE, *argv)


def test_each_of_several_is_named_and_those_that_it_takes_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(
        capsys, "--observed", LINE, "--rate", "1", "--link", "400", "--tp-prefill", "2", "--with-mtp", "--quiet"
    )
    assert "does not look at --with-mtp, --tp-prefill, --rate;" in told
    assert plan.main(["--observed", LINE, "--link", "400", "--quiet"]) == 0


def test_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    document = explained_as(capsys, "--observed", LINE, "--link", "200")
    (one,) = document["observed"]["explained"]
    assert one["binds"] == "posting"
    assert one["terms"]["posting"]["percent"] == pytest.approx([74.28, 74.28], abs=0.01)
    assert one["terms"]["wire"]["ms"] == pytest.approx([328204288 / 25e6, 44.7], abs=0.01)
    assert [prior["name"] for prior in document["observed"]["priors"]] == ["fixed cost", "bandwidth"]
    assert document["command"][:3] == ["kvxfer", "plan", "--observed"]


def test_several_lines_are_taken_together(capsys: pytest.CaptureFixture[str]) -> None:
    lines = ("bytes=1e9,descriptors=1000,ms=151,post_ms=1", "bytes=4e9,descriptors=1000,ms=451,post_ms=1")
    document = explained_as(capsys, *(word for line in lines for word in ("--observed", line)))
    for one in document["observed"]["explained"]:
        assert one["terms"]["fixed"]["ms"] == pytest.approx([50, 50], abs=8.1)


def test_directions_that_no_one_path_explains_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    lines = ("bytes=2684354560,ms=5368", "bytes=2684354560,ms=54.8")
    document = explained_as(capsys, "--link", "400", *(word for line in lines for word in ("--observed", line)))
    assert document["observed"]["explained"][0]["binds"] is None
    assert any("the same bytes took 98 times as long" in notice for notice in document["notices"])


def test_vllm_s_own_line_itself_and_in_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "vllm.log"
    path.write_text(f"INFO Started\n{VLLM_LINE}\n")
    assert plan.main(["--observed", VLLM_LINE]) == 0
    assert "descriptor posting binds; a faster link wins at most 26 %" in capsys.readouterr().out
    documents = [explained_as(capsys, "--observed", each) for each in (VLLM_LINE, str(path))]
    assert documents[0]["observed"] == documents[1]["observed"]
    assert any("MB are 2^20 bytes" in notice for notice in documents[1]["notices"])


def test_a_log_may_be_quoted_have_any_bytes_and_be_written_to(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    quoted = f'level=INFO msg="{VLLM_LINE}"'
    assert explained_as(capsys, "--observed", quoted)["observed"]["explained"][0]["binds"] == "posting"
    path = tmp_path / "vllm.log"
    path.write_bytes(b"prompt: \xff\n" + f"{VLLM_LINE}\n{VLLM_LINE[:150]}".encode())
    document = explained_as(capsys, "--observed", str(path))
    assert document["observed"]["explained"][0]["observation"]["ms"] == 173.8
    assert "line 3 ends without a newline: it may be cut off, and is left out" in document["notices"]


def test_of_a_long_log_the_end_is_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explained, "LARGEST_TEXT", 1 << 20)
    monkeypatch.setattr(explained, "END_OF_LOG", 1 << 19)
    path = tmp_path / "vllm.log"
    slow = VLLM_LINE.replace("173.8", "999")
    path.write_text(f"{slow}\n{'INFO nothing' * 90_000}\nINFO\n{VLLM_LINE}\n{VLLM_LINE[:150]}")
    document = explained_as(capsys, "--observed", str(path))
    assert document["observed"]["explained"][0]["observation"]["ms"] == 173.8
    told = " ".join(document["notices"])
    assert "line 3 ends without a newline" in told
    assert f"of '{path}' only the last 0.5 MiB were read; its lines are counted from there" in told
    path.write_text(f"{slow}\n" + "INFO nothing\n" * 90_000)
    assert "log' (its last 0.5 MiB) tells of no successful transfer with its Avg" in refused(
        capsys, "--observed", str(path)
    )


def test_metrics_from_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "metrics.txt"
    path.write_text(TEXT)
    document = explained_as(capsys, "--observed", str(path))
    assert document["observed"]["explained"][0]["binds"] == "posting"
    assert any("mean of 10 transfers" in notice for notice in document["notices"])


def test_metrics_from_a_url(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(sends(TEXT.encode())) as url:
        for each in (url, url.replace("http", "HTTP")):
            document = explained_as(capsys, "--observed", each)
            assert document["observed"]["explained"][0]["binds"] == "posting"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("byte=1,ms=2", "'byte=1' is not known (did you mean bytes?)"),
        ("Bytes=1e9,MS=30", "'Bytes=1e9' is not known (did you mean bytes?)"),
        ("ms=1,ms=2", "ms is there twice"),
        ("ms", "cannot be read"),
        ("ms=", "--observed ms= '' is not allowed"),
        ("ms=0", "give a number from 1e-06 to 1e+09"),
        ("ms=-1", "give a number from 1e-06 to 1e+09"),
        ("ms=nan", "give a number from 1e-06 to 1e+09"),
        ("ms=1e-320", "--observed ms= '1e-320' is not allowed"),
        ("ms=1,descriptors=0.5", "--observed descriptors= '0.5' is not allowed"),
        ("ms=1,", "'' is not known"),
        ("bytes=1e9", "has ms, or at least post_ms"),
        ("ms=1,post_ms=2", "post_ms 2 is more than ms 1"),
        ("ms=1,bytes=1e9", "above the line rate"),
    ],
)
def test_a_wrong_line_is_one_error(capsys: pytest.CaptureFixture[str], line: str, says: str) -> None:
    assert says in refused(capsys, "--observed", line)


def test_wrong_files_are_one_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "No such file" in refused(capsys, "--observed", str(tmp_path / "none"))
    assert "Is a directory" in refused(capsys, "--observed", str(tmp_path))
    path = tmp_path / "metrics.txt"
    path.write_text("# fine\n<html>\n")
    assert "line 2: '<html>' is no sample" in refused(capsys, "--observed", str(path))
    path.write_bytes(b"# fine\n\xff\n")
    assert "line 2: it is not text in UTF-8" in refused(capsys, "--observed", str(path))


@pytest.mark.parametrize("ms", ["1e-6", "1", "1e9"])
@pytest.mark.parametrize("post_ms", [None, "1e-6", "1", "1e9"])
@pytest.mark.parametrize("size", [None, "1", "1e18"])
@pytest.mark.parametrize("descriptors", [None, "1", "1e12"])
def test_at_the_ends_of_the_ranges_all_is_finite(
    ms: str, post_ms: str | None, size: str | None, descriptors: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"ms": ms, "post_ms": post_ms, "bytes": size, "descriptors": descriptors}
    line = ",".join(f"{name}={value}" for name, value in given.items() if value is not None)
    status = plan.main(["--observed", line, "--json", "-"])
    told = capsys.readouterr()
    if status == 0:
        json.loads(told.out, parse_constant=pytest.fail)
    else:
        assert status == 2, told.err


def test_a_fifo_that_nobody_writes_to_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reading, "PIPE_S", 0.2)
    path = tmp_path / "fifo"
    os.mkfifo(path)
    for option in ("--observed", "--lengths", "--prefill-csv", "--measured", "--model"):
        told = refused(capsys, option, str(path))
        assert str(path) in told
        assert "it is no regular file, and has not ended within 0.2 s" in told


def test_wrong_urls_are_one_error(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(sends(b"gone", status=404)) as url:
        assert "answered 404 Not Found" in refused(capsys, "--observed", url)
    with serving(sends(b"<html>\n")) as url:
        assert "line 1: '<html>' is no sample" in refused(capsys, "--observed", url)
    assert "cannot be fetched" in refused(capsys, "--observed", url, status=3)  # that server has ended


def test_a_text_without_end_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explained, "LARGEST_TEXT", 1 << 20)
    with serving(sends(b"#" * (3 << 20))) as url:
        assert "more than 1 MiB" in refused(capsys, "--observed", url)
    assert "more than 1 MiB" in refused(capsys, "--observed", "/dev/zero")
