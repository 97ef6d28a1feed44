"""The exceptions that are meant for people."""


class UserError(Exception):
    """Something the user can mend: one line that says what, where and what to do; the command exits with code 2."""


class Diverged(UserError):
    """A run that found no finite gradient any more, as it would again."""


class Stopped(Exception):
    """A job that a signal ended after it had saved; the command exits with 75, or 0 if a cluster starts it again."""

    def __init__(self, requeued: bool = False) -> None:
        super().__init__("stopped")
        self.requeued = requeued


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, in Python or in torch, whose errors have no type of their own on a CPU."""
    words = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in words or "can't allocate" in words
