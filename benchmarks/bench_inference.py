"""A day's user embeddings at the paper's shape on CPU: how much of the machine's matrix multiplication reaches users.

The whole of `embed_days` runs on one bucket, from Lance to Lance: 6 layers, H = 768, M = 256, D = 256, content vectors
of 256 numbers, random weights. Lengths are heavy-tailed: lognormal with median 55 and sigma 1.2, clipped to 1 … 256.

Counted are the FLOPs that are needed for a user of n actions, and only for real ones, whatever was padded or filled up;
a multiply-add is two, I is the width of an action's input:
- projection 2 n I H; each block but the last 24 n H² + 2 n (n + 1) H, attention counted causally;
- the last block for its keys and values 4 n H², for the newest action 20 H² + 4 n H; head 8 H² + 8 H D.
They are compared with a large `torch.matmul` on all threads, timed before and after. The naive way pads everybody to M
and takes every position through all of the model and the head; it runs on some of the same users, with all threads.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from bench_training import matmul_flops_per_s
from measuring import report, say, working_directory, world_site

from pf_core.config.site import Site
from pf_core.config.training import ModelConfig, choose
from pf_core.days import ds_start_us, shift_ds
from pf_core.embeddings.inference import ServedModel, cut_sequences, encode_timelines
from pf_core.embeddings.tables import embedding_state
from pf_core.embeddings.users import embed_days
from pf_core.embeddings.vectors import matrix_of
from pf_core.engine.local import LocalEngine
from pf_core.logs.ingest import ingest_days
from pf_core.model.checkpoint import load_model, save_model
from pf_core.model.sequences import collate_sequences
from pf_core.model.towers import PinnerFormer
from pf_core.pins.features import build_pin_features, pin_state
from pf_core.pins.packed import open_pins, pack_pins
from pf_core.timelines.build import build_timelines, read_bucket, timeline_state

DS = "2026-03-01"
FEATURE_DIM = 256
EVENTS = {"save": "repin", "closeup": "closeup", "click": "click", "hide": "hide"}
SURFACES = {"home": "homefeed", "search": "search", "related": "related_pins"}
NOBODY = pa.array([], pa.int64())
NAIVE_ROWS = 32


def make_site(folder: Path, *, num_users: int, num_pins: int, max_length: int, engine: LocalEngine) -> Site:
    """A day on which every user was active, with as many actions as the user's length."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(4, 1.2, num_users).round(), 1, max_length).astype(np.int64)
    users, num = np.repeat(np.arange(num_users), lengths), int(lengths.sum())
    pins = pa.array([f"pin{number:06d}" for number in range(num_pins)])
    log = pa.table(
        {
            "event_time_ms": ds_start_us(DS) // 1000 + rng.integers(0, 86_400_000, num),
            "user": users,
            "pin": pins.take(pa.array(rng.integers(0, num_pins, num))),
            "event": pa.array(list(EVENTS)).take(pa.array(rng.integers(0, len(EVENTS), num))),
            "surface": pa.array(list(SURFACES)).take(pa.array(rng.integers(0, len(SURFACES), num))),
            "dwell_ms": rng.integers(0, 60_000, num),
        }
    )
    vectors = pa.array(rng.normal(size=num_pins * FEATURE_DIM).astype(np.float32))
    catalogue = pa.table({"pin": pins, "vector": pa.FixedSizeListArray.from_arrays(vectors, FEATURE_DIM)})
    for path, table in ((f"actions/{DS}/0.parquet", log), (f"pins/{DS}.parquet", catalogue)):
        (folder / path).parent.mkdir(parents=True)
        pq.write_table(table, folder / path)
    end_ds = shift_ds(DS, 1)
    site = world_site(logs=folder, data_dir=folder / "data", start_ds=DS, end_ds=end_ds, num_buckets=1)
    list(ingest_days(site, [DS], engine=engine, forgotten=NOBODY, progress=_quiet))
    list(build_pin_features(site, [DS], engine=engine, progress=_quiet))
    list(build_timelines(site, [DS], engine=engine, forgotten=NOBODY, rebuild=False, progress=_quiet))
    pack_pins(site, pin_state(site).require(DS), _quiet)
    return site


def _quiet(_: str) -> None:
    pass


def make_model(folder: Path, config: ModelConfig) -> ServedModel:
    torch.manual_seed(0)
    words = {"action_types": sorted(EVENTS.values()), "surfaces": sorted(SURFACES.values())}
    model = PinnerFormer(config, feature_dim=FEATURE_DIM, num_action_types=4, num_surfaces=3)
    rest = {"feature_dim": FEATURE_DIM, "time_origin_us": 0, "feature_scale": 1.0}
    save_model(folder, model, words | rest)
    return ServedModel(model_version="random", path=folder)


def needed_flops(config: ModelConfig, input_dim: int, lengths: np.ndarray) -> float:
    hidden, n = config.hidden_dim, lengths.astype(np.float64)
    project = 2 * n * input_dim * hidden
    block = 24 * n * hidden**2 + 2 * n * (n + 1) * hidden
    last = 4 * n * hidden**2 + 20 * hidden**2 + 4 * n * hidden
    head = 8 * hidden**2 + 8 * hidden * config.embedding_dim
    return float((project + (config.num_layers - 1) * block + last + head).sum())


def time_day(site: Site, served: ServedModel, engine: LocalEngine) -> float:
    started = time.perf_counter()
    [_] = embed_days(
        site, [DS], model_for=lambda ds: served, everyone=True, engine=engine, forgotten=NOBODY, progress=say
    )
    return time.perf_counter() - started


def naive(site: Site, served: ServedModel, num_users: int) -> Callable[[], np.ndarray]:
    """Embeds some users, by user_id, as one would at first: everything padded, everything computed."""
    model, description = load_model(served.path)
    pins = open_pins(pack_pins(site, pin_state(site).require(DS), _quiet))
    timelines = read_bucket(timeline_state(site), DS, 0).sort_by("user_id").slice(0, num_users)
    num_steps = model.config.sequence_length
    actions = cut_sequences(encode_timelines(timelines, pins, description), num_steps).actions

    @torch.inference_mode()
    def embed() -> np.ndarray:
        parts = []
        for first in range(0, num_users, NAIVE_ROWS):
            rows = np.arange(first, min(first + NAIVE_ROWS, num_users))
            sequences = collate_sequences(actions, pins.feature, actions.offsets[rows], actions.offsets[rows + 1] - 1)
            missing = num_steps - sequences.ts_RS.shape[1]
            padded = [torch.nn.functional.pad(tensor, (0, missing)) for tensor in sequences[1:-1]]
            feature = torch.nn.functional.pad(sequences.feature_RSF, (0, 0, 0, missing))
            sequences = type(sequences)(feature, *padded, sequences.length_R)
            row_Q, position_Q = torch.meshgrid(torch.arange(len(rows)), torch.arange(num_steps), indexing="ij")
            everywhere = model.embed_positions(sequences, row_Q.ravel(), position_Q.ravel())
            everywhere = everywhere.view(len(rows), num_steps, -1)
            parts.append(everywhere[torch.arange(len(rows)), sequences.length_R - 1])
        return torch.cat(parts).numpy()

    return embed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    size = {"num_layers": 2, "hidden_dim": 64, "sequence_length": 64} if quick else {}
    config = choose("paper", {"model": size}).model
    num_users, num_naive = (300, 64) if quick else (1500, 64)
    matmul = 512 if quick else 4096
    with working_directory(None) as folder, LocalEngine(num_workers=1, memory_mb=512, temp_dir=folder) as engine:
        site = make_site(folder, num_users=num_users, num_pins=20_000, max_length=config.sequence_length, engine=engine)
        served = make_model(folder / "model", config)
        before = matmul_flops_per_s(matmul)
        day_s = time_day(site, served, engine)
        after = matmul_flops_per_s(matmul)
        rows = embedding_state(site).open_bucket(DS, 0).to_table()
        counts = embedding_state(site).require(DS)["counts"]
        again_s = time_day(site, served, engine)
        embed_naively = naive(site, served, num_naive)
        started = time.perf_counter()
        expected = embed_naively()
        naive_users_per_s = num_naive / (time.perf_counter() - started)
    np.testing.assert_allclose(matrix_of(rows["embedding"])[:num_naive], expected, atol=1e-3)
    input_dim = PinnerFormer(config, feature_dim=FEATURE_DIM, num_action_types=4, num_surfaces=3).actions.output_dim
    flops = needed_flops(config, input_dim, rows["num_actions"].to_numpy())
    peak = statistics.mean([before, after])
    say(
        f"{counts['users']:,} users, {counts['actions']:,} actions, {counts['padded_actions']:,} padded; "
        f"{flops / 1e12:.2f} TFLOP in {day_s:.1f} s; matmul {before / 1e9:.0f} and {after / 1e9:.0f} GFLOP/s"
    )
    report("inference.needed_flops_over_matmul", flops / day_s / peak, "x", bar=">= 0.6")
    report("inference.users_per_s_over_naive", num_users / day_s / naive_users_per_s, "x", bar=">= 2")
    report("inference.users_per_s", num_users / day_s, "users/s")
    report("inference.day_without_changes", again_s / day_s, "x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
