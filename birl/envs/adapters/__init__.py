"""Adapters to environments of other packages, one file each: `env=gymnasium`, `env=textarena`... A package is imported
only if one of its environments is used, and has a separate extra: `pip install 'birl[gymnasium]'`."""
