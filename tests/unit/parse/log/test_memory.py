import pytest

from parse.log import read_log


def breakdown(title, peak, used, percent):
    head = "[2031-01-01 00:00:00,000] [INFO] [utils.py:{}:see_memory_usage] "
    device = f"MA 1.0 GB         Max_MA {peak} GB         CA 3.0 GB         Max_CA 9 GB "
    host = f"CPU Virtual Memory:  used = {used} GB, percent = {percent}%"
    texts = {800: title, 801: device, 808: host}
    return [head.format(number) + text for number, text in texts.items()]


def blocks(recipe):
    """Four iterations on a machine of 200 GiB; the setup's figures come first."""
    found = recipe(losses=(9.0, 8.5, 8.25, 8.0)).blocks()
    found[0] += breakdown("After initializing ZeRO optimizer", 1.5, 20.0, 10.0)
    for number, block in enumerate(found[1:], 1):
        block[0:0] = breakdown(
            "Engine before forward", 2.0 + number, 40.0 + number, 20 + number / 2
        )
        block[6:6] = breakdown("Engine after step", 1.25, 30.0, 15.0)
    return found


def read(write_log, lines):
    return read_log(write_log(text="".join(f"{line}\n" for block in lines for line in block)))


def test_a_line_has_its_title_iteration_and_place(write_log, recipe):
    lines = blocks(recipe)
    log = read(write_log, lines)
    assert [(m.title, m.iteration) for m in log.memory][:3] == [
        ("After initializing ZeRO optimizer", None),
        ("Engine before forward", 1),
        ("Engine after step", 1),
    ]
    line = log.memory[1]
    assert (line.allocated_gib, line.max_allocated_gib) == (1.0, 3.0)
    assert (line.cached_gib, line.max_cached_gib) == (3.0, 9.0)
    assert (line.host_used_gib, line.host_percent) == (41.0, 20.5)
    flat = [line for block in lines for line in block]
    assert "Max_MA 3.0" in flat[line.line - 1]
    assert [r.device_memory_gib for r in log.iterations] == [3.0, 4.0, 5.0, 6.0]
    assert [r.host_memory_gib for r in log.iterations] == [41.0, 42.0, 43.0, 44.0]


def test_plain_prints_have_titles_too(write_log, recipe):
    lines = [
        [line.rpartition("see_memory_usage] ")[2] for line in block] for block in blocks(recipe)
    ]
    prefixed = [[f"node-1: {line}" for line in block] for block in lines]
    titles = [m.title for m in read(write_log, blocks(recipe)).memory]
    assert [m.title for m in read(write_log, lines).memory] == titles
    assert [m.title for m in read(write_log, prefixed).memory] == titles


@pytest.mark.parametrize("stranger", ["[rank1]: time (ms) | x", "[2031] [INFO] [a.py:1:b] hello"])
def test_what_stands_before_is_not_always_a_title(write_log, recipe, stranger):
    lines = blocks(recipe)
    lines[2][1:1] = [stranger]
    plain = [[line.rpartition("see_memory_usage] ")[2] for line in block] for block in lines]
    for written in (lines, plain):
        log = read(write_log, written)
        assert [m.title for m in log.memory if m.iteration == 2] == [None, "Engine after step"]


@pytest.mark.parametrize(
    ("old", "new", "device", "host"),
    [
        ("Max_MA 4.0 GB", "Max_MA 4.x GB", None, 42.0),
        ("Max_MA 4.0 GB", "MaxXMA 4.0 GB", None, 42.0),
        ("used = 42.0 GB", "used = 42.0 XB", 4.0, None),
        ("CPU Virtual Memory:  used = 42.0", "CPU VirtuAl Memory:  used = 42.0", 4.0, None),
    ],
)
def test_figures_that_cannot_be_are_missing(write_log, recipe, old, new, device, host):
    lines = [[line.replace(old, new) for line in block] for block in blocks(recipe)]
    log = read(write_log, lines)
    record = log.iterations[1]
    assert (record.device_memory_gib, record.host_memory_gib) == (device, host)
    assert [r.device_memory_gib for r in log.iterations if r is not record] == [3.0, 5.0, 6.0]
    assert [r.host_memory_gib for r in log.iterations if r is not record] == [41.0, 43.0, 44.0]


def test_the_host_of_another_line_is_not_taken(write_log, recipe):
    lines = blocks(recipe)
    lost = [line for line in lines[2] if "Max_MA 4.0" in line or "used = 42" in line]
    lines[2] = [line for line in lines[2] if line not in lost[1:]]
    after = next(i for i, line in enumerate(lines[2]) if "Max_MA 1.25" in line)
    del lines[2][after]
    found = [m for m in read(write_log, lines).memory if m.iteration == 2]
    assert [(m.max_allocated_gib, m.host_used_gib) for m in found] == [(4.0, None), (None, 30.0)]
