"""What the package's command lines share, whatever they do.

``cli`` derives flags and YAML keys from a dataclass, ``script`` turns errors into exit codes and sets up the log,
``files`` writes files whole or not at all, ``progress`` shows how far a loop is.
"""
