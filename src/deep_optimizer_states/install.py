"""Make ``deepspeed.initialize`` use our optimizer where the config asks for it."""

from __future__ import annotations

import functools
from typing import Any

from deep_optimizer_states.config import BLOCK, Settings, read_settings, translate_paper_keys
from deep_optimizer_states.deepspeed_guard import check_deepspeed
from deep_optimizer_states.errors import ConfigError

_originals: dict[tuple[Any, str], Any] = {}


def install() -> None:
    """Teach this process's DeepSpeed the ``"deep_optimizer_states"`` block and the paper's keys.

    Call it once, before ``deepspeed.initialize``. DeepSpeed's files are not touched; a config
    without an enabled block behaves as before. Calling it again changes nothing.

    Raises:
        UnsupportedDeepSpeedError: DeepSpeed is missing, or its code differs from what this package
            was checked against; names what differs.
    """
    if _originals:
        return
    check_deepspeed()
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine

    _wrap(DeepSpeedConfig, "_initialize_params", _initialize_params)
    _wrap(DeepSpeedEngine, "_configure_zero_optimizer", _configure_zero_optimizer)
    _wrap(DeepSpeedEngine, "step", _step)
    _wrap(DeepSpeedEngine, "load_checkpoint", _load_checkpoint)


def uninstall() -> None:
    """Undo :func:`install`; engines that exist keep their optimizer."""
    for (owner, name), original in _originals.items():
        setattr(owner, name, original)
    _originals.clear()


def _wrap(owner: Any, name: str, wrapper: Any) -> None:
    original = getattr(owner, name)
    _originals[owner, name] = original

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(original, self, *args, **kwargs)

    setattr(owner, name, wrapped)


def _initialize_params(original: Any, config: Any, param_dict: dict[str, Any]) -> None:
    """DeepSpeed's reading of its config, with the paper's keys translated before it validates."""
    translated = translate_paper_keys(param_dict)
    settings = read_settings(translated)
    original(config, translated)
    config.deep_optimizer_states = settings
    if settings.enabled:
        check_supported(config)


def _configure_zero_optimizer(original: Any, engine: Any, optimizer: Any) -> Any:
    from deepspeed.pipe import PipelineModule

    settings: Settings = getattr(engine._config, BLOCK, Settings())
    is_pipeline = isinstance(engine.module, PipelineModule)
    # DeepSpeed gives no optimizer to an engine for inference. It refuses a pipeline with ZeRO-3
    # after this method has returned, and nobody would end the lanes of an optimizer made here.
    if not settings.enabled or optimizer is None or is_pipeline:
        return original(engine, optimizer)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    # The method imports this module when it runs, and it subclasses stock's optimizer: it must not
    # meet ours in its place.
    from deepspeed.runtime.superoffload import superoffload_stage3  # noqa: F401
    from deepspeed.runtime.zero import stage3

    from deep_optimizer_states.engine_calls import time_own_stream
    from deep_optimizer_states.zero3.optimizer import InterleavedZeroOptimizer

    if type(optimizer) is not DeepSpeedCPUAdam:
        raise ConfigError(
            f'"{BLOCK}" works on DeepSpeedCPUAdam; the optimizer is '
            f"{type(optimizer).__name__}. Give DeepSpeed an Adam or AdamW "
            '"optimizer" block, or pass it a DeepSpeedCPUAdam'
        )
    # The method imports the name from this module when it runs: swap it for the length of the call.
    stock = stage3.DeepSpeedZeroOptimizer_Stage3
    stage3.DeepSpeedZeroOptimizer_Stage3 = functools.partial(
        InterleavedZeroOptimizer,
        settings=settings,
        is_managed=engine.managed_gradient_accumulation(),
    )
    try:
        ours = original(engine, optimizer)
    finally:
        stage3.DeepSpeedZeroOptimizer_Stage3 = stock
    if settings.just_in_time_forward:
        time_own_stream(engine.tput_timer)
    return ours


def _is_ours(engine: Any) -> bool:
    return hasattr(engine.optimizer, "background")


def _step(original: Any, engine: Any, *args: Any, **kwargs: Any) -> Any:
    """DeepSpeed's step: the update, its counters and the learning rate go together."""
    if not _is_ours(engine):
        return original(engine, *args, **kwargs)
    from deep_optimizer_states.engine_calls import signals_held_back

    with signals_held_back():
        return original(engine, *args, **kwargs)


def _load_checkpoint(original: Any, engine: Any, *args: Any, **kwargs: Any) -> Any:
    """DeepSpeed's loading, which may come after an update that failed."""
    if not _is_ours(engine):
        return original(engine, *args, **kwargs)
    background = engine.optimizer.background
    with background.overlooking_failure():
        had_failed = background.has_failed
        found = original(engine, *args, **kwargs)
    if had_failed and not background.has_failed:
        # DeepSpeed does not count the micro-batch whose step failed, and the next window would end
        # one too early.
        engine.micro_steps += -engine.micro_steps % engine.gradient_accumulation_steps()
    return found


def check_supported(config: Any) -> None:
    """Refuse what the engine does not do yet, by name.

    Args:
        config: A ``DeepSpeedConfig`` that has read its parameters.

    Raises:
        ConfigError: Names the setting, its value and the way out.
    """
    zero = config.zero_config
    offload, offload_param = zero.offload_optimizer, zero.offload_param
    device = "none" if offload is None else _text(offload.device)
    param_device = "none" if offload_param is None else _text(offload_param.device)
    ratio = 1.0 if offload is None else offload.ratio
    name = config.optimizer_name or "adam"  # none: the caller passes its own, checked later
    deepcompile = getattr(config.compile_config, "deepcompile", False)
    is_adam = name.lower() in ("adam", "adamw")
    # docs/settings.md says what Muon leaves for this package to do.
    is_muon = name.lower() == "muon"
    why = ": Muon needs whole matrices before any tile can be updated" if is_muon else ""
    torch_adam = (config.optimizer_params or {}).get("torch_adam")
    out = "true: take it out"
    wrong = [
        (not is_adam, f'optimizer.type = {name}: set it to "Adam" or "AdamW"{why}'),
        (torch_adam, f"optimizer.params.torch_adam = {out}: the update is DeepSpeedCPUAdam's"),
        (zero.stage != 3, f"zero_optimization.stage = {zero.stage}: set it to 3"),
        (device != "cpu", f'offload_optimizer.device = {device}: set it to "cpu"'),
        (param_device != "none", f"offload_param.device = {param_device}: take offload_param out"),
        (ratio != 1.0, f'offload_optimizer.ratio = {ratio}: set it to 1 and choose a "policy"'),
        (zero.zenflow is not None, "zero_optimization.zenflow: take it out"),
        (getattr(offload, "super_offload", False), f"super_offload = {out}"),
        (deepcompile, f"compile.deepcompile = {out}: it bypasses the gradient path"),
    ]
    found = [sentence for is_wrong, sentence in wrong if is_wrong]
    if found:
        raise ConfigError(f'"{BLOCK}" does not work with ' + "; ".join(found))


def _text(device: Any) -> str:
    # DeepSpeed holds the device as an enum member or as its value, depending on how it was given.
    return str(getattr(device, "value", device))
