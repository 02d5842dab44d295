"""Lets DeepSpeed use our optimizer, where ``ds_config.json`` asks for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from configs.errors import ConfigError
from launch.trainer.runfile import RunFile


@contextlib.contextmanager
def plugin_installed(run: RunFile) -> Iterator[None]:
    """Install ``deep_optimizer_states`` before DeepSpeed reads its config, or leave it stock.

    Raises:
        ConfigError: the package cannot be imported, or refuses the settings, this DeepSpeed or
            this machine; inside the context too.
    """
    if not run.uses_plugin:
        yield
        return
    try:
        import deep_optimizer_states as plugin
    except ImportError as error:
        raise ConfigError(
            f"ds_config.json enables deep_optimizer_states, which cannot be imported ({error}); "
            "run 'make setup'"
        ) from None
    block = run.ds_config["deep_optimizer_states"]
    if block.get("timeline"):  # a relative folder is one of the run's own
        block["timeline"] = str(run.run_dir / block["timeline"])
    try:
        plugin.install()
        yield
    except (plugin.ConfigError, plugin.UnsupportedDeepSpeedError, plugin.KernelError) as error:
        raise ConfigError(f"deep_optimizer_states: {error}") from None
