"""The images of one prompt: where their features go, and how they change positions and attention.

    columns     0 .. 3 | 4 ....... 67 | 68 .. 71 | 72 ...... 135 | 136 .. 143
    holds       text   | image 0      | text     | image 1       | text           edge = 136

The runner and drafters that use images read it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class PromptImage:
    """One image of a prompt.

    key: a hash of `inputs`, thus of the pixels that the tower gets.
    places: the prompt positions of its placeholders, ascending; its features go there in this order.
    inputs: the processor's tensors for this image alone, by the tower's keywords.
    source: the opened image, at most 2048 pixels a side, for drafters that call `Target.keep_images`; else None.
    """

    key: str
    places: tuple[int, ...]
    inputs: Mapping[str, Tensor]
    source: object = None

    @property
    def start(self) -> int:
        """Position of its first placeholder."""
        return self.places[0]

    @property
    def stop(self) -> int:
        """One past its last placeholder. A tiled image may have text between its placeholders."""
        return self.places[-1] + 1

    @property
    def num_tokens(self) -> int:
        """The number of placeholders, which is that of features."""
        return len(self.places)


@dataclass(frozen=True, eq=False)
class VisionPrompt:
    """The images of one prompt.

    position_ids: the position of every prompt token on each axis, for models with M-RoPE; else None.
    position_delta: a text token after `edge` has position column + delta, on every axis.
    closing: where the text after the last image ends whose positions belong to the image, such as its closing mark.
    blocks: column ranges [start, stop) whose tokens attend to one another in both directions. No pass cuts a block.
    blocks_cross_window: whether they do so beyond a sliding window.
    windowed_blocks: whether they do so only in layers with a sliding window.
    """

    images: tuple[PromptImage, ...]
    position_ids: Int[Tensor, "A P"] | None = None
    position_delta: int = 0
    blocks: tuple[tuple[int, int], ...] = ()
    blocks_cross_window: bool = False
    windowed_blocks: bool = False
    closing: int = 0

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the images, in order."""
        return tuple(image.key for image in self.images)

    @property
    def num_tokens(self) -> int:
        """The number of image tokens in the prompt."""
        return sum(image.num_tokens for image in self.images)

    @property
    def edge(self) -> int:
        """Where plain causal text begins: after the last image, its closing text and the last block."""
        return max([self.closing, *[image.stop for image in self.images], *[stop for _, stop in self.blocks]])

    def without_sources(self) -> "VisionPrompt":
        """The same prompt without its opened images."""
        return replace(self, images=tuple(replace(image, source=None) for image in self.images))

    def without_pixels(self) -> "VisionPrompt":
        """The same prompt without its pixels, once its images are encoded."""
        return replace(self, images=tuple(replace(image, inputs={}, source=None) for image in self.images))
