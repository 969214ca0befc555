"""The jobs on handwritten digits: a convolutional network, a transformer, and the transformer with outliers planted into it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import nn
from torch.export import Dim

from accuracy.jobs import Call, Job, Metrics
from accuracy.models import Digits, digits_data, top1, train_digits_cnn, train_digits_transformer
from accuracy.outliers import with_outliers


def jobs() -> Iterator[Job]:
    """Trains while it goes."""
    data = digits_data()
    yield job("digits CNN", train_digits_cnn(data=data), data)
    transformer = train_digits_transformer(data=data)
    yield job("digits transformer", transformer, data)
    yield job("digits transformer, outliers", with_outliers(transformer), data)


def job(name: str, model: nn.Module, data: Digits) -> Job:
    shapes = ({0: Dim("batch", min=1, max=1024)},)
    return Job(name, model, data.calibration(), (data.test,), partial(_judge, data), shapes)


def _judge(data: Digits, call: Call) -> Metrics:
    return {"top-1": top1(call, data)}
