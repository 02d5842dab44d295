"""Install the plugin on import: ``import deep_optimizer_states.installed``.

For programs that import a module or a file of the user's, as ms-swift's ``--external_plugins``.
"""

import sys
from pathlib import Path

import deep_optimizer_states

deep_optimizer_states.install()
if __name__ != "deep_optimizer_states.installed":
    # Who imports the file by its path puts its folder first on Python's path, where this package's
    # modules would be found by names such as `build` and `axolotl`, which others have too.
    folder = Path(__file__).parent
    sys.path[:] = [entry for entry in sys.path if not entry or Path(entry) != folder]
