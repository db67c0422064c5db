"""Numbers in 8 bits on their way: short messages, errors within what the format says, overflows that show."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hpctrain.precision.coded import BLOCK, CHUNK, FORMS, coded_bytes, decode, encode

ERROR = {"int8": 0.0075, "fp8": 0.03}  # root mean square, as a part of the numbers', for normal ones


def there_and_back(x: Tensor, form: str) -> Tensor:
    message, out = encode(x, form), torch.full_like(x, torch.nan)
    assert message.dtype == torch.uint8 and message.numel() == coded_bytes(x.numel())
    decode(out, message, form)
    return out


def blocks(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (0, -x.numel() % BLOCK)).view(-1, BLOCK)


@given(st.integers(0, 3 * BLOCK), st.sampled_from(sorted(FORMS)), st.integers(-30, 30), st.integers(0, 9))
def test_an_error_is_within_what_the_format_says(numel: int, form: str, exponent: int, seed: int) -> None:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 10.0**exponent
    error, largest = blocks(there_and_back(x, form) - x).abs(), blocks(x).abs().amax(1, keepdim=True)
    least = largest * {"int8": 1 / 254, "fp8": 2.0**-16}[form]  # below e4m3's normal numbers steps are even
    bound = least if form == "int8" else torch.maximum(blocks(x).abs() / 16, least)
    assert (error <= bound * 1.001 + 1e-40).all()


@pytest.mark.parametrize("form", FORMS)
def test_what_is_said_of_the_mean_error_holds(form: str) -> None:
    x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(1))
    assert float((there_and_back(x, form) - x).norm() / x.norm()) < ERROR[form]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("numel", [1, BLOCK, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 77])
def test_a_number_has_the_same_code_whatever_is_beside_its_block(form: str, numel: int) -> None:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(2))
    one_by_one = torch.cat([there_and_back(block, form) for block in x.split(BLOCK)])
    assert torch.equal(there_and_back(x, form), one_by_one)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_zeros_stay_zeros_and_a_message_can_be_added(form: str, dtype: torch.dtype) -> None:
    x = torch.zeros(300, dtype=dtype)
    x[7] = 2.0
    total = torch.ones_like(x)
    decode(total, encode(x, form), form, add=True)
    assert float(total[7]) == pytest.approx(3.0, rel=1e-2)
    assert (total[torch.arange(300) != 7] == 1).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_shows_and_stays_in_its_block(form: str, bad: float) -> None:
    x = torch.ones(3 * BLOCK)
    x[BLOCK + 5] = bad
    found = blocks(there_and_back(x, form))
    assert found[1].isnan().any() and (found[[0, 2]] - 1).abs().max() < 0.01


def test_a_message_is_about_a_byte_a_number() -> None:
    assert coded_bytes(0) == 0
    assert coded_bytes(1 << 20) == (1 << 20) * (1 + 4 / BLOCK)
    assert all(coded_bytes(n) % 4 == 0 for n in range(1000))


@given(st.integers(0, 600), st.integers(0, 600), st.sampled_from(sorted(FORMS)))
def test_the_last_numbers_can_be_exact(coded: int, exact: int, form: str) -> None:
    x = torch.randn(coded + exact, generator=torch.Generator().manual_seed(coded))
    message, out = encode(x, form, exact), torch.full_like(x, torch.nan)
    assert message.numel() == coded_bytes(coded + exact, exact)
    decode(out, message, form, exact)
    assert torch.equal(out[coded:], x[coded:])
    assert torch.equal(out[:coded], there_and_back(x[:coded].clone(), form))
