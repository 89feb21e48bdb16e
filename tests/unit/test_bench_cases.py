"""Cases with windows, sinks, soft caps, slopes and biases: options and companion cases."""

from __future__ import annotations

from dataclasses import replace

from bench.cases import Case, select


def test_of_a_window_the_pairs_that_see_each_other_are_counted() -> None:
    plain = Case("forward", "float16", 2, 3, 3, 64, 32, 10, 10, False, "fa2")
    for window, visible in {
        (2, 0): 10 * 3 - 3,
        (0, 1): 10 * 2 - 1,
        (None, 0): 55,
        (3, None): 10 * 10 - sum(range(1, 7)),
        (None, None): 100,
    }.items():
        case = replace(plain, window_size=window)
        assert case.flops == 2 * 6 * visible * 96, window
    later = replace(plain, seqlen_q=4, window_size=(2, 5), causal=True)
    assert later.flops == 2 * 6 * 4 * 3 * 96  # queries 6 to 9, three keys each
    assert replace(later, op="backward").flops == 2.5 * later.flops


def test_windows_are_timed_both_ways_and_the_widest_beside_a_causal_mask() -> None:
    forward, backward = select("windows"), select("windows-backward")
    assert [replace(case, op="backward") for case in forward] == backward[:-1]
    assert all(case.window_size and not case.causal for case in forward)
    assert backward[-1] in select("fa3-backward")
    assert replace(backward[-2], window_size=None, causal=True) == backward[-1]
    assert str(forward[0]) == "fa3 forward bfloat16 2x8192x16x128 window (1023, 0)"


def test_sinks_come_with_the_call_without_them() -> None:
    for case in select("sinks,sinks-backward"):
        assert case.companions == [replace(case, sinks=False)]
        assert case.extras == ["sinks"]
        assert case.options["sinks"] is case.peer_options["sinks"] is True
        assert "sinks" not in case.keywords
        assert "sinks" not in case.companions[0].options
        assert str(case).endswith(" sinks")
    assert [case.features for case in select("sinks")] == [("sinks",), ("window", "sinks")]


def test_soft_caps_come_with_the_call_without_them() -> None:
    for case in select("softcap,softcap-backward"):
        assert case.companions == [replace(case, softcap=None)]
        assert case.options["softcap"] == case.peer_options["softcap"] == 1.0
        assert case.keywords["softcap"] == 1.0
        assert "softcap" not in case.companions[0].options
        assert (case.features, case.extras) == (("softcap",), ["softcap"])
        assert str(case).endswith(" softcap 1")


def test_slopes_and_biases_come_with_the_call_without_them() -> None:
    for case in select("alibi,alibi-backward"):
        assert case.companions == [replace(case, alibi=False)]
        assert case.options["alibi"] is case.peer_options["alibi"] is True
        assert (case.features, case.extras, case.arrays) == (
            ("alibi",),
            ["alibi"],
            ("alibi_slopes",),
        )
        assert case.gradients == ()  # no gradient of the slopes is asked for
        assert case.keywords == {"algorithm": "fa3"}
        assert str(case).endswith(" causal alibi")
    for case in select("bias,bias-backward"):
        assert case.companions == [replace(case, bias=False, dbias=False)]
        assert case.options["bias"] == (1, case.heads_q, case.seqlen_q, case.seqlen_q)
        assert case.arrays == ("bias",)
        assert case.gradients == (("bias",) if case.dbias else ())
        assert case.keywords == {"algorithm": "fa3"}
        assert str(case).endswith(" bias dbias" if case.dbias else " bias")
    forward, backward = select("bias"), select("bias-backward")
    assert not any(case.dbias for case in forward)
    assert [case.dbias for case in backward] == [False, True] * 4
    assert [replace(case, op="backward") for case in forward] == backward[::2]
    assert [replace(case, dbias=True) for case in backward[::2]] == backward[1::2]


def test_features_are_timed_in_other_generations_and_widths() -> None:
    forward, backward = select("features-elsewhere"), select("features-elsewhere-backward")
    assert [replace(case, op="backward") for case in forward] == backward
    assert {(case.algorithm, case.head_dim) for case in forward} == {
        ("fa2", 64),
        ("fa2", 128),
        ("fa3", 96),
        ("fa3", 192),
        ("fa3", 256),
    }
    assert [case.features for case in forward] == [("softcap",), ("alibi",), ("bias",)] * 5
    assert {case.seqlen_q for case in forward} == {4096}
    assert not any(case.dbias for case in backward)
