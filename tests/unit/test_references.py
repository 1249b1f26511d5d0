"""Published figures: every line parses, and every number of the studies is there."""

from __future__ import annotations

from collections import Counter

import pytest

from zerobench.errors import DataError
from zerobench.recipes.references import Reference, parse_references, read_references

# The numbers of each study's table, row by row as it prints them.
PUBLISHED = {
    "DeepSpeed ZeRO stages with GPT-2 on one H100 NVL": """
        23173.730 84.275 0.185223 0.000648 7596 89.51   7445.155 59.126 0.575916 0.005856 8956 90.69
        21506.465 20.007 0.199738 0.000164 7582 86.31   7194.530 15.988 0.595777 0.001469 9736 88.62
        21566.020 57.460 0.199376 0.000622 7582 78.08   7186.690 13.302 0.596442 0.001181 9736 83.97
        11922.985 282.624 0.361432 0.008480 9758 46.06   6968.430 2.497 0.616783 0.000467 12570 71.08""",
    "ZeRO benchmarking guide, A100 examples": """
        8.2 45 45000   8.2 46 44500   6.8 48 42500   4.5 62 33000
        52 180 11400   38 185 11000   28 195 10500   18 235 8700
        68 45 420 4900   42 128 580 3500   25 20 850 2400
        72 680 3000   58 180 720 2850   35 80 1200 1700
        5 10 15 20 30   10 20 40 50   30 50 70 80   2 5   2 4 4 8   60 80 95""",
    "Megatron-DeepSpeed on two nodes with a slow network": """
        1.48 1.211 6.60 1.00 95.4   6.69 7.009 2.28 1.00 95.7
        0.88 0.986 8.12 1.23 30.7 57.7 11.6   3.88 8.574 1.87 0.82 27.7 69.5
        2.06 1.769 4.52 0.68   5.38 10.041 1.59 0.70 66.8 30.6
        1.62 2.861 2.80 0.42 79.2   5.64 28.358 0.56 0.25 88.2
        2.05 2.166 3.69 0.56 33.9 59.2   5.38 24.469 0.65 0.29 45.9 53.8""",
    "llm.c GPT-2 scripts": """
        524288 300 218000 52 312   820 79900 54   1.7 38500 57   1048576 2.80 46800 44 989 672 24""",
    "MosaicML LLM Foundry training benchmarks": """
        45455 10643 4792 41.8 46.4 39.8   2002 38.1 50.8   882 1039 36.2 42.6""",
    "torchtitan Llama 3.1 on H100, December 2024": """
        5762 82.4 6667 77.0 8532 76.8 33 39   5605 6514 8380""",
    "torchtitan Llama 3 8B on H200, June 2025": "10938 10753",
    "torchtitan: FSDP1 against FSDP2": """
        6100 6200 6100 6300   6500 6700 67.2 6600 6800 62.5   8100 8400   1 2 3 7 16""",
    "nanoGPT": "104",
    "llm.c": "-100",
    "ZeRO-Offload": "40 30 13 128 5 7",
    "ZeRO-3 Offload": "49 40 1.5 2.3",
    "ZeRO-Infinity": "25 40 1 32",
    "DeepSpeed ZeRO-Offload++": "6 3",
    "ZenFlow": "5 6.3 0.5 7",
    "DeepSpeed core binding for ZenFlow": "2887 2497 1419 1116 240 1365 17.6 569 42.2",
    "SuperOffload": "600 4 500 50",
    "MegaTrain": "1.84 120 1.5",
    "DeepNVMe": "10 5 27 11 48 26 9.6 5 7 4 3.69 3.18 5.6 4.3",
    "DeepCompile": "1.28 1.54 7 1.9 2.5",
    "ZeRO++": "4 2.16",
    "DeepSpeed bf16 masters and states": "25.7 16.2 31.4 18.9 0.602 0.643 2.78 2.90",
}


def of_study(study: str) -> list[Reference]:
    return [reference for reference in read_references() if reference.study == study]


def test_every_line_has_a_source_and_no_figure_stands_twice() -> None:
    found = read_references()
    assert len(found) > 250 and all(reference.source and reference.figure for reference in found)
    assert max(Counter((reference.id, reference.figure) for reference in found).values()) == 1


def test_figures_of_one_measurement_agree_in_what_was_measured() -> None:
    settings: dict[str, set[tuple[object, ...]]] = {}
    for each in read_references():
        measured = (
            each.study,
            each.model,
            each.strategy,
            each.stage,
            each.precision,
            each.batch,
            each.device,
        )
        settings.setdefault(each.id, set()).add(measured)
    assert all(len(found) == 1 for found in settings.values())


def test_every_study_is_known_here() -> None:
    assert {reference.study for reference in read_references()} == set(PUBLISHED)


@pytest.mark.parametrize("study", PUBLISHED)
def test_every_published_number_is_there(study: str) -> None:
    numbers = Counter(float(text) for text in PUBLISHED[study].split())
    missing = numbers - Counter(reference.value for reference in of_study(study))
    assert not missing


def test_eight_rows_of_gpt2_have_six_figures_each() -> None:
    rows = Counter(reference.id for reference in of_study("DeepSpeed ZeRO stages with GPT-2 on one H100 NVL"))
    assert set(rows.values()) == {6} and len(rows) == 8


def test_figures_that_cannot_be_right_say_so() -> None:
    guide = {each.id: each for each in of_study("ZeRO benchmarking guide, A100 examples")}
    assert guide["a100-llama2-7b-zero0"].consistent == "no" and "108 GB" in guide["a100-llama2-7b-zero0"].note
    assert (
        guide["a100-llama2-70b-zero2"].value is None
        and "out of memory" in guide["a100-llama2-70b-zero2"].note
    )
    assert {each.consistent for each in of_study("SuperOffload")} == {"no"}


@pytest.mark.parametrize(
    ("column", "text"),
    [("value", "fast"), ("value", "inf"), ("stage", "two"), ("consistent", "perhaps"), ("figure", None)],
)
def test_a_line_that_does_not_parse_is_named(column: str, text: str | None) -> None:
    given: dict[str, str | None] = dict.fromkeys(Reference.model_fields, "")
    given |= {"consistent": "yes", "value": "1", column: text}
    columns = [name for name in given if given[name] is not None]
    lines = [",".join(columns), ",".join(given[name] or "" for name in columns)]
    with pytest.raises(DataError, match=rf"references\.csv, line 2: {column}: .* Correct that line\."):
        parse_references("\n".join(lines))
