"""Install the plugin on import: ``import deep_optimizer_states.installed``.

For programs that import a module or a file that they are given, as ms-swift's ``--external_plugins``
does; it needs no other file of the package beside it.
"""

import deep_optimizer_states

deep_optimizer_states.install()
