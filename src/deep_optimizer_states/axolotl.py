"""For axolotl's YAML: ``plugins: [deep_optimizer_states.axolotl.DeepOptimizerStatesPlugin]``.

Every rank makes an object of the class before it reads its DeepSpeed config.
"""

from axolotl.integrations.base import BasePlugin

import deep_optimizer_states


class DeepOptimizerStatesPlugin(BasePlugin):
    """Installs the plugin in DeepSpeed; the config's block says what it does."""

    def __init__(self) -> None:
        """Install it, or say which DeepSpeed is needed."""
        super().__init__()
        deep_optimizer_states.install()
