"""Families of recipes: one size of the base model, or its action types, take other values (sections 4.2.5, 4.2.7, A.4).

Recipes, claims, tables and figures all take their sizes from here, so that a site trains exactly the sizes that are
reported. The base itself stands for its own size, whatever that is.
"""

from pf_core.config.training import ModelConfig
from pf_core.experiments.recipe import BASE
from pf_core.names import name_of

LENGTHS = (4, 8, 16, 32, 64, 128)

DIMS = (8, 16, 32, 64, 128)

HEADS = (2, 4, 8)

LAYERS = (1, 2, 4)

HIDDEN_DIMS = (32, 64, 128)


def recipe_of_type(action_type: str) -> str:
    """Return the recipe that learns from one action type alone; it names a partition and a folder."""
    return f"only_{name_of(action_type)}"


def recipes_by_length(base: ModelConfig) -> dict[int, str]:
    """Return the recipes by their sequence length, shortest first, the base among them."""
    return _with_base({length: f"length_{length}" for length in LENGTHS}, base.sequence_length)


def recipes_by_dim(base: ModelConfig) -> dict[int, str]:
    """Return the recipes by their embedding dimension, smallest first, the base among them."""
    return _with_base({dim: f"dim_{dim}" for dim in DIMS}, base.embedding_dim)


def recipes_by_heads(base: ModelConfig) -> dict[int, str]:
    """Return the recipes by their number of attention heads, fewest first, the base among them."""
    return _with_base({heads: f"heads_{heads}" for heads in HEADS}, base.num_heads)


def recipe_of_capacity(base: ModelConfig, layers: int, hidden: int) -> str:
    """Return the recipe with this number of layers and hidden dimension, which may be the base."""
    is_base = (layers, hidden) == (base.num_layers, base.hidden_dim)
    return BASE if is_base else f"layers_{layers}_hidden_{hidden}"


def _with_base(recipes: dict[int, str], size: int) -> dict[int, str]:
    return dict(sorted((recipes | {size: BASE}).items()))
