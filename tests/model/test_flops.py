"""The formula counts what the model does."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pf_core.config.training import FeatureConfig, ModelConfig
from pf_core.model.flops import flops_per_user
from pf_core.model.sequences import Sequences
from pf_core.model.towers import PinnerFormer

FEATURE_DIM = 5


@pytest.mark.parametrize("num_layers", [0, 1, 3])
@pytest.mark.parametrize("features", [FeatureConfig(), FeatureConfig(gap=False, surface=False)])
def test_the_formula_counts_the_matrix_products(num_layers: int, features: FeatureConfig) -> None:
    config = ModelConfig(
        features=features, sequence_length=12, num_layers=num_layers, hidden_dim=16, num_heads=2, embedding_dim=6
    )
    model = PinnerFormer(config, feature_dim=FEATURE_DIM, num_action_types=2, num_surfaces=2).eval()
    codes, lengths = torch.zeros(1, 12, dtype=torch.long), torch.tensor([12])
    actions = Sequences(torch.zeros(1, 12, FEATURE_DIM), codes, codes, torch.zeros(1, 12), codes, lengths)
    # As plain products: the counter does not see into the fused kernel.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.embed_users(actions)
    assert flops_per_user(config, feature_dim=FEATURE_DIM) == counter.get_total_flops()
