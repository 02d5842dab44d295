"""Install the plugin on import: ``import deep_optimizer_states.installed``.

For programs that import a module or a file of the user's, as ms-swift's ``--external_plugins``.
"""

import deep_optimizer_states

deep_optimizer_states.install()
