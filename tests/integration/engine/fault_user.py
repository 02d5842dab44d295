"""A user of engines who trains, saves, loads, and goes on after an error; not a test itself.

The weights are known before: the same batches are trained once without an error, and each loss,
norm and state that there can be is kept.
"""

import dataclasses
import hashlib
import signal
import sys
import threading
import traceback
from contextlib import redirect_stdout
from pathlib import Path

import deepspeed
import engines
import torch
from deepspeed.accelerator import get_accelerator
from engines import Case, Net, bits, ds_config, lanes_left, mean_square

WIDTH = 36
"""Even, so that two ranks have no padding, which stock leaves uninitialised."""
NUM_STEPS = 8
"""Steps that are known."""
BETAS = [0.5, 0.75]
"""Their powers are exact in so few steps, see ``saving_worker.py``."""
PLAN = "open train train save train train save train load train save destroy"
TWICE = "open train train save train destroy open load train train save destroy"
RESHARD = "open load_other train save train load train save destroy"
OTHER_AT = 2
"""Steps of the checkpoint that another number of ranks has saved."""


@dataclasses.dataclass(frozen=True)
class Scenario:
    """What users do.

    Attributes:
        case: Model and DeepSpeed's configuration.
        block: The plugin's.
        plan: Calls of each user, in order.
        num_ranks: Of the job.
        saved_by: Ranks that have saved what ``load_other`` loads.
        users: Their names; each has an engine in the same process.
    """

    case: Case
    block: dict
    plan: str = PLAN
    num_ranks: int = 1
    saved_by: int = 0
    users: tuple = ("",)


class Small(Net):
    """A model of which two ranks have the same share."""

    def __init__(self):
        super().__init__(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))


def case_of(stage, **given):
    adam = {"type": "AdamW", "params": {"betas": BETAS}}
    config = {"optimizer": adam, **given.pop("config", {})}
    zero = {"stage": stage, **given.pop("zero", {})}
    return Case(config=config, zero=zero, make=Small, **given)


UNCLIPPED = {"gradient_clipping": 0.0}
EARLY = {"step_before_norm": True, "device_memory_bytes": 10**4}
ON_HOST = {"offload_param": {"device": "cpu"}}
BACKGROUND = {"checkpoint": "background"}
SMALL = {**BACKGROUND, "checkpoint_memory_bytes": 3000}
STRIDE, DYNAMIC, RATIO = (engines.POLICIES[name] for name in ("stride 2", "dynamic", "ratio 0.5"))
SCENARIOS = {
    "stage 3": Scenario(case_of(3), {**STRIDE, **BACKGROUND}),
    "stage 3, no memory for copies": Scenario(case_of(3), {**STRIDE, **SMALL}),
    "stage 3, blocking saves": Scenario(case_of(3), STRIDE),
    "stage 3, dynamic": Scenario(case_of(3), {**DYNAMIC, **BACKGROUND}),
    "stage 3, early work": Scenario(
        case_of(3, config=UNCLIPPED), {**STRIDE, **EARLY, **BACKGROUND}
    ),
    "stage 3, offload_param": Scenario(case_of(3, zero=ON_HOST), {**RATIO, **BACKGROUND}),
    "stage 3, destroyed in between": Scenario(case_of(3), {**STRIDE, **BACKGROUND}, TWICE),
    "stage 3, two engines": Scenario(
        case_of(3), {**STRIDE, **BACKGROUND}, users=("actor", "critic")
    ),
    "stage 3, saved by two ranks": Scenario(case_of(3), STRIDE, RESHARD, saved_by=2),
    "stage 3, two ranks": Scenario(case_of(3), {**STRIDE, **BACKGROUND}, num_ranks=2),
    "stage 2": Scenario(case_of(2), {**STRIDE, **BACKGROUND}),
    "stage 2, state on the device": Scenario(
        case_of(2), {**STRIDE, "device_memory_bytes": 10**4, **BACKGROUND}
    ),
    "stage 2, two ranks": Scenario(case_of(2), {**STRIDE, **BACKGROUND}, num_ranks=2),
    "stage 1": Scenario(case_of(1), {**STRIDE, **BACKGROUND}),
}


class User:
    """One run of a plan, and all that is wrong with it.

    Args:
        scenario: What is done.
        name: The user's.
        folder: Where it saves.
        known: Losses by micro-batch, norms and states by step; None where nothing is compared.
        other: The folder of a checkpoint that another number of ranks has saved.
        block: In place of the scenario's.
    """

    def __init__(self, scenario, name, folder, known, other=None, block=...):
        self.scenario, self.name, self.folder = scenario, name, Path(folder)
        self.other, self.block = other, scenario.block if block is ... else block
        self.engine, self.failed_call, self.has_left = None, "", False
        self.stepping, self.doing = None, []
        self.wrong, self.said, self.saved, self.whole = [], [], [], []
        self.needs_new, self._known = False, known
        self.seen = {"losses": {}, "norms": {}, "states": {}}

    def play(self, call):
        """Do what comes next, whatever became of what was before."""
        if self.has_left or self.attempt(call):
            return
        self.failed_call = call
        if self.scenario.num_ranks > 1:
            self.has_left = True  # a program ends, and the other ranks are to hear of it
            return
        self.look_at_what_is_left()
        self.recover(call)

    def attempt(self, call, *args):
        """Make a call as the user does; returns whether it raised nothing."""
        self.doing.append(call)
        try:
            getattr(self, call)(*args)
        except BaseException as error:  # noqa: BLE001 - the user goes on after any
            self.said.append("".join(traceback.format_exception(error)))
            self.doing.append(f"raised {type(error).__name__}")
            return False
        return True

    # What the user does.

    def open(self):
        self.stepping = None
        torch.manual_seed(3 + len(self.name))
        model = self.scenario.case.make()
        config = ds_config(self.scenario.case, self.block)
        self.engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )

    def train(self):
        """One window of micro-batches, or what is left of it."""
        engine, step = self.engine, self.engine.global_steps
        window = engine.gradient_accumulation_steps()
        while engine.global_steps == step:
            if self.stepping != engine.micro_steps:  # else step() raised: it is called again
                micro_step = step * window + engine.micro_steps % window
                loss = mean_square(engine, batch_of(micro_step, engine.device))
                self.compare("losses", micro_step, loss)
                engine.backward(loss)
            self.stepping = engine.micro_steps
            engine.step()
        self.compare("norms", step, engine.get_global_grad_norm())

    def save(self, folder=None):
        at = self.engine.global_steps
        with redirect_stdout(sys.stderr):
            is_saved = self.engine.save_checkpoint(
                folder or self.folder, f"at{at}{self.name}", {"at": at}
            )
        if is_saved and folder is None:
            self.saved.append(at)

    def load(self):
        """Go back to the last save of this user that is whole; another user's may be the latest."""
        assert self.has_checkpoint(), "there is none"
        self.stepping, tag = None, self.whole[-1] if self.name else None
        found = self.engine.load_checkpoint(self.folder, tag)[0]
        assert found is not None, "nothing was loaded"
        assert self.engine.global_steps in self.saved, self.engine.global_steps

    def has_checkpoint(self):
        """Whether a save of this user is whole by now."""
        if self.engine is not None and self.engine.optimizer.checkpoints is not None:
            self.engine.optimizer.checkpoints.wait()
        tags = [f"at{at}{self.name}" for at in self.saved]
        self.whole = [tag for tag in tags if list((self.folder / tag).glob("*.pt"))]
        return bool(self.whole)

    def load_other(self):
        self.stepping = None
        assert self.engine.load_checkpoint(self.other)[0] is not None

    def destroy(self):
        if self.engine is not None:
            self.engine.destroy()

    # What must hold.

    def compare(self, what, number, value):
        found = value if isinstance(value, str) else bits(value)
        self.seen[what][str(number)] = found
        if self._known is None or (self.other and str(number) not in self._known[what]):
            return  # nothing was known before that checkpoint was loaded
        if self._known[what].get(str(number)) != found:
            self.wrong.append(["other bits", f"{what} at {number}: {self.doing}"])

    def see_state(self):
        found = {
            name: bits(tensor)
            for name, tensor in engines.state_of(self.engine).items()
            if not name.startswith("grad/")  # no checkpoint has them
        }
        digest = hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()
        self.compare("states", self.engine.global_steps, digest)

    def look_at_what_is_left(self):
        """Whatever raises nothing must be right."""
        if self.engine is None or self.failed_call == "destroy":
            return
        self.attempt("see_state")
        if self.attempt("train"):
            self.attempt("see_state")
        self.attempt("save", self.folder / "after")

    def recover(self, call):
        """Go back to the last checkpoint, with the same engine; with a new one if there is none."""
        if call == "destroy":
            self.must("destroy")
            return
        back = "load" if self.has_checkpoint() else "load_other" if self.other else ""
        if call != "open" and back:
            for what in (back, "see_state", "train", "see_state"):
                self.must(what)
            return
        self.needs_new = call != "open"
        self.attempt("destroy")
        self.engine = None
        for what in ("open", *filter(None, [back]), "see_state", "train"):
            self.must(what)

    def must(self, call):
        if not self.attempt(call):
            self.wrong.append(["stuck", f"{call} after {self.failed_call}: {self.said[-1]}"])


def play_plan(scenario, users):
    """Let each user make its next call in turn; look at what the process is left with."""
    signals, memory = signal_handlers(), shared_memory()
    for call in scenario.plan.split():
        for user in users:
            user.play(call)
    if any(user.has_left for user in users):
        return
    user = users[0]
    if threads := lanes_left():
        user.wrong.append(["left", f"threads {threads}"])
    if signal_handlers() != signals:
        user.wrong.append(["left", "signal handlers"])
    if "synchronize" in get_accelerator().__dict__:
        user.wrong.append(["left", "the accelerator's synchronize"])
    if more := shared_memory() - memory:
        user.wrong.append(["left", f"shared memory {more}"])


def shared_memory():
    """What has this process's number in its name; that of another job may have it as its port."""
    return set(Path("/dev/shm").glob(f"*{threading.get_native_id()}*"))


def batch_of(micro_step, device):
    generator = torch.Generator().manual_seed(1000 * micro_step + engines.RANK)
    return [torch.randn(4, WIDTH, generator=generator).to(device, torch.bfloat16) for _ in "xy"]


def signal_handlers():
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]


def kind_of_thread(name):
    if name == threading.main_thread().name:
        return "main"
    kind = name.removeprefix("deep_optimizer_states/").split("_")[0]
    return kind if kind in ("update", "checkpoint") else "lane"
