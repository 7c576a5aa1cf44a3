"""Cost of one user embedding: multiplications and additions of the matrix products, from the configuration alone.

With S actions in the sequence, I numbers in an action's input vector, hidden dimension H and D numbers in the
embedding:

    input projection   2 S I H
    a layer            24 S H² + 4 S² H: queries, keys and values 6 S H², scores and mixing 4 S² H, output 2 S H²,
                       feed-forward 16 S H²
    the last layer     4 S H² + 20 H² + 4 S H: keys and values for all actions, everything else for the newest only
    head               8 H² + 8 H D

Serving needs only the newest position, which makes the last layer cheap (`PinnerFormer.embed_users`). All S² scores are
counted, although causal attention may skip half of them. Norms, activations and time encodings are not counted.
"""

from pf_core.config.training import ModelConfig
from pf_core.model.towers import ActionEncoder


def flops_per_user(config: ModelConfig, *, feature_dim: int) -> int:
    """Return the cost of embedding a user with a full sequence."""
    encoder = ActionEncoder(config, feature_dim=feature_dim, num_action_types=1, num_surfaces=1, time_origin_us=0)
    steps, hidden = config.sequence_length, config.hidden_dim
    project = 2 * steps * encoder.output_dim * hidden
    layer = 24 * steps * hidden**2 + 4 * steps**2 * hidden
    last = 4 * steps * hidden**2 + 20 * hidden**2 + 4 * steps * hidden
    head = 8 * hidden**2 + 8 * hidden * config.embedding_dim
    return project + (max(0, config.num_layers - 1) * layer + min(1, config.num_layers) * last) + head
