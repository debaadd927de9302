"""Pictures with known content, drawn from a seed, and questions about them with their answers.

They train and show the small vision-language model of this project: whatever is in a picture is known, so every answer
can be checked.
"""

from .draw import SIZE, render
from .questions import KINDS, Question, ask
from .scene import HELD_OUT, Bars, Scene, Sign, Thing, make_scene

__all__ = ["HELD_OUT", "KINDS", "SIZE", "Bars", "Question", "Scene", "Sign", "Thing", "ask", "make_scene", "render"]
