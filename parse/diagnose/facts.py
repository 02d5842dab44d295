"""Settings that logs state: one pattern a wording, by the name of the setting."""

from __future__ import annotations

import re
from pathlib import Path

from parse.diagnose.illness import quoted
from parse.diagnose.watcher import Fact, Run, Watcher
from parse.log.facts import RunFacts
from parse.log.fields import GLOBAL_STEP, PROGRESS
from parse.log.lines import Line
from parse.log.records import Log

_REAL = r"\d[\d_.]*(?:[eE][-+]?\d+)?"
_OFFLOADED = r"(?:<OffloadDeviceEnum\.\w+: ')?'?(cpu|nvme)"
_PATTERNS: tuple[tuple[str, str], ...] = (
    ("version", r"DeepSpeed info: version=(\d+\.\d+\.\d+)"),
    ("version", r"(?i)deepspeed version: ?(\d+\.\d+\.\d+)"),
    ("version", r"deepspeed info \.+ (\d+\.\d+\.\d+)"),
    ("stage", r"zero_optimization_stage \.+ (\d)"),
    ("stage", r"Creating \S+ ZeRO stage (\d) optimizer"),
    ("stage", r"zero_config \.+ .*\bstage=(?:<\S+ )?(\d)"),
    ("stage", r"--zero-stage[= ](\d)"),
    ("stage", r'"stage": (\d)'),
    ("offload", rf"offload_optimizer=\w+\(device={_OFFLOADED}"),
    ("offload", r"CPU Offload: (True)"),
    ("accumulation", r"gradient_accumulation_steps \.+ (\d+)"),
    ("accumulation", r'"gradient_accumulation_steps": (\d+)'),
    ("accumulation", r"Gradient Accumulation steps = (\d+)"),
    ("clip", rf"gradient_clipping \.+ ({_REAL})"),
    ("clip", rf'"gradient_clipping": ({_REAL})'),
    ("clip", rf"\bclip_grad \.+ ({_REAL})"),
    ("clip", rf"--clip-grad[= ]({_REAL})"),
    ("clip", rf"\b(?:max_grad_norm|gradient_clip_val)['\"]?[ :=.]+({_REAL})"),
    ("reduce_bucket", rf"Reduce bucket size ({_REAL})"),
    ("reduce_bucket", rf'"reduce_bucket_size": ({_REAL})'),
    ("reduce_bucket", rf"\breduce_bucket_size=({_REAL})"),
    ("expert_class", r"\b(\w+(?:MoeFor\w+|SparseMoeBlock)|MixtralFor\w+|DeepseekV[23]For\w+)"),
    ("experts", r'"(?:num_local_experts|num_experts|n_routed_experts)": ([2-9]|\d\d+)\b'),
    ("leaf", r"(set_z3_leaf_modules|z3_leaf_module|Setting zero3 leaf)"),
    ("leaf", r'("leaf_module"): \{'),
    ("world", r"\bworld size: (\d+), device"),
    ("gpus", r"\bn_gpu: ?(\d+)"),
    ("one_thread", r"OMP_NUM_THREADS environment variable for each process to be (1) in default"),
)  # fmt: skip
_COMPILED = [(name, re.compile(pattern)) for name, pattern in _PATTERNS]
_BLOCK = re.compile(r'^\s*"(\w+)": \{\s*$')
_DEVICE = re.compile(r'^\s*"device": "(\w+)"')
_SOFTWARE = (
    ("DeepSpeed", re.compile(r"\[deepspeed\]|DeepSpeed info|deepspeed\.launcher|ds_accelerator")),
    ("axolotl", re.compile(r"\[axolotl\.|\baxolotl\.(?:cli|train|utils)")),
    ("LLaMA-Factory", re.compile(r"llamafactory|LLaMA-Factory|llamafactory-cli")),
    ("Lightning", re.compile(r"GPU available: (?:True|False).*used:|`Trainer\.fit` stopped")),
    ("Hugging Face Trainer", re.compile(r"\*{5} Running training \*{5}|'train_runtime': ")),
    ("torchrun", re.compile(r"torch(?:/|\.)distributed(?:/|\.)(?:run|elastic|launcher)")),
)


class Facts(Watcher):
    """Notes settings and software."""

    words = (
        *("eepSpeed", "eepspeed", "ds_accelerator", "zero", "ZeRO stage", '"stage"', "ffload"),
        *("ccumulation", "clip", "max_grad_norm", "ucket", "Moe", "xperts", "Mixtral", "Deepseek"),
        *("leaf", "world", "n_gpu", "OMP_NUM_THREADS", "padded vocab", "parallel rank", " ...."),
        *('"device"', '": {', "axolotl", "llamafactory", "LLaMA-Factory", "GPU available"),
        *("`Trainer.fit`", "Running training", "'train_runtime'", "torch.distributed"),
        *("torch/distributed", "global_step=", "skipped="),
    )

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._block = ""
        self._log = Log(Path())
        # What the tables read of a log's set-up is read by the same code.
        self._of_log = RunFacts(self._log)

    def feed(self, line: Line) -> None:
        """Note what a line states."""
        text = line.text
        for name, pattern in _SOFTWARE:
            if name not in self.run.software and pattern.search(text):
                self.run.software.add(name)
        if GLOBAL_STEP.search(text) or PROGRESS.search(text):
            self.run.software.add("DeepSpeed")
            self.run.num_progress += 1
        self._device_of_block(line)
        self._of_log.feed(text)
        self.run.vocab_sizes = self._log.vocab_sizes
        for name, pattern in _COMPILED:
            found = pattern.search(text)
            # DeepSpeed lists the classes that it makes leaves by default, whatever the model is.
            if found and not (name == "expert_class" and "leaf" in text):
                self._set(name, found[1], line)

    def finish(self) -> None:
        """Work out what needs the whole log."""
        self._of_log.finish(trained=self.run.num_steps > 0)
        if self._log.world_size:
            self.run.facts.setdefault("world", Fact(str(self._log.world_size), 0, ""))

    def _device_of_block(self, line: Line) -> None:
        """DeepSpeed prints its JSON over several lines; a device is of the block around it."""
        if block := _BLOCK.match(line.text):
            self._block = block[1]
        elif self._block == "offload_optimizer" and (device := _DEVICE.match(line.text)):
            if device[1] != "none":
                self._set("offload", device[1], line)
            self._block = ""

    def _set(self, name: str, value: str, line: Line) -> None:
        self.run.facts[name] = Fact(value, line.number, quoted(line.text))
