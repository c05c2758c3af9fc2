"""Starts the shell agent from a toolbox: `shell-agent CONFIG.json`, or `shell-agent --check`.

A program of its own because Python keeps the compiled form of a module but not of a script.
"""

import sys

sys.path.insert(0, __file__.rpartition("/")[0] + "/../lib")

import shell_agent  # type: ignore[import-not-found]

sys.exit(shell_agent.main())
