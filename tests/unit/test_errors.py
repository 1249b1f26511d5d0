"""The hint that errors about names give."""

from __future__ import annotations

import pytest

from zerobench.errors import did_you_mean


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("zero_3", "did you mean 'zero3'? "),
        ("zero3", "did you mean 'zero3'? "),
        ("qqq", ""),
        ("", ""),
    ],
)
def test_the_most_similar_known_name_is_offered(name, hint) -> None:
    assert did_you_mean(name, {"zero2": 2, "zero3": 3, "fsdp2": 0}) == hint


def test_a_lower_cutoff_offers_less_similar_names() -> None:
    known = ["meta-llama/Meta-Llama-3-8B"]
    assert did_you_mean("Llama-3-8B", known) == ""
    assert did_you_mean("Llama-3-8B", known, cutoff=0.5) == "did you mean 'meta-llama/Meta-Llama-3-8B'? "


def test_nothing_is_offered_where_nothing_is_known() -> None:
    assert did_you_mean("zero3", []) == ""


def test_a_name_with_a_quote_is_quoted_as_python_quotes_it() -> None:
    assert did_you_mean("it", ["it's"]) == 'did you mean "it\'s"? '
