"""Programs that were made to find what is wrong with file systems, run on a mount; each as far as it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moonclipfs.store.store import Store
from tests.fuse.conftest import Mounted, Mounter, eventually, patched_server

FIO_JOBS = {
    "sequential": ["--rw=write", "--bs=1m"],
    "random": ["--rw=randwrite", "--bs=4k"],
    "mmap": ["--rw=randwrite", "--bs=4k", "--ioengine=mmap"],
    "direct": ["--rw=randwrite", "--bs=16k", "--direct=1"],
    "aio": ["--rw=randwrite", "--bs=8k", "--ioengine=libaio", "--iodepth=8", "--direct=1"],
    "several": ["--rw=randrw", "--bs=4k-64k", "--numjobs=4"],
    "synced": ["--rw=randrw", "--bs=4k", "--fsync=32"],
}
STRESSORS = (
    "access", "chdir", "chmod", "chown", "copy-file", "dentry", "dir", "dirdeep", "dirmany", "dup", "fcntl",
    "filename", "flock", "fstat", "hdd", "iomix", "link", "locka", "lockf", "lockofd", "metamix",
    "mmap", "mmapfork", "msync", "open", "readahead", "rename", "revio", "seek", "sendfile", "symlink", "sync-file",
    "touch", "utime", "xattr",
)  # fmt: skip
CPYTHON = (
    "test_file", "test_filecmp", "test_fileio", "test_fcntl", "test_genericpath", "test_glob", "test_io",
    "test_mailbox", "test_mmap", "test_os", "test_pathlib", "test_posix", "test_posixpath", "test_shutil",
    "test_tarfile", "test_tempfile", "test_zipfile",
)  # fmt: skip


@pytest.fixture
def mounted(store: Store, mounter: Mounter) -> Mounted:
    """An empty mount that can be written to."""
    return mounter(store.path, read_only=False)


def run(*command: object, cwd: Path | None = None) -> None:
    """Run a program; it has to succeed."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize("job", FIO_JOBS)
def test_fio_verifies_what_it_wrote(mounted: Mounted, job: str) -> None:
    if shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    run(
        *("fio", f"--name={job}", f"--directory={mounted.path}", "--size=32m"),
        *("--verify=crc32c", "--verify_fatal=1", "--do_verify=1", "--verify_state_save=0", *FIO_JOBS[job]),
    )
    assert "ERROR" not in mounted.log_text()


@pytest.mark.slow
@pytest.mark.parametrize("stressor", STRESSORS)
def test_stressors_find_nothing(mounted: Mounted, stressor: str) -> None:
    if shutil.which("stress-ng") is None:
        pytest.skip("stress-ng is not installed")
    run(
        *("stress-ng", f"--{stressor}", 2, "--timeout", 3, "--verify", "--temp-path", mounted.path),
        *("--hdd-bytes", "16M", "--seek-size", "16M", "--iomix-bytes", "8M", "--revio-bytes", "8M"),
    )
    assert "ERROR" not in mounted.log_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CPYTHON)
def test_the_tests_of_python_pass(mounted: Mounted, name: str) -> None:
    base = Path(sys.base_prefix, "bin", f"python{sys.version_info[0]}.{sys.version_info[1]}")
    probe = subprocess.run([base, "-c", f"import test.{name}"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip("this Python comes without its tests")
    (mounted.path / "tests").mkdir()
    run(base, "-m", "test", "--timeout", 300, "--tempdir", mounted.path / "tests", name)
    assert "ERROR" not in mounted.log_text()


def test_git_clones_packs_and_checks(mounted: Mounted, tmp_path: Path) -> None:
    """git clone, gc and fsck work on a mount."""
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    source = tmp_path / "source"
    run("git", "init", "-q", source)
    for number in range(30):
        (source / f"f{number}").write_bytes(os.urandom(5000))
        run("git", "add", ".", cwd=source)
        run("git", *identity, "commit", "-q", "-m", str(number), cwd=source)
    clone = mounted.path / "clone"
    run("git", "clone", "-q", "--no-local", source, clone)
    run("git", "gc", "-q", cwd=clone)
    run("git", *identity, "commit", "-q", "--allow-empty", "-m", "more", cwd=clone)
    run("git", "repack", "-adfq", cwd=clone)
    run("git", "fsck", "--no-progress", "--strict", cwd=clone)
    run("git", "diff", "--exit-code", cwd=clone)
    assert "ERROR" not in mounted.log_text()


def test_what_the_kernel_knows_of_the_layer_is_bounded(store: Store, tmp_path: Path) -> None:
    """Inodes of the layer that the kernel keeps for long are taken back from it, those in use stay."""
    patch = "from moonclipfs import limits\nlimits.NODES = 8000"
    with patched_server(store.path, tmp_path / "mnt", patch, read_only=False) as mounted:
        with (mounted.path / "open").open("w+b", buffering=0) as file:
            file.write(b"kept")
            for number in range(20):
                (mounted.path / f"d{number}").mkdir()
                for name in range(300):
                    (mounted.path / f"d{number}/{name}").touch()
            eventually(lambda: mounted.stats()["known"] <= 2500)
            assert os.pread(file.fileno(), 4, 0) == b"kept"
        assert len(os.listdir(mounted.path / "d7")) == 300
        assert (mounted.path / "open").read_bytes() == b"kept"
