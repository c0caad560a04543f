"""The ``liverun`` command and the agent of a node. Nothing that runs in a worker imports this package."""
