"""Tables align, and numbers in them are as people write them."""

import pytest

from layout_planner._table import Table, markdown, percent, size


def test_markdown_aligns_text_left_and_numbers_right():
    assert markdown(("<name", "n"), [["a", "1"], ["long", "2345"]]) == (
        "| name |    n |\n| ---- | ---: |\n| a    |    1 |\n| long | 2345 |"
    )


def test_rows_printed_one_by_one_align_with_the_head():
    table = Table(("<a", "b"), (5, 6))
    assert {len(line) for line in (*table.head().split("\n"), table.row(["x", "1"]))} == {18}


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (0, "0 %"),
        (0.00001, "<0.01 %"),
        (0.0123, "1.23 %"),
        (0.09999, "10.0 %"),
        (0.5, "50.0 %"),
        (31.2, "3,120 %"),
    ],
)
def test_percent_shows_the_digits_that_tell(ratio, text):
    assert percent(ratio) == text


def test_percent_of_a_negative_ratio_keeps_its_sign():
    assert percent(-0.036) == "-3.60 %"


@pytest.mark.parametrize(
    ("count", "text"), [(12, "12 B"), (1500, "1.50 kB"), (25.2e6, "25.2 MB"), (1.83e11, "183 GB")]
)
def test_size_is_in_the_largest_unit_there_is_one_of(count, text):
    assert size(count) == text
