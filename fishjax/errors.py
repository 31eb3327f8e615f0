"""Every error fishjax raises on purpose. Imports nothing, so any layer may raise any of them.

A message names the value, the limit and the way out. `serving/call.py` maps each class to a gRPC
status; the command line prints the message as one sentence and exits with 2.
"""


class FishjaxError(Exception):
    """Base of all errors that fishjax raises on purpose."""


class InvalidRequest(FishjaxError):
    """The caller asked for something that cannot be done: a value out of range, unreadable audio, no text."""


class PromptTooLong(InvalidRequest):
    """The prompt (references, history and text) does not fit a slot's cache."""


class VoiceNotFound(FishjaxError):
    """No stored voice has this id."""


class VoiceExists(FishjaxError):
    """Another voice is stored under this id."""


class VoicesFull(FishjaxError):
    """The server stores as many voices as it may."""


class QueueFull(FishjaxError):
    """The server has all the work it can hold; `retry_after_s` says when to try again (seconds)."""

    def __init__(self, message: str, retry_after_s: float):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class LimitReached(QueueFull):
    """The caller's key has used up what it may ask for; `retry_after_s` says when to try again (seconds)."""


class Unauthenticated(FishjaxError):
    """The caller's API key is missing or unknown."""


class NotAllowed(FishjaxError):
    """The caller's key does not allow this."""


class Draining(FishjaxError):
    """The server is shutting down and takes no new work."""


class NotReady(FishjaxError):
    """The server cannot take work: it is still warming up, or its engine has failed."""


class SlowReader(FishjaxError):
    """The caller fell too far behind the sound that waits for it and was cut off."""


class DeadlineExceeded(FishjaxError):
    """The caller's deadline passed before the work was done."""


class WeightsError(FishjaxError):
    """A model folder is wrong: a missing, extra or misshapen tensor, an unreadable file, a bad config."""


class EngineFailed(FishjaxError):
    """A step of the engine failed; the requests in it are lost."""
