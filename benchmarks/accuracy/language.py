"""A byte-level language model trained on Python's own standard library: small enough to train in a minute or two, and real text."""

from __future__ import annotations

import hashlib
import math
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from accuracy.jobs import Call, Job, Metrics
from accuracy.models import LanguageModel, RecurrentLanguageModel, deterministic, set_rate

CACHE = Path(__file__).resolve().parents[1] / ".cache"
TRAINING = (
    *("abc", "aifc", "argparse", "ast", "base64", "bdb", "bisect", "calendar", "cmd", "codecs", "configparser", "contextlib", "copy"),
    *("csv", "dataclasses", "difflib", "dis", "doctest", "enum", "filecmp", "fractions", "ftplib", "functools", "getopt", "gettext"),
    *("gzip", "heapq", "imaplib", "inspect", "ipaddress", "locale", "lzma", "mailbox", "numbers", "operator", "optparse", "os", "pdb"),
    *("pickle", "pickletools", "pprint", "profile", "pstats", "pydoc", "queue", "random", "shelve", "shlex", "smtplib", "socket"),
    *("ssl", "string", "subprocess", "tarfile", "tempfile", "threading", "timeit", "tokenize", "trace", "turtle", "typing", "uuid"),
)
CALIBRATION, BATCH = 32, 16  # windows
HELD_OUT = ("bz2", "cgitb", "fnmatch", "hmac", "netrc", "selectors", "shutil", "statistics", "textwrap", "traceback", "weakref", "zipfile")


@dataclass(frozen=True)
class Settings:
    """How a language model is trained. steps: of `batch` windows of `context` bytes. cell: of a recurrent network; none: a transformer."""

    width: int = 128
    layers: int = 2
    context: int = 128
    steps: int = 1400
    batch: int = 12
    peak: float = 3e-3
    seed: int = 0
    cell: str = ""

    def untrained(self) -> nn.Module:
        if self.cell:
            return RecurrentLanguageModel(self.cell, self.width)
        return LanguageModel(self.width, self.layers, self.width // 32, self.context)


RECURRENT = tuple(Settings(256, 1, steps=600, batch=16, peak=5e-3, cell=cell) for cell in ("LSTM", "GRU"))


def source_bytes(names: tuple[str, ...], limit: int | None = None) -> torch.Tensor:
    """The sources of modules of the standard library, int64, `limit` bytes at most; modules that this Python lacks are left out."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for name in names if (path := folder / f"{name}.py").exists())
    return torch.frombuffer(bytearray(text[:limit]), dtype=torch.uint8).long()


def train_language_model(settings: Settings = Settings(), text: torch.Tensor | None = None) -> nn.Module:
    """A trained model in evaluation mode, on `text` or on the sources of `TRAINING`."""
    text = source_bytes(TRAINING) if text is None else text
    with deterministic(settings.seed):
        model = settings.untrained()
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05, betas=(0.9, 0.99))
        reach = torch.arange(settings.context + 1)
        for step in range(settings.steps):
            set_rate(optimizer, settings.peak, step / settings.steps)
            window = text[torch.randint(len(text) - settings.context, (settings.batch, 1)) + reach]
            loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return model.eval()


def language_model(settings: Settings = Settings()) -> nn.Module:
    """As `train_language_model` on the standard library, from the cache when it was trained on these very bytes before."""
    from safetensors.torch import load_file, save_file

    text = source_bytes(TRAINING)
    key = hashlib.sha256(text.to(torch.uint8).numpy().tobytes() + repr(sorted(asdict(settings).items())).encode()).hexdigest()[:16]
    path = CACHE / f"language-{key}.safetensors"
    if path.exists():
        model = settings.untrained()
        model.load_state_dict(load_file(path))
        return model.eval()
    model = train_language_model(settings, text)
    CACHE.mkdir(exist_ok=True)
    unfinished = path.with_suffix(".part")
    save_file(model.state_dict(), unfinished)
    unfinished.replace(path)
    return model


def windows(text: torch.Tensor, context: int) -> torch.Tensor:
    """[N, context + 1]: windows that overlap by one byte, so that each byte but the first is predicted once; the rest is dropped."""
    return text.unfold(0, context + 1, context)


def calibration(context: int) -> list[torch.Tensor]:
    """Batches [BATCH, context] from all over the training text."""
    found = windows(source_bytes(TRAINING), context)
    chosen = found[:: len(found) // CALIBRATION][:CALIBRATION, :-1]
    return [chosen[i : i + BATCH] for i in range(0, CALIBRATION, BATCH)]


def perplexity(model: Callable[[torch.Tensor], torch.Tensor], held_out: torch.Tensor) -> float:
    """Per byte: e to the mean negative log likelihood over windows [N, context + 1]; N is cut to whole batches."""
    total, count = 0.0, 0
    with torch.no_grad():
        for i in range(len(held_out) // BATCH):
            part = held_out[BATCH * i : BATCH * (i + 1)]
            logits = model(part[:, :-1])
            total += float(F.cross_entropy(logits.flatten(0, 1).double(), part[:, 1:].flatten(), reduction="sum"))
            count += part[:, 1:].numel()
    return math.exp(total / count)


def jobs() -> Iterator[Job]:
    """Trains on the first run, which takes a minute or two for the transformer, and one for each recurrent network."""
    for each in (Settings(), *RECURRENT):
        yield _job(each)


def _job(settings: Settings) -> Job:
    model = language_model(settings)
    held_out = windows(source_bytes(HELD_OUT, 200_000), settings.context)

    def judge(call: Call) -> Metrics:
        return {"perplexity": perplexity(call, held_out)}

    example = (held_out[:BATCH, :-1].contiguous(),)
    # The search bounds the relative increase.
    name = f"language model, {settings.cell or 'transformer'}"
    return Job(name, model, calibration(settings.context), example, judge, score=lambda m: -math.log(m["perplexity"]))
