"""What can be pulled: a model that builds its Hugging Face folder."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

from ..system.files import Progress


class ZooEntry(ABC):
    """A model that can be pulled: it builds its Hugging Face folder from a download, or from a base and its own files.

    sha256: of what it is built from; a folder that was built from something else is pulled again. base: the model of
    the zoo that is pulled first, if any. hub_id: where other programs find the model, None: nowhere.
    """

    name: str
    description: str
    licence: str
    sha256: str
    base: str | None
    parameters: int
    download_bytes: int
    takes_images: ClassVar[bool] = False
    hub_id: str | None = None

    @property
    @abstractmethod
    def source(self) -> str:
        """The place the weights come from, in words."""

    @property
    @abstractmethod
    def needed_bytes(self) -> int:
        """The free disk space that a pull needs, without the base."""

    @abstractmethod
    def build(self, base: Path | None, folder: Path, progress: Progress) -> None:
        """Write config, weights and tokenizer into the empty `folder`; `base` is the folder of the pulled base.

        Raises `DownloadError`, `ConfigError`, or `OSError` when the disk refuses.
        """
