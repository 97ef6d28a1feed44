"""The one exception that is meant for people."""


class UserError(Exception):
    """Something the user can mend: one line that says what, where and what to do; the command exits with code 2."""
