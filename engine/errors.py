"""The engine's error types. Knows no torch.

EngineError
├── ModelError                 the model directory cannot be served
│   ├── NotAModelDirectory     no directory, or no config.json / weights / tokenizer in it
│   ├── UnsupportedModel       a known file requires something that this version does not compute
│   └── WeightsError           tensors are missing, unexpected, misshapen or unreadable
├── EngineConfigError          an engine option has a value that cannot be honoured; names the option
├── PromptError                a prompt cannot be run: empty, too long, or with ids outside the vocabulary
├── TraceError                 a trace of requests cannot be replayed; names file, line and field
├── EngineOverloaded           no request can be accepted now, whatever it contains; a later one may
└── EngineBroken               the device is lost, or steps fail for all and for a probe: the process must be replaced
"""

from __future__ import annotations

from pathlib import Path


class EngineError(Exception):
    """Base of every error that the engine raises on purpose."""


class ModelError(EngineError):
    """The model directory cannot be served; the message says what to change."""


class NotAModelDirectory(ModelError):
    """The path is not a directory with config.json, safetensors weights and tokenizer.json."""


class UnsupportedModel(ModelError):
    """The architecture or one of its options is not computed by this version; the message lists what is."""


class WeightsError(ModelError):
    """A tensor is missing, unexpected, misshapen or cannot be read; the message names it."""


class EngineConfigError(EngineError, ValueError):
    """An engine option cannot be honoured. `option` names it."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(f"{option} {message}")
        self.option = option


class PromptError(EngineError, ValueError):
    """A prompt cannot be run; the message names the limit."""


class TraceError(EngineError, ValueError):
    """A trace cannot be replayed. `path`, `line` and `field` say where; the latter two are None for the file as a whole."""

    def __init__(self, path: Path, line: int | None, field: str | None, message: str) -> None:
        where = f"{path}" if line is None else f"{path}, line {line}"
        super().__init__(f"{where}: {message}" if field is None else f"{where}: {field} {message}")
        self.path, self.line, self.field = path, line, field


class EngineOverloaded(EngineError):
    """No request can be accepted now; nothing is wrong with this one, and it may be retried."""


class EngineBroken(EngineError):
    """The device is lost, or several steps in a row failed for every request and for a probe; only a new process can help."""
