"""A trained method as another package brings it: a head over the last state that foresees the next token but one."""

from paceline.methods import Method

METHOD = Method(
    name="next_but_one",
    usage="head:PATH_OR_NAME",
    title="next but one",
    how="one layer over the last hidden state",
    home=f"{__name__}.drafter",
    spec="NextButOneSpec",
    drafter="NextButOne",
    head=f"{__name__}.drafter:OneHead",
    recipe=f"{__name__}.recipe:OneRecipe",
)
