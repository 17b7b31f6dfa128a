"""Programs that were made to find what is wrong with file systems, run on a mount; each as far as it is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuse.conftest import Mounted

pytestmark = pytest.mark.slow

FIO_JOBS = {
    "sequential": ["--rw=write", "--bs=1m"],
    "random": ["--rw=randwrite", "--bs=4k"],
    "mmap": ["--rw=randwrite", "--bs=4k", "--ioengine=mmap"],
    "mmap-read": ["--rw=randrw", "--bs=4k-16k", "--ioengine=mmap", "--numjobs=2"],
    "direct": ["--rw=randwrite", "--bs=16k", "--direct=1"],
    "aio": ["--rw=randwrite", "--bs=8k", "--ioengine=libaio", "--iodepth=8", "--direct=1"],
    "uring": ["--rw=randrw", "--bs=4k", "--ioengine=io_uring", "--iodepth=16"],
    "posix-aio": ["--rw=randwrite", "--bs=32k", "--ioengine=posixaio", "--iodepth=4"],
    "vectors": ["--rw=write", "--bs=3000", "--ioengine=vsync", "--iodepth=8"],
    "several": ["--rw=randrw", "--bs=4k-64k", "--numjobs=4"],
    "synced": ["--rw=randrw", "--bs=4k", "--fsync=32"],
    "each-synced": ["--rw=randwrite", "--bs=16k", "--sync=1", "--size=4m"],
    "backwards": ["--rw=write:-8k", "--bs=4k"],
    "odd": ["--rw=randwrite", "--bsrange=512-70000", "--bs_unaligned", "--norandommap", "--verify_backlog=64"],
    "small-files": ["--rw=randwrite", "--bs=4k", "--nrfiles=200", "--openfiles=20", "--size=16m"],
    "filled": ["--rw=randwrite", "--bs=4k", "--fallocate=posix"],
    "cut": ["--rw=randwrite", "--bs=4k", "--fallocate=truncate", "--end_fsync=1"],
}
STRESSORS = (
    "access", "aio", "aiol", "chattr", "chdir", "chmod", "chown", "copy-file", "dentry", "dir", "dirdeep", "dirmany",
    "dnotify", "dup", "fallocate", "fanotify", "fault", "fcntl", "file-ioctl", "filename", "flock", "fpunch", "fsize",
    "fstat", "handle", "hdd", "inode-flags", "inotify", "iomix", "lease", "link", "locka", "lockf",
    "lockofd", "metamix", "mincore", "mknod", "mmap", "mmapfork", "msync", "open", "readahead", "rename", "revio",
    "seek", "sendfile", "splice", "symlink", "sync-file", "touch", "utime", "xattr",
)  # fmt: skip
"""Of the class `filesystem`, and others that work on files. Not here, since a mount has nothing for them: binderfs,
procfs, ioprio, eventfd (no files of the mount), bind-mount (needs a namespace), getdent and io (they go to all mounts
of the host, dead ones too), fiemap and verity (ioctls of the disk's own file systems: these skip themselves).
"""
CPYTHON = (
    "test_array", "test_bufio", "test_bz2", "test_cmd_line_script", "test_compileall", "test_configparser", "test_csv",
    "test_dbm", "test_dbm_dumb", "test_dbm_gnu", "test_dbm_ndbm", "test_eintr", "test_fcntl", "test_file",
    "test_filecmp", "test_fileinput", "test_fileio", "test_genericpath", "test_glob", "test_gzip", "test_import",
    "test_io", "test_largefile", "test_linecache", "test_logging", "test_lzma", "test_mailbox", "test_mmap", "test_os",
    "test_pathlib", "test_pkg", "test_pkgutil", "test_posix", "test_posixpath", "test_py_compile", "test_runpy",
    "test_shelve", "test_shutil", "test_site", "test_source_encoding", "test_sqlite3", "test_stat", "test_subprocess",
    "test_tarfile", "test_tempfile", "test_unicode_file", "test_unicode_file_functions", "test_univnewlines",
    "test_urllib", "test_venv", "test_wave", "test_zipapp", "test_zipfile", "test_zipimport",
)  # fmt: skip


def need(program: str) -> None:
    """Skip where a program is not installed."""
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")


def run(*command: object, cwd: Path, text: str | None = None) -> str:
    """Run a program, which has to succeed; returns what it printed."""
    done = _run(*command, cwd=cwd, text=text)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def _run(*command: object, cwd: Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        input=text,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )


def no_trouble(mounted: Mounted) -> None:
    """The server has met nothing that it did not expect."""
    assert "ERROR" not in mounted.log_text()


@pytest.mark.parametrize("job", FIO_JOBS)
def test_fio_verifies_what_it_wrote(writable: Mounted, tmp_path: Path, job: str) -> None:
    need("fio")
    run(
        *("fio", f"--name={job}", f"--directory={writable.path}", "--size=32m", "--verify_state_save=0"),
        *("--verify=crc32c", "--verify_fatal=1", "--do_verify=1", *FIO_JOBS[job]),
        cwd=tmp_path,
    )
    no_trouble(writable)


@pytest.mark.parametrize("stressor", STRESSORS)
def test_stressors_find_nothing(writable: Mounted, tmp_path: Path, stressor: str) -> None:
    need("stress-ng")
    if stressor not in run("stress-ng", "--stressors", cwd=tmp_path).split():
        pytest.skip(f"this stress-ng has no {stressor}")
    place = writable.path / "stress"
    place.mkdir()
    run(  # its exit code tells; fsize prints failures of its own stand-in for fallocate when the time is over
        *("stress-ng", f"--{stressor}", 2, "--timeout", 3, "--verify", "--temp-path", place),
        *("--hdd-bytes", "16M", "--seek-size", "16M", "--iomix-bytes", "8M", "--revio-bytes", "8M"),
        *("--fallocate-bytes", "16M", "--readahead-bytes", "16M", "--mmap-bytes", "16M", "--mmap-file"),
        cwd=tmp_path,
    )
    assert list(place.iterdir()) == []
    no_trouble(writable)


def failures(name: str, directory: Path) -> set[str]:
    """The tests of a module of Python's own that fail in a directory."""
    base = Path(sys.base_prefix, "bin", f"python{sys.version_info[0]}.{sys.version_info[1]}")
    if _run(base, "-c", f"import test.{name}", cwd=directory).returncode:
        pytest.skip("this Python comes without its tests")
    directory.mkdir(exist_ok=True)
    command = (base, "-m", "test", "-v", "-u", "largefile", "--timeout", 300, "--tempdir", directory, name)
    done = _run(*command, cwd=directory)
    found = set(re.findall(r"^(?:FAIL|ERROR): (.*)", done.stdout, re.M))
    assert found or not done.returncode, done.stdout[-4000:]
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CPYTHON)
def test_the_tests_of_python_pass(writable: Mounted, tmp_path: Path, name: str) -> None:
    """What fails on a mount fails in a plain directory, too."""
    (writable.path / "tests").mkdir()
    found = failures(name, writable.path / "tests")
    if found:
        (tmp_path / "tests").mkdir()
        assert found <= failures(name, tmp_path / "tests")
    no_trouble(writable)


def test_dbench(writable: Mounted, tmp_path: Path) -> None:
    """What an office does to a file server."""
    need("dbench")
    said = run("dbench", "-D", writable.path, "-c", "/usr/share/dbench/client.txt", "-t", 15, 4, cwd=tmp_path)
    assert "Throughput" in said and "failed" not in said
    no_trouble(writable)


def test_fs_mark(writable: Mounted) -> None:
    """Many small files, each synced."""
    need("fs_mark")
    # It takes no paths longer than 40 bytes.
    run("fs_mark", "-d", ".", "-n", 1000, "-s", 8192, "-t", 2, "-l", "log", cwd=writable.path)
    no_trouble(writable)


def test_bonnie(writable: Mounted, tmp_path: Path) -> None:
    """Large files written, rewritten and searched; small ones made, looked at and removed in any order."""
    need("bonnie++")
    size = ("-f", "-s", "64M", "-r", "32M", "-n", "2:5000:10:4")
    run("bonnie++", "-d", writable.path, "-u", "root", *size, "-q", cwd=tmp_path)
    assert list(writable.path.iterdir()) == []
    no_trouble(writable)


def test_postmark(writable: Mounted, tmp_path: Path) -> None:
    """What a mail server does."""
    need("postmark")
    script = f"set location {writable.path}\nset number 1000\nset transactions 3000\nset subdirectories 7\nrun\nquit\n"
    said = run("postmark", cwd=tmp_path, text=script)
    assert "megabytes read" in said and "Error" not in said
    assert list(writable.path.iterdir()) == []
    no_trouble(writable)
