"""RecTools' FlatSASRecNet (rectools.fast_transformers): a pre-norm SASRec with a plain table of pins.

RecTools ships the network and `build_sequences` without a trainer: the loop here is AdamW with a softmax over
`n_negatives` random pins, its forward pass with `negatives`. Otherwise as in rectools_sasrec.py.
"""

import numpy as np
import torch
from exchange import Lists, Task, main
from rectools.fast_transformers import FlatSASRecNet, build_sequences
from sequences import newest, segment_ids
from torch.nn.functional import cross_entropy

SEED = 0
RESERVE = 0.25
"""Share of the time that is kept for ranking."""
USERS_A_BATCH = 256


def train_epoch(
    net: FlatSASRecNet, optimizer: torch.optim.Optimizer, data: tuple[torch.Tensor, torch.Tensor], task: Task
) -> bool:
    """Return whether the time was enough for the whole epoch."""
    x_SL, y_SL = data
    for rows in torch.randperm(len(x_SL)).split(task.settings["batch_size"]):
        if task.seconds_left() < RESERVE * task.budget_s:
            return False
        x_BL, y_BL = x_SL[rows], y_SL[rows]
        negatives_BLN = torch.randint(1, net.n_items + 1, (*y_BL.shape, task.settings["n_negatives"]))
        logits_BLN = net({"x": x_BL, "y": y_BL, "negatives": negatives_BLN})
        logits_BLN[..., 1:].masked_fill_(negatives_BLN == y_BL[..., None], -1e9)
        logits = logits_BLN[y_BL > 0]
        loss = cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    return True


def rank(task: Task) -> tuple[Lists, str]:
    log, settings = task.log, task.settings
    torch.manual_seed(SEED)
    train, past = log.train.chosen(settings["actions"]), log.past.chosen(settings["actions"])
    length = settings["session_max_len"]
    x_SL, y_SL, pins, _ = build_sequences(
        torch.from_numpy(segment_ids(train, length + 1)),
        torch.from_numpy(train.pin.astype(np.int64)),
        torch.from_numpy(train.day.astype(np.int64)),
        max_len=length,
    )
    net = FlatSASRecNet(
        n_items=len(pins),
        n_factors=settings["n_factors"],
        n_blocks=settings["n_blocks"],
        n_heads=settings["n_heads"],
        session_max_len=length,
        dropout=settings["dropout"],
    )
    # The table starts as N(0, 1), which makes logits of +-sqrt(factors): a smaller start trains faster.
    torch.nn.init.normal_(net.item_emb.weight, std=settings["n_factors"] ** -0.5)
    with torch.no_grad():
        net.item_emb.weight[0] = 0  # padding
    optimizer = torch.optim.AdamW(net.parameters(), lr=settings["lr"])
    done = 0
    while done < settings["epochs"] and train_epoch(net, optimizer, (x_SL, y_SL), task):
        done += 1

    net.eval()
    torch.backends.mha.set_fastpath_enabled(False)  # gives NaN for padded positions, which attend to nothing
    lists, lengths = Lists(), log.list_lengths()
    known_pins = pins.numpy()
    code_of_pin = np.zeros(log.num_pins, np.int64)
    code_of_pin[known_pins] = np.arange(1, len(known_pins) + 1)
    input_UL = newest(past, log.num_test_users, length, code_of_pin)
    with torch.no_grad():
        table_ND = net.all_item_embeddings()
        for start in range(0, log.num_test_users, USERS_A_BATCH):
            batch_BL = input_UL[start : start + USERS_A_BATCH]
            scores_BN = (net.encode_last(torch.from_numpy(batch_BL)) @ table_ND.T).numpy()
            for row in np.flatnonzero(batch_BL[:, -1]):
                lists.add(start + row, known_pins, scores_BN[row], lengths[start + row])
    return lists, f"trained {done} of {settings['epochs']} epochs" if done < settings["epochs"] else ""


if __name__ == "__main__":
    main(rank, ("rectools", "torch"))
