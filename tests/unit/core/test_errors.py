import math

import pytest

from thinwire.core.errors import check_bool, check_choice, check_float, check_int


def test_good_values_come_back() -> None:
    assert check_choice("rule", "sign", ["sign", "sgd"]) == "sign"
    assert check_int("k", 3, 1) == 3
    assert check_float("lr", 1, 0.0) == 1.0
    assert check_bool("flag", False) is False


@pytest.mark.parametrize(
    ("check", "args", "kind", "words"),
    [
        (check_choice, ("update", "sgn", ["sign", "muon"]), ValueError, "update='sgn'.*did you mean 'sign'"),
        (check_choice, ("architecture", "bert", ["resnet", "vit"]), ValueError, "is not one of resnet, vit$"),
        (check_choice, ("update", ["sign"], ["sign", "muon"]), ValueError, r"update=\['sign'\] is not one of muon, sign$"),
        (check_choice, ("update", 7, ["sign", "muon"]), ValueError, "update=7 is not one of muon, sign$"),
        (check_int, ("topk", 0, 1), ValueError, "topk must be an integer >= 1, got 0"),
        (check_int, ("topk", 1.5, 1), TypeError, "topk.*1.5"),
        (check_int, ("topk", True, 1), TypeError, "topk.*True"),
        (check_float, ("lr", "a", 0.0), TypeError, "lr.*'a'"),
        (check_float, ("lr", True, 0.0), TypeError, "lr.*True"),
        (check_float, ("lr", -1.0, 0.0), ValueError, "lr.*-1"),
        (check_float, ("lr", math.nan, 0.0), ValueError, "lr.*nan"),
        (check_float, ("lr", math.inf, 0.0), ValueError, "lr.*inf"),
        (check_bool, ("flag", 1), TypeError, "flag.*1"),
    ],
)
def test_bad_values_are_named(check, args, kind, words) -> None:
    with pytest.raises(kind, match=words):
        check(*args)
