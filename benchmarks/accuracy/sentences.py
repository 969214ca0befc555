"""The job on real sentences: all-MiniLM-L6-v2, calibrated on 64 of them, judged on the others."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.export import Dim

from accuracy.jobs import Call, Job, Metrics
from sashiko.cli.bench.encoder import agreement, batches, embed, load_encoder, sentences

CALIBRATION = 64
TIMED = (8, 128)


def jobs() -> Iterator[Job]:
    encoder, tokenizer = load_encoder()
    texts = sentences()
    calibration, held_out = (list(batches(tokenizer, part)) for part in (texts[:CALIBRATION], texts[CALIBRATION:]))
    reference = embed(encoder, held_out)
    batch, length = Dim("batch", min=1, max=64), Dim("length", min=1, max=256)

    def judge(call: Call) -> Metrics:
        found = agreement(reference, embed(call, held_out))
        return {"mean cosine": found.mean_cosine, "min cosine": found.min_cosine, "same neighbour": found.same_neighbour}

    ids = torch.randint(1000, 20000, TIMED, generator=torch.Generator().manual_seed(0))
    yield Job(
        "MiniLM sentences", encoder, calibration, calibration[0], judge,
        dynamic_shapes={"input_ids": {0: batch, 1: length}, "attention_mask": {0: batch, 1: length}},
        timed={"input_ids": ids, "attention_mask": torch.ones_like(ids)},
    )
