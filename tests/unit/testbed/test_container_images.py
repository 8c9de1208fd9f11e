"""What goes into the testbed's images, and that nothing of the machine stays in them."""

from __future__ import annotations

import configparser
import hashlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest

from hostprep.errors import FailedError
from testbed import container_images, image_store
from testbed.container_images import next_image, our_image, store_images
from testbed.image_build import (
    parse_settings,
    read_sources,
    run,
    settings_for_build,
    sum_of,
    write_sources,
)
from testbed.image_store import DISK_LABEL, Layout, make_disk

pytestmark = pytest.mark.unit
_PROJECT = Path(__file__).parents[3]
_TESTBED = _PROJECT / "testbed"


# -- sources


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "code" / "__pycache__").mkdir(parents=True)
    (folder / ".containerignore").write_text("*\n!code\n!LICENSE\n**/__pycache__\n")
    (folder / "Containerfile").write_text("FROM scratch\n")
    (folder / "LICENSE").write_text("free\n")
    (folder / "notes.txt").write_text("private\n")
    (folder / "code" / "a.py").write_text("a = 1\n")
    (folder / "code" / "__pycache__" / "a.pyc").write_bytes(b"junk")
    return folder


def test_a_build_sees_what_the_ignore_file_lets_through(project: Path) -> None:
    names = {"Containerfile", ".containerignore", "LICENSE", "code/a.py"}
    assert set(read_sources(project)) == names


def test_everything_the_containerfile_copies_is_among_the_sources() -> None:
    sources = read_sources(_PROJECT)
    text = sources["Containerfile"].decode().replace("\\\n", " ")
    for words in (line.split() for line in text.splitlines() if line.startswith("COPY ")):
        if not words[1].startswith("--from="):
            for name in words[1:-1]:
                assert any(f"{path}/".startswith(f"{name}/") for path in sources), name


def test_the_sum_follows_names_bytes_and_their_borders() -> None:
    sums = [
        sum_of({"a": b"1", "b": b"2"}),
        sum_of({"a": b"12", "b": b""}),
        sum_of({"a": b"1", "c": b"2"}),
        sum_of({"a": b"1"}),
        sum_of({"a": b"1"}, b"2"),
        sum_of({"a": b"1"}, b"", b"2"),
    ]
    assert len(set(sums)) == len(sums)
    assert sum_of({"b": b"2", "a": b"1"}) == sums[0]


def test_sources_are_written_alike_whoever_wrote_the_originals(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_sources({"a/b.py": b"x", "c": b"y"}, tmp_path / "out")
    finally:
        os.umask(before)
    found = {str(p.relative_to(tmp_path / "out")): p.stat() for p in (tmp_path / "out").rglob("*")}
    assert {n: oct(s.st_mode & 0o777) for n, s in found.items()} == {
        "a": "0o755",
        "a/b.py": "0o644",
        "c": "0o644",
    }
    assert len({stat.st_mtime for stat in found.values()}) == 1


def test_another_source_is_another_store() -> None:
    sources = {"hostprep/a.py": b"1"}
    first = container_images.store_name(sources)
    assert first == container_images.store_name(dict(sources))
    assert first != container_images.store_name({"hostprep/a.py": b"2"})


# -- pip


def _parsed(text: str) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser()
    parser.read_string(text)
    return parser


def test_a_variable_wins_over_every_section_of_every_file() -> None:
    listed = (
        ":env:.index-url='https://env'\nglobal.index-url='https://file'\n"
        "install.index-url='https://install'\nglobal.timeout='9'\n"
    )
    parsed = _parsed(parse_settings(listed, None).text)
    assert parsed.sections() == ["global"]
    assert dict(parsed["global"]) == {"index-url": "https://env", "timeout": "9"}


def test_where_to_install_to_is_no_business_of_an_image() -> None:
    listed = ":env:.target='/x'\nglobal.user='true'\ninstall.prefix='/y'\nglobal.retries='1'\n"
    assert parse_settings(listed, None).text == "[global]\nretries = 1\n"


def test_a_value_of_several_lines_stays_one(tmp_path: Path) -> None:
    listed = f"global.find-links='\\n{tmp_path}\\nhttps://elsewhere/'\n"
    settings = parse_settings(listed, None)
    assert _parsed(settings.text)["global"]["find-links"].split() == [
        str(tmp_path),
        "https://elsewhere/",
    ]
    assert settings.paths == (tmp_path,)


def test_files_and_folders_that_are_named_go_along(tmp_path: Path) -> None:
    authorities, wheels = tmp_path / "ca.pem", tmp_path / "wheels"
    authorities.touch()
    wheels.mkdir()
    listed = f"global.find-links='file://{wheels} {tmp_path}/absent https://a/b'\n"
    settings = parse_settings(listed, str(authorities))
    assert settings.paths == (authorities, wheels)
    assert f"cert = {authorities}\n" in settings.text


def test_a_named_certificate_stays_the_named_one(tmp_path: Path) -> None:
    settings = parse_settings("install.cert='/own.pem'\n", "/etc/other.pem")
    assert settings.text == "[install]\ncert = /own.pem\n"


def test_pip_reads_back_what_it_was_set_to(tmp_path: Path) -> None:
    own = tmp_path / "pip.conf"
    own.write_text(
        "[global]\nindex-url = https://u:p%40ss@index.invalid/simple\nno-index = true\n"
        "[install]\nfind-links =\n    /one\n    /two\n[list]\nformat = json\n"
    )
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    environ = {**clean, "PIP_CONFIG_FILE": str(own), "PIP_RETRIES": "7"}
    made = tmp_path / "made.conf"
    made.write_text(settings_for_build(environ).text)
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        env={**clean, "PIP_CONFIG_FILE": str(made)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "global.index-url='https://u:p%40ss@index.invalid/simple'" in done.stdout
    assert "global.no-index='true'" in done.stdout
    assert r"install.find-links='\n/one\n/two'" in done.stdout
    assert "global.retries='7'" in done.stdout
    assert "list.format" not in made.read_text()


# -- layout


def _export(folder: Path, *layers: bytes) -> Path:
    """As `buildah push -D IMAGE dir:FOLDER` writes it."""
    folder.mkdir()

    def put(content: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        (folder / digest).write_bytes(content)
        return {"digest": f"sha256:{digest}", "size": len(content)}

    config = {"architecture": "amd64", "config": {"Env": ["A=1", "B=2"]}}
    manifest = {
        "schemaVersion": 2,
        "config": {"mediaType": "config", **put(json.dumps(config).encode())},
        "layers": [{"mediaType": "layer", **put(layer)} for layer in layers],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "version").write_text("Directory Transport Version: 1.1\n")
    return folder


def _layout(tmp_path: Path) -> Layout:
    layout = Layout(tmp_path / "layout")
    layout.add(_export(tmp_path / "one", b"base"), "localhost/base:1")
    layout.add(_export(tmp_path / "two", b"base", b"ours"), "localhost/ours:1")
    layout.derive("localhost/ours:1", "localhost/ours:2", labels={"v": "2"}, env={"B": "3"})
    return layout


def _untar(layout: Layout, **options: Any) -> dict[str, bytes]:
    stream = io.BytesIO()
    layout.write_tar(stream, **options)
    stream.seek(0)
    with tarfile.open(fileobj=stream) as tar:
        files = {m.name: tar.extractfile(m) for m in tar.getmembers()}
        return {name: file.read() for name, file in files.items() if file is not None}


def test_every_blob_is_what_its_name_says_and_shared_layers_come_once(tmp_path: Path) -> None:
    files = _untar(_layout(tmp_path))
    blobs = {n.rpartition("/")[2]: c for n, c in files.items() if n.startswith("blobs/")}
    assert all(hashlib.sha256(content).hexdigest() == name for name, content in blobs.items())
    assert sorted(c for c in blobs.values() if c in {b"base", b"ours"}) == [b"base", b"ours"]
    assert json.loads(files["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}


def test_an_image_is_found_by_its_whole_name(tmp_path: Path) -> None:
    files = _untar(_layout(tmp_path))
    entries = json.loads(files["index.json"])["manifests"]
    names = [entry["annotations"]["io.containerd.image.name"] for entry in entries]
    assert names == ["localhost/base:1", "localhost/ours:1", "localhost/ours:2"]
    for entry in entries:
        content = files[f"blobs/sha256/{entry['digest'].removeprefix('sha256:')}"]
        assert len(content) == entry["size"]


def test_a_derived_image_has_the_layers_but_another_digest_and_another_config(
    tmp_path: Path,
) -> None:
    layout = _layout(tmp_path)
    files = _untar(layout)

    def blob(entry: dict[str, Any]) -> Any:
        return json.loads(files[f"blobs/sha256/{entry['digest'].removeprefix('sha256:')}"])

    _, one, two = (blob(entry) for entry in json.loads(files["index.json"])["manifests"])
    assert one["layers"] == two["layers"]
    assert blob(one["config"])["config"] == {"Env": ["A=1", "B=2"]}
    assert blob(two["config"])["config"] == {"Labels": {"v": "2"}, "Env": ["A=1", "B=3"]}
    infos = {info.name: info for info in layout.infos()}
    assert infos["localhost/ours:1"].digest != infos["localhost/ours:2"].digest
    assert infos["localhost/ours:1"].size_bytes == len(b"base" + b"ours")


def test_blobs_that_containerd_has_are_not_sent_again(tmp_path: Path) -> None:
    layout = _layout(tmp_path)
    known = "sha256:" + hashlib.sha256(b"base").hexdigest()
    assert set(_untar(layout)) - set(_untar(layout, known=[known])) == {
        f"blobs/sha256/{known.removeprefix('sha256:')}"
    }


# -- containerd and its disk


def test_an_image_that_is_not_unpacked_is_an_error() -> None:
    listed = (
        "REF TYPE DIGEST STATUS SIZE UNPACKED\n"
        "localhost/a:1 manifest sha256:1 complete (2/2) 6.0 KiB/6.0 KiB true\n"
        "localhost/b:1 manifest sha256:1 complete (2/2) 6.0 KiB/6.0 KiB false\n"
        "localhost/c:1 manifest sha256:1 incomplete (1/2) 3.0 KiB/6.0 KiB true\n"
    )
    image_store._check(listed, ["localhost/a:1"])
    for name in ("localhost/b:1", "localhost/c:1", "localhost/d:1"):
        with pytest.raises(FailedError, match=f"{name} not unpacked"):
            image_store._check(listed, ["localhost/a:1", name])


def _debugfs(disk: Path, command: str) -> str:
    done = subprocess.run(
        ["debugfs", "-R", command, str(disk)], capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.mark.skipif(shutil.which("mke2fs") is None, reason="needs e2fsprogs")
def test_a_disk_keeps_what_layers_are_made_of(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "tool").write_bytes(b"x")
    (root / "tool").chmod(0o4755)
    os.link(root / "tool", root / "again")
    (root / "link").symlink_to("tool")
    attribute = "trusted.overlay.opaque" if os.geteuid() == 0 else "user.opaque"
    try:
        os.setxattr(root / "tool", attribute, b"y")
    except OSError as error:
        pytest.skip(f"no extended attributes here: {error}")
    disk = tmp_path / "disk"
    make_disk(root, disk)
    make_disk(root, disk)  # over an older one too

    stat = _debugfs(disk, "stat /tool")
    assert re.search(r"Mode:\s+04755", stat)
    assert re.search(r"Links: 2\b", stat)
    assert attribute in _debugfs(disk, "ea_list /tool")
    assert "Type: symlink" in _debugfs(disk, "stat /link")
    assert DISK_LABEL in _debugfs(disk, "show_super_stats -h")
    subprocess.run(["e2fsck", "-fn", str(disk)], check=True, capture_output=True)
    assert disk.stat().st_blocks * 512 < 64 << 20


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("mke2fs") is None, reason="needs root and e2fsprogs"
)
def test_a_disk_keeps_whiteouts_and_owners(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    os.mknod(root / "deleted", 0o020000, os.makedev(0, 0))
    (root / "owned").touch()
    os.chown(root / "owned", 65532, 65533)
    make_disk(root, tmp_path / "disk")
    whiteout = _debugfs(tmp_path / "disk", "stat /deleted")
    assert "Type: character special" in whiteout
    assert re.search(r"[Mm]ajor/minor number: 00:00", whiteout)
    assert re.search(r"User: +65532 +Group: +65533", _debugfs(tmp_path / "disk", "stat /owned"))


# -- stores in the cache


def _store(cache: Path, name: str, age_s: float) -> Path:
    folder = cache / f"image-store-{name}"
    folder.mkdir()
    (folder / "store.ext4").touch()
    os.utime(folder, (1e9 - age_s, 1e9 - age_s))
    return folder


def test_two_stores_stay(tmp_path: Path) -> None:
    new, last, old = (_store(tmp_path, name, age_s) for age_s, name in enumerate(("c", "b", "a")))
    unfinished = tmp_path / "image-storage"
    unfinished.mkdir()
    container_images._forget_others(tmp_path, new)
    assert {path for path in (new, last, old) if path.exists()} == {new, last}
    assert unfinished.exists()


def test_the_images_are_the_ones_the_chart_asks_for() -> None:
    version = tomllib.loads((_PROJECT / "pyproject.toml").read_text())["project"]["version"]
    assert our_image() == f"localhost/hostprep:{version}"
    assert next_image() == f"localhost/hostprep:{version}-next"


def test_the_list_of_a_disk_is_read_back(tmp_path: Path) -> None:
    (tmp_path / "images.json").write_text('[{"name": "a", "digest": "b", "size_bytes": 3}]')
    assert [info.size_bytes for info in store_images(tmp_path / "store.ext4")] == [3]


def test_without_root_nothing_is_touched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(FailedError, match="only be built as root; run it as root"):
        container_images.build_store(print)
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_fails_is_named_with_its_own_words() -> None:
    with pytest.raises(FailedError, match=r"(?s)sh failed with exit code 3.*no space.*free some"):
        run(["sh", "-c", "echo no space >&2; exit 3"], remedy="free some")
    assert run(["sh", "-c", "echo warning >&2; echo said"], remedy="") == "said\n"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_pause_program_waits_until_it_is_told_to_end(
    tmp_path: Path, number: signal.Signals
) -> None:
    program = tmp_path / "pause"
    command = ["gcc", "-Wall", "-Werror", "-o", str(program), str(_TESTBED / "pause.c")]
    subprocess.run(command, check=True)
    with subprocess.Popen([program]) as process:
        # Its last handler is set once SIGCHLD is ignored.
        status = Path(f"/proc/{process.pid}/status")
        while not re.search(r"SigIgn:\t.*1....$", status.read_text(), re.MULTILINE):
            assert process.poll() is None
        process.send_signal(number)
        assert process.wait(30) == 0
