"""The exceptions that are meant for people."""


class UserError(Exception):
    """Something the user can mend: one line that says what, where and what to do; the command exits with code 2."""


class Stopped(Exception):
    """A job that a signal ended after it had saved; the command exits with 75, or 0 if a cluster starts it again."""

    def __init__(self, requeued: bool = False) -> None:
        super().__init__("stopped")
        self.requeued = requeued
