import hashlib
import http.client
import os
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pipeline.data import download as module
from pipeline.data.download import Archive, download, resolve
from pipeline.data.hub import snapshot
from pipeline.errors import UserError

CONTENT = bytes(range(256)) * 4096
ARCHIVE = Archive("PyPI", "novels", "1.0", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
FILE, PART = "novels-1.0.whl", "novels-1.0.whl.part"


@dataclass
class Server:
    """A web server of one file, with the faults of real ones."""

    url: str = ""
    content: bytes = CONTENT
    ranges: bool = True
    refuse_ranges: bool = False
    cut_at: int | None = None
    """Close the first connection after so many bytes."""
    asked: list[str | None] = field(default_factory=list)
    """The Range header of each request."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/moved":
                self.send_response(302)
                self.send_header("Location", "/")
                self.end_headers()
                return
            wanted = self.headers.get("Range")
            state.asked.append(wanted)
            start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and state.ranges else 0
            if wanted and (state.refuse_ranges or start >= len(state.content)):
                self.send_error(http.client.REQUESTED_RANGE_NOT_SATISFIABLE)
                return
            body = state.content[start:]
            self.send_response(206 if wanted and state.ranges else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body if state.cut_at is None else body[: state.cut_at])
            state.cut_at = None

        def log_message(self, format: str, *args: object) -> None:
            pass

    served = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{served.server_address[1]}/"
    monkeypatch.setattr(module, "resolve", lambda archive: state.url)
    monkeypatch.setattr(module, "PAUSE_SECONDS", 0)
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    thread = threading.Thread(target=served.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield state
    served.shutdown()
    served.server_close()


def test_an_archive_is_downloaded_once(server: Server, tmp_path: Path) -> None:
    path = download(ARCHIVE, tmp_path)
    assert path.read_bytes() == CONTENT
    assert download(ARCHIVE, tmp_path) == path
    assert server.asked == [None]
    assert not (tmp_path / PART).exists()


def test_a_cut_connection_is_taken_up_where_it_broke(server: Server, tmp_path: Path) -> None:
    server.cut_at = 300_000
    assert download(ARCHIVE, tmp_path).read_bytes() == CONTENT
    assert server.asked == [None, "bytes=300000-"]


def test_a_later_call_goes_on_with_what_an_earlier_one_left(server: Server, tmp_path: Path) -> None:
    (tmp_path / PART).write_bytes(CONTENT[:1000])
    assert download(ARCHIVE, tmp_path).read_bytes() == CONTENT
    assert server.asked == ["bytes=1000-"]


def test_a_complete_part_needs_no_request(server: Server, tmp_path: Path) -> None:
    (tmp_path / PART).write_bytes(CONTENT)
    assert download(ARCHIVE, tmp_path).read_bytes() == CONTENT
    assert server.asked == []


@pytest.mark.parametrize("fault", [{"ranges": False}, {"refuse_ranges": True}])
def test_a_server_without_ranges_starts_again(server: Server, tmp_path: Path, fault: dict[str, bool]) -> None:
    for name, value in fault.items():
        setattr(server, name, value)
    (tmp_path / PART).write_bytes(b"not the beginning of the file")
    assert download(ARCHIVE, tmp_path).read_bytes() == CONTENT


def test_a_redirect_keeps_the_range(server: Server, tmp_path: Path) -> None:
    server.url += "moved"
    (tmp_path / PART).write_bytes(CONTENT[:1000])
    assert download(ARCHIVE, tmp_path).read_bytes() == CONTENT
    assert server.asked == ["bytes=1000-"]


def test_a_local_mirror_is_read_from_its_files(server: Server, tmp_path: Path) -> None:
    (tmp_path / "mirror.whl").write_bytes(CONTENT)
    (tmp_path / PART).write_bytes(b"something old")
    server.url = (tmp_path / "mirror.whl").as_uri()
    assert download(ARCHIVE, tmp_path).read_bytes() == CONTENT


def test_a_wrong_hash_names_both_and_removes_the_file(server: Server, tmp_path: Path) -> None:
    server.content = CONTENT[:-1] + b"?"
    with pytest.raises(
        UserError, match=f"PyPI novels 1.0.*{ARCHIVE.sha256}.*{hashlib.sha256(server.content).hexdigest()}"
    ):
        download(ARCHIVE, tmp_path)
    assert not {FILE, PART} & {path.name for path in tmp_path.iterdir()}


def test_a_longer_file_is_refused(server: Server, tmp_path: Path) -> None:
    server.content = CONTENT + b"!"
    archive = replace(ARCHIVE, size=len(CONTENT) - 1)
    with pytest.raises(UserError, match=r"expected 1,048,575 bytes, got 1,048,576"):
        download(archive, tmp_path)
    assert not (tmp_path / PART).exists()


def test_a_shorter_file_is_refused(server: Server, tmp_path: Path) -> None:
    server.content = CONTENT[:1000]
    with pytest.raises(UserError, match=r"PyPI novels 1\.0: could not be downloaded .* kept"):
        download(ARCHIVE, tmp_path)
    assert not (tmp_path / FILE).exists()


def test_without_a_connection_one_line_says_so_and_the_part_stays(server: Server, tmp_path: Path) -> None:
    (tmp_path / PART).write_bytes(CONTENT[:1000])
    server.url = "http://127.0.0.1:9/"  # the discard port: nobody listens
    with pytest.raises(UserError, match=r"PyPI novels 1\.0: could not be downloaded .*refused.* kept.*again") as caught:
        download(ARCHIVE, tmp_path)
    assert "\n" not in str(caught.value)
    assert (tmp_path / PART).read_bytes() == CONTENT[:1000]


def test_a_truncated_cache_is_downloaded_again(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    download(ARCHIVE, tmp_path).write_bytes(CONTENT[:5000])
    assert download(ARCHIVE, tmp_path).read_bytes() == CONTENT
    assert "damaged" in capsys.readouterr().err


def test_a_full_disk_is_not_taken_for_a_bad_connection(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / PART).symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        download(ARCHIVE, tmp_path)
    assert len(server.asked) == 1


def test_pip_says_where_a_wheel_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_from(tmp_path, monkeypatch)
    with zipfile.ZipFile(tmp_path / "novels-1.0-py3-none-any.whl", "w") as wheel:
        about = "Metadata-Version: 2.1\nName: novels\nVersion: 1.0\nRequires-Python: <3\nRequires-Dist: nowhere\n"
        wheel.writestr("novels-1.0.dist-info/METADATA", about)
        wheel.writestr("novels-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("novels-1.0.dist-info/RECORD", "")
    assert resolve(ARCHIVE) == (tmp_path / "novels-1.0-py3-none-any.whl").as_uri()


def test_nothing_of_a_package_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_from(tmp_path, monkeypatch)
    with zipfile.ZipFile(tmp_path / "novels-1.0.zip", "w") as source:
        source.writestr("novels-1.0/setup.py", f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(UserError, match=r"PyPI novels 1\.0: pip cannot find it \(ERROR: .*novels==1\.0") as caught:
        resolve(ARCHIVE)
    assert not (tmp_path / "ran").exists()
    assert "\n" not in str(caught.value)


def only_from(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pip see one folder and no network."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in {"CONFIG_FILE": os.devnull, "NO_INDEX": "1", "FIND_LINKS": str(folder)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)


def test_npm_says_where_an_archive_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_npm(tmp_path, monkeypatch, 'import json, sys; print(json.dumps({"tarball": "http://here/" + sys.argv[-2]}))')
    assert resolve(replace(ARCHIVE, registry="npm")) == "http://here/novels@1.0"


@pytest.mark.parametrize(
    "output", ["print()", 'import sys; sys.exit("npm warn old\\nnpm error code E404\\nnpm error log")']
)
def test_npm_that_finds_nothing_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str) -> None:
    fake_npm(tmp_path, monkeypatch, output)
    with pytest.raises(UserError, match=r"npm novels 1\.0: npm cannot find it \((no answer|npm error code E404)\)"):
        resolve(replace(ARCHIVE, registry="npm"))


def test_without_npm_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"npm novels 1\.0: needs npm, which is not installed"):
        resolve(replace(ARCHIVE, registry="npm"))


def fake_npm(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    (folder / "npm").write_text(f"#!{sys.executable}\n{script}\n")
    (folder / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_the_hub_offline_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        UserError, match=r"^some/novels: cannot be fetched from the Hugging Face hub or read \("
    ) as caught:
        snapshot("some/novels", "main", ["*.parquet"])
    assert "\n" not in str(caught.value)


def test_a_proxy_that_refuses_the_hub_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import HfHubHTTPError

    def refuse(*arguments: object, **options: object) -> None:
        raise HfHubHTTPError.__bases__[0]("403 Forbidden\nby the proxy")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(
        UserError,
        match=r"^some/novels: cannot be fetched from the Hugging Face hub or read \(403 Forbidden by the proxy\)",
    ):
        snapshot("some/novels", "main", ["*.parquet"])
