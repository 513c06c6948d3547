"""Errors that a user can cause and fix, under one root.

The message says in one line what is wrong and what to do. The command line prints the message and exits with `exit_code`. Any other
exception is a bug and keeps its traceback.
"""


def one_line(message: object, limit: int = 200) -> str:
    """Return a foreign message for use in ours: one line of at most `limit` characters, without control characters.

    An exception without a message is represented by its class name.
    """
    text = " ".join("".join(c if c.isprintable() else " " for c in str(message)).split()) or type(message).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


class MLXInferError(Exception):
    """Root of all errors that the caller can fix."""

    exit_code = 2


class ModelNotFoundError(MLXInferError):
    """The path, alias, package or hub repository does not exist."""


class HubError(MLXInferError):
    """The model hub cannot be reached, or refuses (offline, gated, unknown revision)."""


class UnsupportedModelError(MLXInferError):
    """The architecture, config key, rope type, activation or checkpoint kind is not supported."""


class UnsupportedShapeError(MLXInferError):
    """A kernel for these bits, head sizes or numbers of heads does not exist. The message lists the supported ones."""


class CheckpointError(MLXInferError):
    """A model file is truncated, corrupt or inconsistent."""


class WeightsError(CheckpointError):
    """Tensors are missing, unexpected, of the wrong shape or dtype, or contain NaN."""


class ExpertFileError(MLXInferError):
    """The file of a model's experts cannot be written: no space, no permission, or a disk that fails."""


class AdapterError(CheckpointError):
    """An adapter does not fit the model, has tensors that cannot be applied, or does not exist."""


class TokenizerError(MLXInferError):
    """Tokenizer files are missing, corrupt or of an unknown kind."""


class TemplateError(MLXInferError):
    """The chat template is missing, raises, runs too long or accesses forbidden attributes."""


class PromptError(MLXInferError):
    """The prompt is empty, longer than the context, or has a token id out of range."""


class ImageError(PromptError):
    """An image is not a picture of a supported format, is too large or damaged, or is not accepted by the model."""


class ContextLengthError(PromptError):
    """The prompt's `tokens`, `image_tokens` of them for images, and at least one token of an answer exceed the `context`."""

    def __init__(self, message: str, tokens: int, context: int, image_tokens: int = 0) -> None:
        super().__init__(message)
        self.image_tokens = image_tokens
        self.tokens = tokens
        self.context = context


class ToolError(MLXInferError):
    """A Python function that a model called failed, or does not accept the arguments."""


class SamplingError(MLXInferError):
    """A sampling parameter or an option of a request is invalid."""


class SettingError(MLXInferError, ValueError):
    """A setting of the engine (`EngineArgs`) is invalid."""


class UnknownKeywordError(MLXInferError, TypeError):
    """A class or method does not have this keyword. The message suggests the nearest one."""


class TextError(MLXInferError):
    """A text for evaluation or calibration does not exist, is of an unknown kind, or is too short."""


class EvaluationError(MLXInferError):
    """The models cannot be compared: different vocabularies, or not enough memory for the reference's probabilities."""


class ConversionError(MLXInferError):
    """The conversion is not possible as requested."""


class DestinationError(ConversionError):
    """The destination exists, is not writable or has not enough space."""


class QueueFullError(MLXInferError):
    """The queue of requests is full."""


class DraftError(MLXInferError):
    """The draft model does not fit this model: another vocabulary, or a kind with its own state."""


class EngineError(MLXInferError):
    """The engine stopped; the request was not finished."""


class GroupLostError(EngineError):
    """A machine with a part of the model ended or stalled."""

    exit_code = 75  # EX_TEMPFAIL: start again


class GpuFaultError(EngineError):
    """The GPU aborted a step again and again, because of other programs or because it took too long."""


class ExpertReadError(EngineError):
    """An expert cannot be read: its file was truncated, or the disk failed."""


class DeadlineError(EngineError):
    """The request took longer than its `timeout_s`."""


class ServerError(MLXInferError):
    """The server cannot start as requested: a socket in use, a path too long, an address that needs a key."""


class NodesError(MLXInferError):
    """Machines cannot run a model together: one is unreachable, or they differ in version, model or plan."""


class MemoryPlanError(MLXInferError):
    """The model, or a request, does not fit in the memory of this device."""
