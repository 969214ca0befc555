"""What torch asks of sizes for the strides of what it traces is no condition of a graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

import sashiko
from sashiko.diagnostics.errors import InputError, Unsupported
from tests.graph.captures import capture, module, run

FREE = ({0: Dim.AUTO, 2: Dim.AUTO, 3: Dim.AUTO},)
WHOLE, PARTS = (2, 3, 16, 24), (3, 3, 17, 26)  # multiples of 4, and others


def cut(x: Tensor) -> Tensor:
    """What was padded to multiples of 4 and cut again, as windows of images are: without gaps where there was nothing to pad."""
    height, width = x.shape[-2:]
    return F.pad(x, (0, -width % 4, 0, -height % 4)).relu()[:, :, :height, :width]


CUT: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous() * 2,
    "lines": lambda x: x.flatten(2).transpose(1, 2),
    "rows": lambda x: x.reshape(x.shape[0], -1),
    "products": lambda x: x @ x.transpose(-1, -2),
    "groups": lambda x: F.group_norm(x, 3),
    "written to": lambda x: x.contiguous().add_(1) * 2,
}


@pytest.mark.parametrize("example", [WHOLE, PARTS], ids=["without gaps", "with gaps"])
@pytest.mark.parametrize("name", CUT)
def test_what_lies_without_gaps_for_some_sizes(name: str, example: tuple[int, ...]) -> None:
    model = module(lambda m, x: CUT[name](cut(x)))
    captured = capture(model, (torch.randn(example),), shapes=FREE)
    for size in (WHOLE, PARTS, (1, 3, 17, 24), (2, 3, 20, 5), (2, 3, 1, 1)):
        x = torch.randn(size)
        torch.testing.assert_close(run(captured, (x,)), model(x))


def test_a_question_of_the_model_is_one() -> None:
    model = module(lambda m, x: x * 2 if cut(x).is_contiguous() else x * 3)
    for example, other in ((WHOLE, PARTS), (PARTS, WHOLE)):
        captured = capture(model, (torch.randn(example),), shapes=FREE)
        x = torch.randn(example)
        torch.testing.assert_close(run(captured, (x,)), model(x))
        with pytest.raises(InputError):
            run(captured, (torch.randn(other),))


def test_a_copy_that_is_written_to_and_may_be_a_view() -> None:
    def written(m: nn.Module, x: Tensor) -> Tensor:
        x = cut(x)
        return x.contiguous().add_(1) + x

    captured = capture(module(written), (torch.randn(2, 3, 17, 26),), shapes=FREE)
    x = torch.randn(3, 3, 7, 9)
    torch.testing.assert_close(run(captured, (x,)), module(written)(x))
    with pytest.raises(InputError, match="expected 1 to 3 more than a multiple of 4"):
        run(captured, (torch.randn(WHOLE),))
    with pytest.raises(Unsupported, match="a view for some sizes, these among them"):
        capture(module(written), (torch.randn(WHOLE),), shapes=FREE)


def test_images_with_channels_last_become_as_small_as_others() -> None:
    model = nn.Sequential(*(part for n in (3, 8, 8) for part in (nn.Conv2d(n, 8, 3, 2, 1), nn.ReLU()))).eval()
    example = torch.randn(2, 3, 64, 96).to(memory_format=torch.channels_last)
    fast = sashiko.compile(model, example, dynamic_shapes=FREE)
    for size in ((1, 3, 4, 4), (1, 3, 1, 33), (2, 3, 64, 2)):
        x = torch.randn(size).to(memory_format=torch.channels_last)
        torch.testing.assert_close(fast(x), model(x))
