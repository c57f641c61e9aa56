"""The version, apart from everything else: whoever needs it shall not load the package's public names."""

__version__ = "0.1.0"
