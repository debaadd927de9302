"""The errors that users meet: each says what was given, what was expected, and how to fix it."""


class PacelineError(Exception):
    """Base class of all errors that Paceline raises on purpose."""

    def __init__(self, what: str, *, got: object = None, expected: object = None, fix: str | None = None):
        self.what, self.got, self.expected, self.fix = what, got, expected, fix
        parts = {"": what, "Got: ": got, "Expected: ": expected, "Fix: ": fix}
        super().__init__(" ".join(label + _sentence(part) for label, part in parts.items() if part is not None))


def _sentence(part: object) -> str:
    """Ends with one full stop, or with its own question mark."""
    text = str(part).rstrip(". ")
    return text if text.endswith("?") else text + "."


class ConfigError(PacelineError, ValueError):
    """An option, a key or an input that cannot be used."""


class IncompatibleModels(PacelineError):
    """A model that cannot be decoded speculatively, or a draft that does not fit its target."""


class CacheFull(PacelineError):
    """A prompt or a batch that does not fit the key-value cache."""


class QueueFull(PacelineError):
    """A request while the queue is full. It can be sent again in about `retry_after_s` seconds."""

    retry_after_s = 1

    def after(self, seconds: int) -> "QueueFull":
        """The same error with this time."""
        self.retry_after_s = seconds
        return self


class EngineStopped(PacelineError):
    """A request to an engine that was shut down, is shutting down, or failed."""


class NumericsError(PacelineError):
    """NaN or infinite logits, or "invariant" numerics where the device cannot give bit-identical rows."""


class DraftError(PacelineError):
    """A drafter that returned an invalid draft: a bad tree, an unknown token, missing draft probabilities."""


class LossyNotAllowed(PacelineError):
    """A verifier that changes the answers, without `allow_lossy`."""


class NotExportable(PacelineError):
    """A head that the requested format cannot represent."""


class DownloadError(PacelineError):
    """A model that could not be downloaded completely."""
