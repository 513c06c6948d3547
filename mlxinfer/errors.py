"""Errors that a user can cause and mend, under one root.

The message says what is wrong and what to do, in one line. The command line prints it and exits with `exit_code`;
anything that is not a `MLXInferError` is a bug of ours and keeps its traceback.
"""


def one_line(message: object, limit: int = 200) -> str:
    """A foreign message as a part of ours: in one line, without what steers terminals, cut after `limit` characters; an exception without a
    message by its name."""
    text = " ".join("".join(c if c.isprintable() else " " for c in str(message)).split()) or type(message).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


class MLXInferError(Exception):
    """Root of every error that is the caller's to mend."""

    exit_code = 2


class ModelNotFoundError(MLXInferError):
    """No such path, alias, package or hub repository."""


class HubError(MLXInferError):
    """The model hub cannot be reached, or refuses (offline, gated, unknown revision)."""


class UnsupportedModelError(MLXInferError):
    """An architecture, config key, rope type, activation or checkpoint kind that is not understood."""


class UnsupportedShapeError(MLXInferError):
    """No kernel for these bits, head sizes or numbers of heads. The message lists what there is."""


class CheckpointError(MLXInferError):
    """A model file is truncated, corrupt or inconsistent."""


class WeightsError(CheckpointError):
    """Tensors are missing, unexpected, of the wrong shape or dtype, or hold NaN."""


class AdapterError(CheckpointError):
    """An adapter does not fit the model, holds what would not be applied, or is asked for by a name that there is not."""


class TokenizerError(MLXInferError):
    """Tokenizer files are missing, corrupt or of an unknown kind."""


class TemplateError(MLXInferError):
    """The chat template is missing, raises, runs too long or reaches where it must not."""


class PromptError(MLXInferError):
    """The prompt is empty, longer than the context, or holds a token id out of range."""


class ContextLengthError(PromptError):
    """The prompt has more `tokens` than the `context` has room for, at least one token of an answer included."""

    def __init__(self, message: str, tokens: int, context: int) -> None:
        super().__init__(message)
        self.tokens = tokens
        self.context = context


class ToolError(MLXInferError):
    """A Python function that a model called failed, or cannot be called like that."""


class SamplingError(MLXInferError):
    """A sampling parameter, or an option of a request, has no meaning."""


class SettingError(MLXInferError, ValueError):
    """A setting of the engine (`EngineArgs`) has no meaning."""


class UnknownKeywordError(MLXInferError, TypeError):
    """A keyword that a class or method does not have. The message names the nearest one."""


class TextError(MLXInferError):
    """A text to read cannot be found, is of an unknown kind, or is too short."""


class EvaluationError(MLXInferError):
    """What was asked for cannot be measured: models of different vocabularies, no room for a teacher's probabilities."""


class ConversionError(MLXInferError):
    """What was asked for cannot be converted."""


class DestinationError(ConversionError):
    """The destination exists, is not writable or has no room."""


class QueueFullError(MLXInferError):
    """Too many requests are waiting already."""


class DraftError(MLXInferError):
    """The draft model cannot draft for this model: another vocabulary, or a kind that keeps its own state."""


class EngineError(MLXInferError):
    """The engine stopped; the request was not finished."""


class GroupLostError(EngineError):
    """A machine that has a part of the model ended or stalled."""

    exit_code = 75  # EX_TEMPFAIL: to be started again


class DeadlineError(EngineError):
    """What was asked for took longer than its `timeout_s`."""


class ServerError(MLXInferError):
    """The server cannot be set up as asked: a socket in use, a path too long, an address that needs a key."""


class NodesError(MLXInferError):
    """Machines that are to run a model together cannot: they are not reached, or differ in version, model or plan."""


class MemoryPlanError(MLXInferError):
    """The model, or a request, does not fit in the memory of this device."""
