"""The one exception that means "the user can fix this": the command line prints it without a traceback and exits 2."""


class BirlError(Exception):
    """A problem with the input, the configuration or the machine, in words that name the place and the fix."""
