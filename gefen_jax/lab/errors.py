"""What a user of the command can put right: shown in one line, with exit code 2."""


class UsageError(ValueError):
    """A wrong option or wrong data. The message is one line: what was found, what to give instead."""
