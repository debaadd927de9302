"""One recipe for each method: a file with the module's shape, the settings of its loss, and the recipe itself.

A new method is one more file with a subclass of `Recipe`, and one more line in `RECIPES`.
"""

from importlib import import_module

from ...errors import ConfigError
from ..recipe import Recipe

RECIPES = {
    "eagle": "eagle.EagleRecipe",
    "eagle3": "eagle.EagleRecipe",
    "peagle": "eagle.EagleRecipe",
    "dflash": "dflash.DFlashRecipe",
    "medusa": "parallel.ParallelRecipe",
    "blockwise": "parallel.ParallelRecipe",
    "mtp": "eagle.EagleRecipe",
    "space": "space.SpaceRecipe",
    "qat": "qat.QatRecipe",
    "distill": "distill.DistillRecipe",
}


def recipe_of(method: str) -> type[Recipe]:
    """The recipe of a method. Raises `ConfigError` for an unknown one."""
    if method not in RECIPES:
        raise ConfigError("unknown method of training", got=repr(method), expected="one of " + ", ".join(RECIPES))
    module, _, name = RECIPES[method].partition(".")
    return getattr(import_module(f".{module}", __name__), name)
