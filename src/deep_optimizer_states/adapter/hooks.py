"""Make ``deepspeed.initialize`` use our optimizer where the config asks for it.

:func:`install` wraps methods of DeepSpeed's config and engine.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from deep_optimizer_states.adapter.guard import (
    CHECKED_VERSIONS,
    check_deepspeed,
    installed_version,
    loses_gradients,
    say,
)
from deep_optimizer_states.errors import ConfigError, UnsupportedDeepSpeedError
from deep_optimizer_states.op_locks import locks_of_ops

if TYPE_CHECKING:  # they need pydantic or DeepSpeed; commands still say what is missing
    from deep_optimizer_states.adapter.zero3.gathers import GatherBarrier
    from deep_optimizer_states.config import Settings

originals: dict[tuple[Any, str], Any] = {}
"""DeepSpeed's own methods, by class and name: all in whose place ours are."""
standing_barriers: weakref.WeakSet[GatherBarrier] = weakref.WeakSet()
"""What gathers of weights come past, one for each engine of stage 3."""
Handler = Callable[[int, FrameType | None], Any]


def install(allow_unverified: bool = False) -> None:
    """Teach this process's DeepSpeed the ``"deep_optimizer_states"`` block and the paper's keys.

    Call it once, before ``deepspeed.initialize``. DeepSpeed's files are not touched; a config
    without an enabled block behaves as before. Calling it again changes nothing.

    Args:
        allow_unverified: Take a DeepSpeed of which equal bits cannot be promised, with a warning
            that names what differs. ``DEEP_OPTIMIZER_STATES_ALLOW_UNVERIFIED=1`` does the same.

    Raises:
        UnsupportedDeepSpeedError: This is not Linux, DeepSpeed is missing, or its code is not
            known; names what differs.
    """
    if originals:
        return
    check_deepspeed(allow_unverified)
    if originals:  # the check's import of DeepSpeed has called this already, by the hook of `run`
        return
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.partition_parameters import Init

    from deep_optimizer_states.adapter.own_stream import synchronize
    from deep_optimizer_states.core.kernels.host import build_folder

    for lock in locks_of_ops(build_folder().parent):  # DeepSpeed waits for them and says nothing
        say(str(lock))
    _wrap(DeepSpeedConfig, "_initialize_params", _initialize_params)
    _wrap(DeepSpeedEngine, "_configure_optimizer", _configure_optimizer)
    _wrap(DeepSpeedEngine, "_configure_zero_optimizer", _configure_zero_optimizer)
    _wrap(DeepSpeedEngine, "forward", _noting_out_of_memory)
    _wrap(DeepSpeedEngine, "backward", _backward)
    _wrap(DeepSpeedEngine, "step", _step)
    _wrap(DeepSpeedEngine, "save_checkpoint", _save_checkpoint)
    _wrap(DeepSpeedEngine, "load_checkpoint", _load_checkpoint)
    _wrap(DeepSpeedEngine, "load_module_state_dict", _load_module_state_dict)
    # Below DeepSpeed's own gathers, where every way to gather comes past. A parameter's own method
    # would be too high: one gather may name parameters of several models, and goes through the
    # method of the first.
    _wrap(Init, "_ensure_availability_of_partitioned_params", _find_partitions)
    _wrap(Init, "_all_gather", _all_gather)
    _wrap(type(get_accelerator()), "synchronize", synchronize)


def uninstall() -> None:
    """Give DeepSpeed its own methods back.

    Engines that exist keep their optimizer; those of stage 3 end each update within ``step()`` from
    now on. Saves under way are waited for, since stock's would not.

    Raises:
        UpdateError: The update in flight of one of them did not end in time.
    """
    try:
        if originals:
            _wait_for_saves()
        for barrier in list(standing_barriers):
            barrier.retire()
    finally:
        for (owner, name), original in originals.items():
            setattr(owner, name, original)
        originals.clear()


def _wrap(owner: Any, name: str, wrapper: Any) -> None:
    original = getattr(owner, name)
    originals[owner, name] = original

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(original, self, *args, **kwargs)

    setattr(owner, name, wrapped)


def _find_partitions(original: Any, init: Any, params: list[Any]) -> Any:
    """Gather parameters as DeepSpeed does, once the updates in flight are done with them."""
    for barrier in list(standing_barriers):
        barrier.before_gather(params)
    return original(init, params)


def _all_gather(original: Any, init: Any, *args: Any, **kwargs: Any) -> Any:
    """Gather as DeepSpeed does, which synchronises after it: not with an update in flight."""
    if all(barrier.background.update is None for barrier in standing_barriers):
        return original(init, *args, **kwargs)
    from deep_optimizer_states.adapter.own_stream import own_stream_alone

    with own_stream_alone():
        return original(init, *args, **kwargs)


def _initialize_params(original: Any, config: Any, param_dict: dict[str, Any]) -> None:
    """Let DeepSpeed read its config once the paper's keys are translated."""
    from deep_optimizer_states.config import read_settings, translate_paper_keys

    translated = translate_paper_keys(param_dict)
    settings = read_settings(translated)
    original(config, translated)
    config.deep_optimizer_states = settings
    if settings.enabled:
        check_supported(config)


def _configure_optimizer(original: Any, engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Say of an engine that does not ask for the plugin that it is stock's."""
    from deepspeed.utils import log_dist

    from deep_optimizer_states.config import BLOCK

    settings = getattr(engine._config, BLOCK, None)
    if settings is not None and not settings.enabled:
        log_dist(
            f"{BLOCK}: this engine is stock's (DeepSpeed {installed_version()}, ZeRO stage "
            f'{engine.zero_optimization_stage()}): its config has no enabled "{BLOCK}" block',
            ranks=[0],
            level=logging.WARNING,
        )
    return original(engine, *args, **kwargs)


def _configure_zero_optimizer(original: Any, engine: Any, optimizer: Any) -> Any:
    from deepspeed.pipe import PipelineModule

    from deep_optimizer_states.config import BLOCK, Settings

    settings: Settings = getattr(engine._config, BLOCK, Settings())
    # DeepSpeed gives no optimizer to an engine for inference.
    if not settings.enabled or optimizer is None:
        return original(engine, optimizer)
    if isinstance(engine.module, PipelineModule):
        if engine.zero_optimization_stage() < 3:
            raise ConfigError(
                f'"{BLOCK}" does not work with a PipelineModule: set {BLOCK}.enabled to false'
            )
        # DeepSpeed refuses it with ZeRO-3 after this method has returned, and nobody would end the
        # lanes of an optimizer made here.
        return original(engine, optimizer)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    from deep_optimizer_states.adapter.own_stream import time_own_stream

    if type(optimizer) is not DeepSpeedCPUAdam:
        forced = engine._config.zero_force_ds_cpu_optimizer
        out = "" if forced else ', or take "zero_force_ds_cpu_optimizer": false out'
        raise ConfigError(
            f'"{BLOCK}" works on DeepSpeedCPUAdam; the optimizer is '
            f"{type(optimizer).__name__}. Give DeepSpeed an Adam or AdamW "
            f'"optimizer" block, or pass it a DeepSpeedCPUAdam{out}'
        )
    # Before there is an optimizer, whose threads nobody would end if this failed.
    if settings.just_in_time_forward:
        time_own_stream(engine.tput_timer)
    module, name, ours = _adapter_of(engine, settings)
    # The method looks the name up in this module when it runs: swap it for the length of the call.
    stock = getattr(module, name)
    setattr(module, name, ours)
    try:
        return original(engine, optimizer)
    finally:
        setattr(module, name, stock)


def _adapter_of(engine: Any, settings: Settings) -> tuple[Any, str, Any]:
    """Return module and name of the class of this engine's stage, and ours in its place."""
    if engine.zero_optimization_stage() < 3:
        from deepspeed.runtime import engine as module

        from deep_optimizer_states.adapter.zero12.optimizer import InterleavedFlatOptimizer

        zero = engine._config.zero_config
        is_given = "sub_group_size" in zero.model_fields_set
        flat = functools.partial(
            InterleavedFlatOptimizer,
            settings=settings,
            # Stock has no subgroups at these stages, so that its default means nothing here.
            subgroup_numel=zero.sub_group_size if is_given else 0,
            get_module=lambda: engine.module,
        )
        return module, "DeepSpeedZeroOptimizer", flat
    # DeepSpeed imports this module later, and it subclasses stock's optimizer: it must not meet
    # ours in its place.
    from deepspeed.runtime.superoffload import superoffload_stage3  # noqa: F401
    from deepspeed.runtime.zero import stage3

    from deep_optimizer_states.adapter.zero3.optimizer import InterleavedZeroOptimizer

    zero3 = functools.partial(
        InterleavedZeroOptimizer,
        settings=settings,
        is_managed=_is_managed(engine),
    )
    return stage3, "DeepSpeedZeroOptimizer_Stage3", zero3


def _is_managed(engine: Any) -> bool:
    # Releases before 0.19 know no other way to end a window.
    return not hasattr(engine, "managed_gradient_accumulation") or bool(
        engine.managed_gradient_accumulation()
    )


def _is_ours(engine: Any) -> bool:
    return hasattr(engine.optimizer, "background")


def _noting_out_of_memory(original: Any, engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Call DeepSpeed's method; if it runs out of device memory, the next attempt has more."""
    if not _is_ours(engine):
        return original(engine, *args, **kwargs)
    from torch import OutOfMemoryError

    try:
        # Nothing may come after a backward that is whole: an error then would have it repeated.
        return original(engine, *args, **kwargs)
    except OutOfMemoryError as error:
        engine.optimizer.give_memory_back(error)
        raise


def _backward(original: Any, engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Call DeepSpeed's method; an error after autograd's part cuts the backward short as well."""
    if not _is_ours(engine):
        return original(engine, *args, **kwargs)
    before = engine.optimizer._backward_active_depth
    try:
        return _noting_out_of_memory(original, engine, *args, **kwargs)
    except BaseException:
        engine.optimizer.after_failed_autograd(before)
        raise


def _step(original: Any, engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Step as DeepSpeed does; the update, its counters and the learning rate go together."""
    if not _is_ours(engine):
        _refuse_made_too_early(engine)
        return original(engine, *args, **kwargs)
    if engine.optimizer.checkpoints is not None:
        engine.optimizer.checkpoints.check()
    with signals_held_back(), engine.optimizer.stepping(engine):
        return original(engine, *args, **kwargs)


def _refuse_made_too_early(engine: Any) -> None:
    """Refuse to train an engine whose block nobody read, since it would be ignored in silence."""
    from deep_optimizer_states.config import BLOCK, read_settings

    config = engine._config
    if not hasattr(config, BLOCK) and read_settings(config._param_dict).enabled:
        raise ConfigError(
            f'this engine was made before deep_optimizer_states.install(), and its "{BLOCK}" block '
            "was not read: call install() before deepspeed.initialize, at the top of the script, "
            "or start the command with `python -m deep_optimizer_states run`"
        )


def _save_checkpoint(original: Any, engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Save as DeepSpeed does, in the background where the settings ask for it."""
    from deep_optimizer_states.core.commit import Target

    save = functools.partial(original, engine, *args, **kwargs)
    asked = inspect.signature(original).bind(engine, *args, **kwargs)
    asked.apply_defaults()
    given = asked.arguments
    if not given["save_dir"]:
        return save()  # DeepSpeed says what is wrong with it
    folder = Path(given["save_dir"]).resolve()
    if not _is_ours(engine) or engine.optimizer.checkpoints is None:
        _wait_for_saves(folder)  # which would replace `latest` after this one has
        return save()
    # DeepSpeed's own default; its checkpoint engine is told the tag, and ours compares.
    tag = f"global_step{engine.global_steps}" if given["tag"] is None else str(given["tag"])
    target = Target(folder, tag, bool(given["save_latest"]))
    return engine.optimizer.checkpoints.save(engine, save, target)


def _wait_for_saves(folder: Path | None = None) -> None:
    from deep_optimizer_states.adapter.checkpoint import wait_for_saves

    wait_for_saves(folder)


def _load_checkpoint(original: Any, engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Load as DeepSpeed does, perhaps after an update that failed."""
    from deep_optimizer_states.adapter.checkpoint import before_load_by_others

    asked = inspect.signature(original).bind(engine, *args, **kwargs).arguments
    weights_alone = asked.get("load_module_only") or not asked.get("load_optimizer_states", True)
    checkpoints = engine.optimizer.checkpoints if _is_ours(engine) else None
    before_load = checkpoints.before_load if checkpoints is not None else before_load_by_others
    # Below stage 3 stock lets one rank load weights by itself.
    is_together = engine.zero_optimization_stage() == 3 or not weights_alone
    before_load(Path(asked["load_dir"]).resolve(), is_together)
    if not _is_ours(engine):
        return original(engine, *args, **kwargs)
    from deep_optimizer_states.adapter.reshard import resharding

    background = engine.optimizer.background
    if weights_alone:
        background.refuse_while_open()
    with background.overlooking_failure(), resharding(engine, asked):
        engine.optimizer.hear_of_lost_gradients()
        was_cut_short = engine.optimizer.is_cut_short
        with engine.optimizer.loading():
            found = original(engine, *args, **kwargs)
    if was_cut_short and not engine.optimizer.is_cut_short:
        # DeepSpeed does not count the micro-batch that failed, and the next window would end one
        # too early.
        engine.micro_steps += -engine.micro_steps % engine.gradient_accumulation_steps()
    return found


def _load_module_state_dict(original: Any, engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Load weights; what is cut short from here on is half loaded."""
    if _is_ours(engine):
        engine.optimizer.is_being_loaded = True
    return original(engine, *args, **kwargs)


def check_supported(config: Any) -> None:
    """Refuse what the engine does not do, by name.

    Raises:
        ConfigError: Names the setting, its value and the way out.
        UnsupportedDeepSpeedError: Stock itself goes wrong at this stage in this release.
    """
    from deep_optimizer_states.config import BLOCK, STEP_BEFORE_NORM

    zero = config.zero_config
    offload, offload_param = zero.offload_optimizer, zero.offload_param
    device = "none" if offload is None else _text(offload.device)
    param_device = "none" if offload_param is None else _text(offload_param.device)
    ratio = 1.0 if offload is None else offload.ratio
    name = config.optimizer_name or "adam"  # none: the caller passes its own, checked later
    fp16 = config.float16_config.fp16_master_weights_and_grads
    bf16 = config.bfloat16_config.bf16_master_weights_and_grads
    deepcompile = getattr(config.compile_config, "deepcompile", False)
    is_adam = name.lower() in ("adam", "adamw")
    is_muon = name.lower() == "muon"
    why = ": Muon needs whole matrices before any tile can be updated" if is_muon else ""
    torch_adam = (config.optimizer_params or {}).get("torch_adam")
    # Both are in DeepSpeed before 0.19.7 only.
    mics = getattr(zero, "mics_shard_size", -1)
    is_mics, is_compressed = mics > 0, bool(config._param_dict.get("compression_training"))
    ours = getattr(config, BLOCK)
    resident, early = ours.ratio, ours.step_before_norm
    is_fp16, clipping = config.float16_config.enabled, config.gradient_clipping
    out = "true: take it out"
    wrong = [
        (not is_adam, f'optimizer.type = {name}: set it to "Adam" or "AdamW"{why}'),
        (torch_adam, f"optimizer.params.torch_adam = {out}: the update is DeepSpeedCPUAdam's"),
        (zero.stage not in (1, 2, 3), f"zero_optimization.stage = {zero.stage}: set it to 1 to 3"),
        (device != "cpu", f'offload_optimizer.device = {device}: set it to "cpu"'),
        (
            param_device not in ("none", "cpu"),
            f'offload_param.device = {param_device}: set it to "cpu", or take offload_param out',
        ),
        (ratio != 1.0, f'offload_optimizer.ratio = {ratio}: set it to 1 and choose a "policy"'),
        (zero.zenflow is not None, "zero_optimization.zenflow: take it out"),
        (is_mics, f"zero_optimization.mics_shard_size = {mics}: take it out"),
        (is_compressed, "compression_training: take it out; it quantises weights behind a step"),
        (getattr(offload, "super_offload", False), f"super_offload = {out}"),
        (zero.stage < 3 and fp16, f"fp16_master_weights_and_grads = {out}, or use stage 3"),
        (zero.stage < 3 and bf16, f"bf16_master_weights_and_grads = {out}, or use stage 3"),
        (
            zero.stage < 3 and resident < 1,
            f"{BLOCK}.ratio = {resident}: set it to 1; at stage {zero.stage} the state of a "
            "parameter group is one tensor, of which no share can stay on the device",
        ),
        (zero.stage < 3 and early, f"{STEP_BEFORE_NORM} = {out}, or use stage 3"),
        (
            early and clipping > 0,
            f"{STEP_BEFORE_NORM} = true and gradient_clipping = {clipping}: the norm decides what "
            "gradients are multiplied by; set the one to false or the other to 0",
        ),
        (
            early and is_fp16,
            f"{STEP_BEFORE_NORM} = true and fp16: an overflow skips the step; use bf16, or set it "
            "to false",
        ),
        (deepcompile, f"compile.deepcompile = {out}: it bypasses the gradient path"),
        *_checkpoint_engines(config),
    ]
    found = [sentence for is_wrong, sentence in wrong if is_wrong]
    if found:
        raise ConfigError(f'"{BLOCK}" does not work with ' + "; ".join(found))
    if zero.stage < 3 and loses_gradients(installed_version()):
        whole = next(each for each in CHECKED_VERSIONS if not loses_gradients(each))
        raise UnsupportedDeepSpeedError(
            f"DeepSpeed {installed_version()} at zero_optimization.stage = {zero.stage}: with the "
            "optimizer on the CPU, its stages 1 and 2 drop gradients of all micro-batches of a "
            f"window but one (DeepSpeed's pull requests 7967 and 7981); install {whole} or newer, "
            "or set the stage to 3"
        )


def _checkpoint_engines(config: Any) -> list[tuple[bool, str]]:
    """Return what a checkpoint in the background does not go with, and whether it is asked for."""
    from deep_optimizer_states.config import BLOCK

    if getattr(config, BLOCK).checkpoint == "blocking":
        return []
    asked, given = f'{BLOCK}.checkpoint = "background"', config.checkpoint_config
    ways = "take the one out, or set the other to"
    is_node_local, is_zip = config.use_node_local_storage, given["checkpoint_serialization"]
    return [
        (given["writer"] is not None, f'checkpoint.writer and {asked}: {ways} "blocking"'),
        (config.datastates_config.enabled, f'datastates_ckpt and {asked}: {ways} "blocking"'),
        (
            is_node_local,
            f"checkpoint.use_node_local_storage = true and {asked}: rank 0 names the files of all; "
            "set it to false and save to a folder that all ranks see",
        ),
        (not is_zip, f"checkpoint.checkpoint_serialization = false and {asked}: set it to true"),
    ]


def _text(device: Any) -> str:
    # DeepSpeed holds the device as an enum member or as its value, depending on how it was given.
    return str(getattr(device, "value", device))


@contextlib.contextmanager
def signals_held_back() -> Iterator[None]:
    """Call Python's signal handlers after the block, and not in the middle of it.

    Ctrl-C between an update and the counters that belong to it would leave an engine whose next
    checkpoint is wrong. A second signal of the same number is let through at once: something hangs.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers run on the main thread alone
        return
    held: dict[int, FrameType | None] = {}
    handlers = _handlers_in_python()

    def hold(number: int, frame: FrameType | None) -> None:
        if number in held:
            handlers[number](number, frame)
        else:
            held[number] = frame

    def give_back() -> None:
        for number, handler in handlers.items():
            if signal.getsignal(number) is hold:
                signal.signal(number, handler)

    try:
        for number in handlers:
            signal.signal(number, hold)
        yield
    finally:
        try:
            give_back()
        except BaseException:
            give_back()  # once more: a program that nobody can interrupt would be left
            raise
        for number, frame in held.items():
            handlers[number](number, frame)


def _handlers_in_python() -> dict[int, Handler]:
    found = {int(number): signal.getsignal(number) for number in signal.valid_signals()}
    return {number: handler for number, handler in found.items() if callable(handler)}
