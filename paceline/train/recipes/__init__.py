"""One recipe for each method, made from a run's configuration.

method       module          recipe          head: keys of            train.loss: keys of
eagle        EagleHead v1    EagleRecipe     EagleShape               EagleLoss
eagle3       EagleHead v3    EagleRecipe     EagleShape               EagleLoss
medusa       MedusaHead      HeadsRecipe     MedusaShape              ParallelLoss
blockwise    BlockwiseHead   HeadsRecipe     BlockwiseShape           ParallelLoss
mtp          MtpHead         MtpRecipe       MtpShape                 MtpLoss
space        SpaceAdapter    SpaceRecipe     SpaceShape               SpaceLoss
qat          Int4Draft       QatRecipe       QatShape                 QatLoss
distill      a causal LM     DistillRecipe   DistillShape             DistillLoss
"""

from .factory import layers_of, recipe_for
from .outline import check_head

__all__ = ["check_head", "layers_of", "recipe_for"]
