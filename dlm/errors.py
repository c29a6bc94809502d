"""The one exception that is meant for users. Knows nothing of what went wrong beyond its message."""


class UserError(ValueError):
    """Bad input: the message names the value, where it came from, and the fix.

    Command-line tools print the message alone and exit with status 2.
    """
