"""Environments of other packages, one file each: `env=gymnasium`, `env=textarena`... A package is imported when one of
its environments is asked for, and has an extra of its own: `pip install 'birl[gymnasium]'`."""
