"""Play scenarios once for each of some points at which a call fails; fork a child for each.

``fault_worker.py REQUEST ANSWER FOLDER``, both JSON files; the request names scenarios and says of
each how many ``points`` to draw ("all", or one of "each place"), which ``only``, as a regular
expression, and what is broken before as a negative ``control``. Not a test itself.
"""

import contextlib
import datetime
import json
import os
import re
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import engines
import torch
from deepspeed.ops.op_builder import CPUAdamBuilder
from fault_user import NUM_STEPS, OTHER_AT, SCENARIOS, User, kind_of_thread, play_plan
from faults import MARK, Watch, draw, fork_each, output_of, points_of
from rows_background import unlike
from seams import UNFINISHED, install
from torch.distributed import distributed_c10d

import deep_optimizer_states
from deep_optimizer_states.core.commit import recover
from deep_optimizer_states.core.device import emulated
from deep_optimizer_states.core.threads import Latch
from deep_optimizer_states.core.update_worker import UpdateWorker

ROOT = Path(deep_optimizer_states.__file__).parent
DEADLINE_S = float(os.environ.get("FAULTS_DEADLINE_S", "120"))


def be_a_rank(folder, rank, num_ranks):
    """Join the other ranks by a file: children that run side by side would share a port."""
    engines.RANK, engines.NUM_RANKS = rank, num_ranks
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    # Of DeepSpeed's own groups too: stock makes them without one.
    patience = distributed_c10d.default_pg_timeout = datetime.timedelta(seconds=DEADLINE_S / 3)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks,
        timeout=patience,
    )  # fmt: skip
    engines.prepare()


class Playing:
    """One scenario: what is known of it, and its points."""

    def __init__(self, name, folder):
        self.scenario, self.folder = SCENARIOS[name], folder
        self.num_ranks, self.other = self.scenario.num_ranks, None
        if self.scenario.saved_by:
            # Its path is there only once others may load it.
            _, self.other = self._know("other", self.scenario.saved_by, OTHER_AT)
        self.known, self.references = self._know("known", self.num_ranks, NUM_STEPS)
        (counts,) = fork_each(
            [None], self._survey, folder / "survey", DEADLINE_S, num_ranks=self.num_ranks
        )
        self.counts = [dict(map(_counted, self._sound(it, "survey", 0))) for it in counts]

    def _know(self, what, num_ranks, num_steps):
        """Train and save after each step, with stock and with ours; others are compared with it."""

        def know(block, rank, folder):
            be_a_rank(folder, rank, num_ranks)
            seen = {}
            for name in self.scenario.users:
                user = User(self.scenario, name, folder / "saves", None, self.other, block)
                user.open()
                if self.other:
                    user.load_other()
                if block:  # stock has no moments before its first step
                    user.see_state()
                for _ in range(num_steps):
                    user.train()
                    user.see_state()
                    user.save()
                user.destroy()
                seen[name] = user.seen
            return seen

        ours = {**self.scenario.block, "checkpoint": "blocking"}
        # Stock loads no checkpoint of another number of ranks.
        blocks = [ours, ours] if self.other else [None, ours]
        both = fork_each(blocks, know, self.folder / what, DEADLINE_S, num_ranks=num_ranks)
        stock, ours = (
            [self._sound(it, what, number) for it in found] for number, found in enumerate(both)
        )
        for theirs, own in zip(stock, ours, strict=True):
            for name, seen in theirs.items():
                assert all(own[name][key] | it == own[name][key] for key, it in seen.items()), name
        return ours, self.folder / what / "1" / "saves"

    def _sound(self, ended, what, number):
        how, found = ended
        assert not how, (how, output_of(self.folder / what / str(number)))
        return found

    def _users(self, rank, folder):
        return [
            User(self.scenario, name, folder / "saves", self.known[rank][name], self.other)
            for name in self.scenario.users
        ]

    def _survey(self, _, rank, folder):
        be_a_rank(folder, rank, self.num_ranks)
        users = self._users(rank, folder)
        with Watch(ROOT, kind_of_thread) as watch:
            play_plan(self.scenario, users)
        found = [(user.wrong, user.said) for user in users]
        assert found == [([], [])] * len(users), found
        return [[*place, count] for place, count in watch.counts.items()]

    def play(self, jobs, folder):
        """Play each job, a point and the rank at which it fails; return what became of it."""

        def play(job, rank, own):
            point, failing = job
            be_a_rank(own, rank, self.num_ranks)
            users = self._users(rank, own)
            with Watch(ROOT, kind_of_thread, point if rank == failing else None) as watch:
                play_plan(self.scenario, users)
            return {
                "fired": watch.is_fired,
                "wrong": [it for user in users for it in user.wrong],
                "said": [text for user in users for text in user.said],
                "new engine": any(user.needs_new for user in users),
                "left": any(user.has_left for user in users),
            }

        ended = fork_each(jobs, play, folder, DEADLINE_S, num_ranks=self.num_ranks)
        outcomes = []
        for number, (job, found) in enumerate(zip(jobs, ended, strict=True)):
            own = folder / str(number)
            outcomes.append([*self._outcome(job, found, own), str(job[0])])
            shutil.rmtree(own)
        return outcomes

    def _outcome(self, job, ended, folder):
        """Return in a word or two what became of a point, and all that is to be known of it."""
        outputs = [output_of(folder, rank) for rank in range(self.num_ranks)]
        more = {"ended": ended, "output": [text[-5000:] for text in outputs]}
        hows = [how for how, _ in ended if how]
        if hows:
            return "hang" if "hang" in hows else "crash", more
        found = ended[job[1]][1]
        if not found["fired"]:
            return "not reached", more
        wrong = [it for _, each in ended for it in each["wrong"]]
        wrong += self._wrong_files(folder, not any(each["left"] for _, each in ended))
        if wrong:
            return wrong[0][0], more | {"wrong": wrong}
        told = "".join(found["said"]) + outputs[job[1]]
        # Of a thread that has ended without a word that alone can be told.
        is_gone = "has ended" in told or "its thread is gone" in told
        if MARK not in told and not (job[0].error == "SystemExit" and is_gone):
            return "silent", more
        return "new engine" if found["new engine"] else "ok", {}

    def _wrong_files(self, folder, is_whole):
        """See that ``latest`` names what the reference saved, and that nothing else lies about."""
        wrong, saves = [], folder / "saves"
        for parent in (saves, saves / "after"):
            if is_whole:
                recover(parent, removes=True)  # as the next save there would
            if not (parent / "latest").exists():
                continue
            tag = (parent / "latest").read_text()
            for path in sorted((Path(self.references) / tag).glob("*.pt")):
                try:
                    both = [
                        torch.load(it, weights_only=False)
                        for it in (parent / tag / path.name, path)
                    ]
                    differs = unlike(*both)
                except Exception as error:  # noqa: BLE001 - whatever makes it no checkpoint
                    differs = [repr(error)]
                if differs:
                    wrong.append(["not whole", f"{parent.name}/{tag}/{path.name}: {differs}"])
        if is_whole and (left := list(folder.rglob(f"*{UNFINISHED}"))):
            wrong.append(["left", f"files {left}"])
        return wrong


def _swallow():
    emulated._ThreadLane._fail = lambda lane, what, error: None


def _take_the_boundary_away():
    emulated.run_guarded = lambda work, tell: work()
    Latch.__init__ = lambda latch, *_: vars(latch).update(is_set=False, _waiting=[],
                                                          _may_come=lambda: True)  # fmt: skip


def _go_on_from_anything():
    UpdateWorker.changing = lambda *_: contextlib.nullcontext()


CONTROLS = {
    "": lambda: None,
    "no boundary": _take_the_boundary_away,
    "a lane's failure is swallowed": _swallow,
    "a half step is gone on from": _go_on_from_anything,
}
"""What is broken in this process, and in the children that it forks from then on."""


def _counted(row):
    *place, count = row
    return tuple(place), count


def main():
    request_path, answer_path, folder = map(Path, sys.argv[1:])
    request, answer = json.loads(request_path.read_text()), {}
    engines.leave_out_muon()
    CPUAdamBuilder().load()
    install()  # reads all of DeepSpeed's methods, once for all children
    for at, (name, asked) in enumerate(request.items()):
        playing = Playing(name, folder / str(at))
        # The rank that fails is another one from point to point.
        points = [
            point
            for point in points_of(playing.counts[-1])
            if re.search(asked.get("only", ""), str(point))
            and not ("leaves_out" in asked and re.search(asked["leaves_out"], str(point)))
        ]
        places = {point.place for point in points}
        numbers = {"all": len(points), "each place": len(places)}
        number = numbers.get(asked["points"], asked["points"])
        drawn = draw(points, number, asked.get("seed", 0))
        CONTROLS[asked.get("control", "")]()
        jobs = [(point, turn % playing.num_ranks) for turn, point in enumerate(drawn)]
        answer[name] = {
            "places": len(playing.counts[-1]),
            "points": len(points),
            "outcomes": playing.play(jobs, folder / str(at) / "points"),
        }
        answer_path.write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
