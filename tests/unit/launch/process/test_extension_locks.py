import os
import subprocess
import sys

from launch.process.extension_locks import clear_stale_locks


def test_a_lock_that_nobody_holds_is_removed_and_a_held_one_stays(odd_dir):
    locks = [odd_dir / name / "lock" for name in ("left", "held")]
    for lock in locks:
        lock.parent.mkdir()
        (lock.parent / "op.so").touch()
    locks[0].touch()
    program = (
        "import os, sys; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL);"
        "print(flush=True); sys.stdin.read()"
    )
    builder = subprocess.Popen(
        [sys.executable, "-c", program, str(locks[1])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with builder:
        builder.stdout.readline()
        assert clear_stale_locks(odd_dir) == [locks[0]]
        assert locks[1].exists()
        builder.stdin.close()
    assert clear_stale_locks(odd_dir) == [locks[1]]
    assert sorted(os.fspath(p.name) for p in odd_dir.glob("*/*")) == ["op.so", "op.so"]


def test_no_folder_has_no_locks(tmp_path):
    assert clear_stale_locks(tmp_path / "none") == []
