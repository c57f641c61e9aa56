"""Work in other processes: in order, bounded, and over when the main process is."""

import os
import time

import pytest

from ds_bert.data.preparing.processes import ordered_map, run_apart
from ds_bert.errors import UserError


def start(value):
    global added
    added = value


def slow_when_even(item):
    time.sleep(0.05 * (item % 2 == 0))
    return item + added


def die(item):
    os._exit(1)


def echo(item):
    return item


def fail(item):
    raise KeyError(f"item {item}")


def report_and_add(a, b, report):
    report(a)
    report(b)
    return a + b


def complain(report):
    raise UserError("the text is bad")


@pytest.mark.parametrize("num_workers", [1, 2])
def test_results_come_in_order_and_items_are_read_only_a_little_ahead(num_workers):
    read = []

    def items():
        for item in range(15):
            read.append(item)
            yield item

    for number, result in enumerate(ordered_map(slow_when_even, items(), num_workers, start, (100,))):
        assert result == number + 100
        assert len(read) <= number + 2 * num_workers
    assert number == 14


def test_a_dead_process_is_an_error_not_a_hang():
    with pytest.raises(UserError, match=r"a worker process died.*--num-workers 1"):
        list(ordered_map(die, range(5), 2, start, (0,)))
    with pytest.raises(UserError, match="the process that learns the vocabulary died"):
        run_apart(die)


def test_an_error_in_a_worker_comes_with_its_traceback():
    with pytest.raises(KeyError, match="item 0") as error:
        list(ordered_map(fail, range(5), 2, start, (0,)))
    assert "in fail" in str(error.value.__cause__)


def test_large_items_and_results_do_not_wait_for_each_other():
    items = [bytes([number]) * 3_000_000 for number in range(8)]
    assert list(ordered_map(echo, items, 2, start, (0,))) == items


def test_a_call_apart_reports_and_returns_and_raises():
    amounts = []
    assert run_apart(report_and_add, 3, 4, on_progress=amounts.append) == 7
    assert amounts == [3, 4]
    with pytest.raises(UserError, match="the text is bad"):
        run_apart(complain)
