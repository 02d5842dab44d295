"""Which rows trained what stock trained."""

from benchmarks.verdict import compare, compare_rounds


def result(losses=("0x1p+0", "0x1p-1"), **digests):
    found = {"weights": "a", "masters": "b", "moments": "c"} | digests
    return {"losses": list(losses), "digests": found}


def test_same_bits_are_equal():
    assert compare(result(), result()).text == "equal"
    assert compare(result(), result()).equal


def test_the_first_other_loss_is_named():
    verdict = compare(result(losses=("0x1p+0", "0x1p-2")), result())
    assert not verdict.equal
    assert verdict.text == "differs: losses from iteration 2"


def test_fewer_losses_are_a_difference():
    assert compare(result(losses=("0x1p+0",)), result()).text == "differs: losses from iteration 2"


def test_other_state_is_named_although_losses_agree():
    verdict = compare(result(moments="x", weights="y"), result())
    assert verdict.equal is False
    assert verdict.text == "differs: moments, weights"


def test_what_a_row_does_not_hold_is_said():
    verdict = compare(result(moments=None), result())
    assert verdict.equal
    assert verdict.text == "equal, moments not seen"


def test_what_is_seen_still_counts_beside_what_is_not():
    assert compare(result(moments=None, weights="x"), result()).equal is False


def test_without_stock_there_is_no_verdict():
    assert compare(result(), None).equal is None
    assert compare_rounds([], [result()]).equal is None


def test_one_bad_round_is_a_bad_row():
    verdict = compare_rounds([result(), result(weights="x")], [result(), result()])
    assert verdict.equal is False


def test_stock_that_differs_from_itself_is_no_measure():
    verdict = compare_rounds([result()], [result(), result(losses=("0x1p+1", "0x1p-1"))])
    assert verdict.equal is None
    assert verdict.text == "stock differs from itself"
