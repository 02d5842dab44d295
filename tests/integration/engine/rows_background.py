"""Checkpoints that are written while training goes on: stock's files, whatever the update does."""

import contextlib
import os
import signal
import sys
import threading
from pathlib import Path
from unittest import mock

import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from engines import POLICIES, RANK, STRIDE, Case, Trial, answer
from rows import Rows
from rows_checkpoints import convert
from rows_table import BF16_ALL, CASES, FIRST_CASE, set_masters_midway
from seams import BackgroundSave, install

from deep_optimizer_states import uninstall
from deep_optimizer_states.adapter import checkpoint
from deep_optimizer_states.core import checkpoint as checkpoint_core
from deep_optimizer_states.core.checkpoint import sync
from deep_optimizer_states.core.commit import RECORD, reason

ROWS = Rows()
run = ROWS.run
BACKGROUND = {"checkpoint": "background"}
TAG = "saved"
LIMIT_S = 100


@contextlib.contextmanager
def nothing_written_meanwhile():
    """The threads that write wait until the block ends, or until the function given is called.

    So every update comes first. No save may be under way when it begins.
    """
    may_write, go_on_writing = threading.Event(), BackgroundSave._fill

    def wait_and_go_on(save, beat):
        assert may_write.wait(LIMIT_S), "nobody lets the thread write"
        go_on_writing(save, beat)

    with mock.patch.object(BackgroundSave, "_fill", wait_and_go_on):
        try:
            yield may_write.set
        finally:
            may_write.set()


def save_and_train_on(case, block, folder, then=None, **options):
    """Save after three steps, as stock does and as ours; train two more before a byte is written.

    Stock's own way to save is taken on the same engine: at stage 3 it leaves padding uninitialised.

    Returns:
        The save, ended.
    """
    with Trial(block) as trial:
        engine = trial.open(case)
        trial.train(engine, 3)
        with nothing_written_meanwhile(), contextlib.redirect_stdout(sys.stderr):
            with mock.patch.object(engine.optimizer, "checkpoints", None):
                engine.save_checkpoint(folder / "stock", TAG, {"at": 3}, **options)
            assert engine.save_checkpoint(folder / "ours", TAG, {"at": 3}, **options)
            if then:
                then(engine)
            trial.train(engine, 2)
            engine.optimizer.background.wait()
        engine.optimizer.checkpoints.wait()
        found = engine.optimizer.checkpoints.last
        trial.end(engine)
    assert found.failure is None, found.failure
    return found


def unlike(ours, stock, where=""):
    """Return where two checkpoints differ in anything but the config that they quote."""
    if isinstance(stock, torch.Tensor):
        same = ours.dtype == stock.dtype and ours.shape == stock.shape
        raw = [one.reshape(-1).contiguous().view(torch.uint8) for one in (ours, stock)]
        return [] if same and torch.equal(*raw) else [where]
    if isinstance(stock, dict):
        if list(ours) != list(stock):
            return [f"{where}: {list(ours)} and {list(stock)}"]
        keys = [key for key in stock if key != "ds_config"]
        return [it for key in keys for it in unlike(ours[key], stock[key], f"{where}/{key}")]
    if isinstance(stock, (list, tuple)):
        pairs = enumerate(zip(ours, stock, strict=True))
        return [it for number, pair in pairs for it in unlike(*pair, f"{where}/{number}")]
    return [] if type(ours) is type(stock) else [where]


def compare_files(ours, stock):
    """Return what differs between two folders, which must hold files of the same names."""
    torch.distributed.barrier()
    names = sorted(str(path.relative_to(stock)) for path in stock.rglob("*") if path.is_file())
    assert (
        sorted(str(path.relative_to(ours)) for path in ours.rglob("*") if path.is_file()) == names
    )
    assert (ours / "latest").read_text() == (stock / "latest").read_text() == TAG
    found = []
    for name in names:
        if name.endswith(".pt"):
            options = {"weights_only": False, "mmap": True, "map_location": "cpu"}
            both = [torch.load(folder / name, **options) for folder in (ours, stock)]
            found += unlike(*both, name)
    return found


def assert_latest(folder, tag):
    """Assert on all ranks that this save is the latest and that none has left anything else.

    Each rank removes its own files, and whoever goes on may begin the next save.
    """
    torch.distributed.barrier()
    found = (folder / "latest").read_text(), list(folder.rglob("*unfinished*"))
    torch.distributed.barrier()
    assert found == (tag, [])


SMALL = {**STRIDE, **BACKGROUND, "checkpoint_memory_bytes": 3000}
WIDE = Case(config={"bf16": BF16_ALL})
for name, ranks, case, block in (
    ("all-host", (1,), Case(), POLICIES["all-host"]),
    ("stride", (1, 2, 4), Case(), STRIDE),
    ("dynamic", (1,), Case(), POLICIES["dynamic"]),
    ("a share resident", (1,), Case(), POLICIES["ratio 0.5"]),
    ("no memory for copies", (1, 2, 4), Case(), SMALL),
    ("16-bit states", (1,), WIDE, STRIDE),
    ("weights on the host", (1,), CASES["offload_param"], STRIDE),
    ("stage 2", (1, 2, 4), CASES[f"ZeRO-2: {FIRST_CASE}"], STRIDE),
    ("stage 1", (2, 4), CASES[f"ZeRO-1: {FIRST_CASE}"], SMALL),
):

    @ROWS.check(name, *ranks, case=case, block={**BACKGROUND, **block})
    def save_before_updates(folder, case, block):
        found = save_and_train_on(case, block, folder)
        assert compare_files(folder / "ours", folder / "stock") == []
        is_small = block.get("checkpoint_memory_bytes")
        assert bool(found.written_first_bytes) == bool(is_small)
        assert found.peak_bytes <= found._memory_bytes
        assert found.copied_bytes or is_small


@ROWS.check("half of the spare memory for copies")
def copy_into_half_of_what_is_spare(folder):
    with mock.patch.object(checkpoint, "spare_host_bytes", return_value=6000):
        found = save_and_train_on(Case(), {**STRIDE, **BACKGROUND}, folder)
    assert found.written_first_bytes > 0
    assert 0 < found.peak_bytes <= 3000


for name, case in (("", Case()), (", stage 2", CASES[f"ZeRO-2: {FIRST_CASE}"])):

    @ROWS.check(f"zero_to_fp32 and the universal conversion{name}", 1, 2, 4, case=case)
    def read_by_programs(folder, case):
        save_and_train_on(case, {**STRIDE, **BACKGROUND}, folder)
        convert(folder, ("ours", "stock"), "--inject_missing_state")
        torch.distributed.barrier()
        if RANK:
            return
        found, expected = (
            {
                "fp32": get_fp32_state_dict_from_zero_checkpoint(str(folder / name), TAG),
                **{
                    str(path.relative_to(folder / name)): torch.load(path, weights_only=False)
                    for path in sorted((folder / name).rglob(f"{TAG}_universal/zero/**/*.pt"))
                },
            }
            for name in ("ours", "stock")
        )
        assert len(expected) > 3 * len(expected["fp32"])
        assert unlike(found, expected) == []


@ROWS.check("frozen parameters left out")
def leave_frozen_out(folder):
    case = CASES["frozen parameters"]
    save_and_train_on(case, {**STRIDE, **BACKGROUND}, folder, exclude_frozen_parameters=True)
    assert compare_files(folder / "ours", folder / "stock") == []


for name, case in (("", Case()), (", stage 2", CASES[f"ZeRO-2: {FIRST_CASE}"])):

    @ROWS.check(f"master weights that the user sets meanwhile{name}", case=case)
    def set_masters(folder, case):
        def then(engine):
            set_masters_midway(engine, 4)

        save_and_train_on(case, {**STRIDE, **BACKGROUND}, folder, then)
        assert compare_files(folder / "ours", folder / "stock") == []


@ROWS.check("an update that does not ask is seen", 1, 2)
def do_not_ask(folder):
    """Negative control."""
    with mock.patch.object(BackgroundSave, "release"):
        save_and_train_on(Case(), {**STRIDE, **BACKGROUND}, folder)
    found = compare_files(folder / "ours", folder / "stock")
    assert any("exp_avg" in where for where in found), found


for name, case in (("", Case()), (", stage 2", CASES[f"ZeRO-2: {FIRST_CASE}"])):

    @ROWS.check(f"nothing is copied before an update{name}", case=case)
    def copy_nothing(folder, case):
        with Trial({**STRIDE, **BACKGROUND}) as trial:
            engine = trial.open(case)
            trial.train(engine, 1)
            with nothing_written_meanwhile():
                engine.save_checkpoint(folder, TAG)
                held = engine.optimizer.checkpoints.last.peak_bytes
                trial.micro_step(engine, ends_window=False)
                trial.backward(engine)
                save = engine.optimizer.checkpoints.last
                assert (save.copied_bytes, save.peak_bytes) == (0, held)
            trial.end(engine)


@ROWS.check("saves of one tag, loads and saves one after another", 1, 2)
def save_again_and_again(folder):
    """What is loaded is always the last save; nothing of the one before is left."""
    with Trial({**STRIDE, **BACKGROUND}) as trial:
        engine = trial.open(Case())
        for at in range(3):
            trial.train(engine, 1)
            engine.save_checkpoint(folder, TAG, {"at": at})
            if at != 1:  # the second is overtaken by the third
                assert engine.load_checkpoint(folder)[1]["at"] == at
        trial.end(engine)
    assert_latest(folder, TAG)


@ROWS.check("a save that failed is raised where the user asks for it", 1, 2)
def raise_it(folder):
    """Once, by the next step; the same step goes on when it is called again."""
    with Trial({**STRIDE, **BACKGROUND, "raise_on_failed_checkpoint": True}) as trial:
        engine = trial.open(Case())
        trial.train(engine, 1)
        with nothing_written_meanwhile():
            engine.save_checkpoint(folder, TAG)
            engine.optimizer.checkpoints.last.fail(OSError("the disk is gone"))
        engine.optimizer.checkpoints.wait()
        trial.backward(engine)
        told = answer(engine.step)
        assert told.startswith("CheckpointError: "), told
        assert "the disk is gone" in told
        engine.step()
        trial.end(engine)


@ROWS.check("a signal handler cannot save in the middle of a save")
def save_in_a_handler(folder):
    with Trial({**STRIDE, **BACKGROUND}) as trial:
        engine = trial.open(Case())
        trial.train(engine, 1)
        copy_scripts, told = type(engine)._copy_recovery_script, []

        def save_again(engine, path):
            told.append(answer(lambda: engine.save_checkpoint(folder, "again")))
            copy_scripts(engine, path)

        with mock.patch.object(type(engine), "_copy_recovery_script", save_again):
            engine.save_checkpoint(folder, TAG)
        engine.optimizer.checkpoints.wait()
        assert len(told) == 1
        assert told[0].startswith("CheckpointError: a checkpoint cannot be saved in the middle")
        assert (folder / "latest").read_text() == TAG
        trial.end(engine)


@ROWS.check("Ctrl-C in the middle of a save", 1, 2)
def interrupt_a_save(folder):
    """Of all ranks, at their last file; the save before stays, and the next one is whole."""
    with Trial({**STRIDE, **BACKGROUND}) as trial:
        engine = trial.open(Case())
        trial.train(engine, 1)
        engine.save_checkpoint(folder, "first", {"at": 1})
        add, added = BackgroundSave.add, []

        def add_or_interrupt(save, state, path):
            added.append(path)
            if "optim_states" in path.name:
                raise KeyboardInterrupt
            add(save, state, path)

        with mock.patch.object(BackgroundSave, "add", add_or_interrupt):
            assert answer(lambda: engine.save_checkpoint(folder, TAG)) == "KeyboardInterrupt: "
        assert len(added) == 2
        assert_latest(folder, "first")
        trial.train(engine, 1)
        assert engine.load_checkpoint(folder)[1]["at"] == 1
        engine.save_checkpoint(folder, TAG, {"at": 2})
        assert engine.load_checkpoint(folder)[1]["at"] == 2
        trial.end(engine)


@ROWS.check("a load names the files that a killed save had still to name", 1, 2)
def end_by_loading(folder):
    with Trial({**STRIDE, **BACKGROUND}) as trial:
        engine = trial.open(Case())
        trial.train(engine, 1)

        def be_killed(*_):
            raise OSError("killed")

        with mock.patch.object(Path, "replace", be_killed):
            engine.save_checkpoint(folder, TAG, {"at": 1})
            engine.optimizer.checkpoints.wait()
        torch.distributed.barrier()
        is_named = (folder / "latest").exists()
        torch.distributed.barrier()  # the first rank's load names it
        assert not is_named
        assert engine.load_checkpoint(folder)[1]["at"] == 1
        trial.end(engine)
    assert_latest(folder, TAG)


@ROWS.check("whatever fails on one rank is heard by all", 1, 2)
def fail_on_one_rank(folder):
    """In its thread, with an error that is no OSError; the next save is whole."""
    with Trial({**STRIDE, **BACKGROUND}) as trial:
        engine = trial.open(Case())
        trial.train(engine, 1)
        engine.save_checkpoint(folder, "first")
        engine.optimizer.checkpoints.wait()
        for error in (MemoryError, KeyboardInterrupt, SystemExit):

            def fail(*_, error=error):
                raise error("injected")

            last = torch.distributed.get_world_size() - 1
            with mock.patch.object(checkpoint_core, "sync", fail if last == RANK else sync):
                engine.save_checkpoint(folder, TAG)
                engine.optimizer.checkpoints.wait()
            save = engine.optimizer.checkpoints.last
            assert error.__name__ in reason(save, RANK), save.failure
            assert f"rank {last}: " in reason(save, RANK)
            trial.train(engine, 1)
            assert_latest(folder, "first")
        engine.save_checkpoint(folder, TAG, {"at": 4})
        assert engine.load_checkpoint(folder)[1]["at"] == 4
        trial.end(engine)


@ROWS.check("a tag with a slash, and a relative folder that the process leaves", 1, 2)
def save_elsewhere(folder):
    with Trial({**STRIDE, **BACKGROUND}) as trial, contextlib.chdir(folder):
        engine = trial.open(Case())
        trial.train(engine, 1)
        with nothing_written_meanwhile():
            engine.save_checkpoint("saves", f"run/{TAG}", {"at": 1})
            os.chdir("/")
        engine.optimizer.checkpoints.wait()
        assert_latest(folder / "saves", f"run/{TAG}")
        assert engine.load_checkpoint(folder / "saves")[1]["at"] == 1
        trial.end(engine)


@ROWS.check("two engines that save into one folder at once", 1, 2)
def save_two_engines(folder):
    """`latest` names the last call's, as in stock; each finds its own again."""
    with Trial({**STRIDE, **BACKGROUND}) as trial:
        actor, critic = trial.open(Case()), trial.open(Case())
        for engine in (actor, critic):
            trial.train(engine, 1)
        with nothing_written_meanwhile():
            actor.save_checkpoint(folder, "actor", {"of": "actor"})
            critic.save_checkpoint(folder, "critic", {"of": "critic"})
        for engine in (actor, critic):
            engine.optimizer.checkpoints.wait()
        assert_latest(folder, "critic")
        assert actor.load_checkpoint(folder, "actor")[1]["of"] == "actor"
        assert critic.load_checkpoint(folder)[1]["of"] == "critic"
        for engine in (actor, critic):
            trial.end(engine)


@ROWS.check("content that cannot be saved in the background is refused by name", 1, 2)
def save_what_torch_lays_out_otherwise(folder):
    with Trial({**STRIDE, **BACKGROUND}) as trial:
        engine = trial.open(Case())
        trial.train(engine, 1)
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        told = answer(lambda: engine.save_checkpoint(folder, TAG, {"nested": lambda: nested}))
        assert told.startswith("CheckpointError: "), told
        assert '"blocking"' in told
        torch.distributed.barrier()
        left = list(folder.rglob("*unfinished*"))
        torch.distributed.barrier()  # or the record of the next save is seen
        assert not left
        engine.save_checkpoint(folder, TAG, {"at": 1})
        assert engine.load_checkpoint(folder)[1]["at"] == 1
        trial.end(engine)


@ROWS.check("no memory for a copy in the middle of an update")
def copy_without_memory(folder):
    """What cannot be copied is written first; the update, the save and training go on."""
    with Trial({**STRIDE, **BACKGROUND}) as trial:
        engine = trial.open(Case())
        trial.train(engine, 1)
        clone = torch.Tensor.clone

        def fail_in_an_update(tensor, *args, **kwargs):
            if threading.current_thread() is threading.main_thread():
                return clone(tensor, *args, **kwargs)
            raise MemoryError

        with nothing_written_meanwhile():
            engine.save_checkpoint(folder, TAG, {"at": 1})
            with mock.patch.object(torch.Tensor, "clone", fail_in_an_update):
                trial.train(engine, 1)
                engine.optimizer.background.wait()
        engine.optimizer.checkpoints.wait()
        save = engine.optimizer.checkpoints.last
        assert (save.failure, save.copied_bytes) == (None, 0)
        assert save.written_first_bytes
        assert engine.load_checkpoint(folder)[1]["at"] == 1
        trial.end(engine)


@contextlib.contextmanager
def interrupted():
    """Ctrl-C comes while the block waits."""

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


@ROWS.check("Ctrl-C while a save is waited for", 1, 2)
def interrupt_a_wait(folder):
    """The save goes on, and who waits again waits for it."""
    with Trial({**STRIDE, **BACKGROUND}) as trial:
        engine = trial.open(Case())
        trial.train(engine, 1)
        with nothing_written_meanwhile():
            engine.save_checkpoint(folder, TAG, {"at": 1})
            for _ in range(2):
                with interrupted():
                    assert answer(engine.optimizer.checkpoints.wait) == "KeyboardInterrupt: "
        assert engine.load_checkpoint(folder)[1]["at"] == 1
        trial.end(engine)


@ROWS.check("a child of fork leaves its parent's save alone")
def fork_in_a_save(folder):
    """As workers of a DataLoader do; nor does it keep the save's record locked."""
    with Trial({**STRIDE, **BACKGROUND}) as trial:
        engine = trial.open(Case())
        trial.train(engine, 1)
        with nothing_written_meanwhile():
            engine.save_checkpoint(folder, TAG, {"at": 1})
            child = os.fork()
            if not child:
                code = 1
                with contextlib.suppress(Exception):
                    engine.optimizer.checkpoints.wait()
                    checkpoint.wait_for_saves()
                    numbers = Path("/proc/self/fd").iterdir()
                    names = [str(it.readlink()) for it in numbers if it.is_symlink()]
                    code = sum(name.endswith(RECORD) for name in names)
                os._exit(code)
            assert os.waitpid(child, 0)[1] == 0
        assert engine.load_checkpoint(folder)[1]["at"] == 1
        trial.end(engine)


@ROWS.check("one folder by two names", 1, 2)
def save_by_two_names(folder):
    """Whoever saves or loads by the one waits for the save by the other."""
    with Trial({**STRIDE, **BACKGROUND}) as trial:
        engines = [trial.open(Case()) for _ in range(2)]
        (folder / "real").mkdir(exist_ok=True)
        with contextlib.suppress(FileExistsError):
            (folder / "link").symlink_to(folder / "real")
        names = [(folder / "link", TAG), (folder / "real", f"./{TAG}")]
        for at, (engine, (name, tag)) in enumerate(zip(engines, names, strict=True)):
            assert engine.save_checkpoint(name, tag, {"at": at})
        assert engines[0].load_checkpoint(folder / "link")[1]["at"] == 1
        assert_latest(folder / "real", f"./{TAG}")
        for engine in engines:
            trial.end(engine)


for whose, block in (("of stock", None), ("with the plugin", STRIDE)):

    @ROWS.check(f"an engine {whose} that saves in stock's way loads at once", 1, 2, block=block)
    def load_by_another(folder, block):
        """What was just saved, and not the save before; nothing is written until it waits."""
        wait = checkpoint.wait_for_saves
        with Trial({**STRIDE, **BACKGROUND}) as trial, Trial(block) as others:
            engine, other = trial.open(Case()), others.open(Case())
            for at in range(2):
                trial.train(engine, 1)
                with nothing_written_meanwhile() as let_write:
                    engine.save_checkpoint(folder, f"{TAG}{at}", {"at": at})

                    def wait_for_saves(folder, let_write=let_write):
                        let_write()
                        wait(folder)

                    with mock.patch.object(checkpoint, "wait_for_saves", wait_for_saves):
                        assert other.load_checkpoint(folder)[1]["at"] == at
            others.end(other)
            trial.end(engine)


@ROWS.check("one rank loads weights by itself, as in stock", 2)
def load_alone(folder):
    case = CASES[f"ZeRO-2: {FIRST_CASE}"]
    with Trial({**STRIDE, **BACKGROUND}) as trial:
        engine = trial.open(case)
        engine.save_checkpoint(folder, TAG, {"at": 0})
        engine.optimizer.checkpoints.wait()
        torch.distributed.barrier()
        if RANK == 0:
            with mock.patch.object(torch.distributed, "barrier", side_effect=AssertionError):
                assert engine.load_checkpoint(folder, load_module_only=True)[1]["at"] == 0
        trial.end(engine)


@ROWS.check("whatever the call after a save raises is told")
def fail_afterwards(folder):
    with Trial({**STRIDE, **BACKGROUND, "raise_on_failed_checkpoint": True}) as trial:
        engine = trial.open(Case())
        for error in (RuntimeError, SystemExit):
            engine.optimizer.checkpoints.when_whole = mock.Mock(side_effect=error("injected"))
            engine.save_checkpoint(folder, TAG)
            engine.optimizer.checkpoints.wait()
            told = answer(engine.optimizer.checkpoints.check)
            assert "is whole, but afterwards" in told, told
            assert error.__name__ in told
        trial.end(engine)


@ROWS.check("a save that cannot wait for the one before fails on all ranks", 1, 2)
def fail_to_wait(folder):
    with Trial({**STRIDE, **BACKGROUND}) as trial:
        engines = [trial.open(Case()) for _ in range(2)]
        with nothing_written_meanwhile():
            engines[0].save_checkpoint(folder, "first")
            engines[1].save_checkpoint(folder, "second")
            if torch.distributed.get_world_size() == RANK + 1:
                wait = mock.Mock(side_effect=MemoryError("injected"))
                checkpoint._under_way[1].previous = mock.Mock(wait=wait)
        for engine in engines:
            engine.optimizer.checkpoints.wait()
        assert "MemoryError" in reason(engines[1].optimizer.checkpoints.last, RANK)
        assert_latest(folder, "first")
        for engine in engines:
            trial.end(engine)


@ROWS.check("a save by stock after uninstall() is the last one", 1, 2)
def save_after_uninstall(folder):
    with Trial({**STRIDE, **BACKGROUND}) as trial:
        engine = trial.open(Case())
        trial.train(engine, 1)
        engine.save_checkpoint(folder, "a")
        uninstall()
        try:
            engine.save_checkpoint(folder, "b")
        finally:
            install()
        engine.optimizer.checkpoints.wait()
        torch.distributed.barrier()
        assert (folder / "latest").read_text() == "b"
        trial.end(engine)


@ROWS.check("a folder that is gone ends no training", 1, 2)
def lose_the_folder(folder):
    """The rank that finds out tells the others; the next save is whole again."""
    with Trial({**STRIDE, **BACKGROUND}) as trial:
        engine = trial.open(Case())
        trial.train(engine, 1)
        engine.save_checkpoint(folder / "saves", "first")
        engine.optimizer.checkpoints.wait()
        with nothing_written_meanwhile():
            engine.save_checkpoint(folder / "saves", "second")
            torch.distributed.barrier()
            if RANK == 0:
                engine.optimizer.checkpoints.last.fail(OSError("the disk is gone"))
        trial.train(engine, 1)
        engine.optimizer.checkpoints.wait()
        assert_latest(folder / "saves", "first")
        (folder / "file").write_text("no folder")
        torch.distributed.barrier()
        assert not engine.save_checkpoint(folder / "file" / "saves", "third")
        trial.train(engine, 1)
        engine.save_checkpoint(folder / "saves", "fourth")
        engine.optimizer.checkpoints.wait()
        torch.distributed.barrier()
        assert (folder / "saves/latest").read_text() == "fourth"
        trial.end(engine)
