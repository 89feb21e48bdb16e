"""The emulator's rows with features: a few configurations of every generation for each feature."""

from __future__ import annotations

from cuflash.planning.tiles.fa2_tables import ForwardRow

from .rows import FULL, Row

__all__ = ["ALIBI", "BIASED", "CAPPED", "DROPPED", "MASKED", "SUNK", "WINDOWED"]

#: Configurations with a window, which hides the keys before a query's first key.
WINDOWED = (
    Row("fa1", "90", "float16", window="band"),
    Row("fa1", "90", "float32", (5, 24), window="left"),
    Row("fa1", "75", "float16", window="left"),
    Row("fa2", "90", "float16", window="band"),
    Row("fa2", "75", "float16", window="left"),
    Row("fa2", "80", "float32", (5, 24), window="band"),
    Row("fa2", "90", "float64", window="left"),
    Row("fa2", "90", "float16", planned=True, deterministic=True, window="band"),
    Row("fa2", "90", "bfloat16", filled=True, window="band"),
    Row("fa2", "90", "float16", filled=True, deterministic=True, window="left"),
    Row("fa2", "90", "float64", filled=True, window="band"),
    Row(
        "fa2",
        "90",
        "float16",
        window="band",
        forward_row=ForwardRow(256, 64, 32, 4, paired=True),
    ),
    Row(
        "fa2",
        "80",
        "bfloat16",
        window="left",
        forward_row=ForwardRow(256, 32, 32, 2, num_stages=1),
    ),
    Row("fa3", "90", "float16", filled=True, window="band"),
    Row("fa3", "90", "bfloat16", filled=True, deterministic=True, window="left"),
    Row("fa3", "90", "bfloat16", (96, 80), filled=True, deterministic=True, window="band"),
    Row("fa3", "90", "bfloat16", (128, 128), filled=True, blocks=(192, 80), window="band"),
    Row("fa3", "90", "float16", (128, 72), filled=True, window="left"),
    Row("fa3", "90", "float16", (192, 128), filled=True, window="band"),
    Row("fa3", "90", "bfloat16", (200, 256), filled=True, deterministic=True, window="band"),
)
#: Configurations with sinks, of each mask and of each generation.
SUNK = (
    Row("fa1", "90", "float16", sinks="float32"),
    Row("fa1", "90", "float32", (5, 24), sinks="float32", window="left"),
    Row("fa1", "75", "float16", causal=FULL, sinks="float16"),
    Row("fa2", "90", "float16", sinks="float16"),
    Row("fa2", "75", "float32", causal=FULL, sinks="float32"),
    Row("fa2", "80", "bfloat16", (40, 64), filled=True, sinks="bfloat16", window="band"),
    Row("fa2", "90", "float16", planned=True, deterministic=True, sinks="float32"),
    Row("fa2", "90", "float64", sinks="float64", window="band"),
    Row(
        "fa2",
        "90",
        "float16",
        sinks="float32",
        forward_row=ForwardRow(256, 64, 32, 4, paired=True),
    ),
    Row("fa3", "90", "float16", filled=True, sinks="float16"),
    Row("fa3", "90", "bfloat16", causal=FULL, filled=True, deterministic=True, sinks="float32"),
    Row("fa3", "90", "bfloat16", (128, 128), filled=True, sinks="bfloat16", window="band"),
    Row("fa3", "90", "float16", (192, 128), filled=True, sinks="float32"),
    Row("fa3", "90", "bfloat16", (200, 256), filled=True, sinks="float32", window="left"),
)
#: Configurations with a soft cap; for fa3 with every form of its backward pass.
CAPPED = (
    Row("fa1", "90", "float16", softcap=3.0),
    Row("fa1", "75", "float32", (5, 24), FULL, softcap=0.5),
    Row("fa2", "90", "float16", softcap=3.0, window="band"),
    Row("fa2", "80", "bfloat16", (40, 64), FULL, filled=True, softcap=3.0),
    Row("fa2", "90", "float16", filled=True, deterministic=True, softcap=3.0),
    Row("fa2", "80", "float32", (5, 24), softcap=3.0),
    Row("fa2", "90", "float64", softcap=3.0),
    Row("fa3", "90", "float16", filled=True, softcap=3.0),
    Row("fa3", "90", "bfloat16", filled=True, deterministic=True, softcap=50.0, window="band"),
    Row("fa3", "90", "float16", (96, 80), filled=True, softcap=3.0),
    Row("fa3", "90", "bfloat16", (128, 128), filled=True, blocks=(192, 80), softcap=3.0),
    Row("fa3", "90", "float16", (192, 128), filled=True, softcap=3.0),
    Row("fa3", "90", "float16", (200, 256), filled=True, softcap=3.0),
)
#: Configurations with ALiBi; for fa3 with every form of its backward pass.
ALIBI = (
    Row("fa1", "90", "float16", alibi="heads"),
    Row("fa1", "75", "float32", (5, 24), FULL, alibi="batch", softcap=3.0),
    Row("fa2", "90", "float16", alibi="batch", window="band"),
    Row("fa2", "80", "bfloat16", (40, 64), FULL, filled=True, alibi="heads", softcap=3.0),
    Row("fa2", "90", "float16", filled=True, deterministic=True, alibi="batch"),
    Row("fa2", "80", "float32", (5, 24), FULL, alibi="heads", sinks="float32"),
    Row("fa2", "90", "float64", alibi="batch", softcap=3.0),
    Row("fa3", "90", "float16", filled=True, alibi="heads"),
    Row("fa3", "90", "bfloat16", (64, 64), FULL, filled=True, deterministic=True, alibi="batch"),
    Row("fa3", "90", "bfloat16", (128, 128), filled=True, blocks=(192, 80), alibi="heads"),
    Row("fa3", "90", "float16", (128, 72), filled=True, alibi="heads", window="band"),
    Row("fa3", "90", "float16", (192, 128), filled=True, alibi="batch"),
    Row("fa3", "90", "float16", (192, 128), FULL, filled=True, alibi="heads", softcap=3.0),
    Row("fa3", "90", "float16", (200, 256), filled=True, alibi="heads"),
)
#: Configurations with a bias of every form; for fa3 with every form of its backward pass.
BIASED = (
    Row("fa1", "90", "float16", bias="bhqk"),
    Row("fa1", "75", "float32", (5, 24), FULL, bias="1hqk-inf", softcap=3.0),
    Row("fa1", "90", "float64", bias="k:float32", sinks="float64"),
    Row("fa2", "90", "float16", bias="11qk:float32", window="band"),
    Row("fa2", "80", "bfloat16", (40, 64), FULL, filled=True, bias="b1qk-inf", softcap=3.0),
    Row("fa2", "90", "float16", filled=True, deterministic=True, bias="bh1k"),
    Row("fa2", "80", "float32", (5, 24), FULL, bias="hqk", alibi="heads"),
    Row("fa2", "90", "float64", bias="1hq1", window="left"),
    Row("fa2", "75", "float16", bias="b1q1:float32"),
    Row("fa2", "90", "bfloat16", (256, 192), bias="b111", sinks="bfloat16"),
    Row("fa3", "90", "float16", filled=True, bias="1hqk"),
    Row("fa3", "90", "bfloat16", (64, 64), FULL, filled=True, deterministic=True, bias="11qk-inf"),
    Row("fa3", "90", "bfloat16", (128, 128), filled=True, blocks=(192, 80), bias="b11k:float32"),
    Row("fa3", "90", "float16", (128, 72), filled=True, bias="qk", window="band"),
    Row("fa3", "90", "float16", (192, 128), filled=True, bias="bhqk:float32", softcap=3.0),
    Row("fa3", "90", "float16", (200, 256), filled=True, bias="h11", alibi="batch"),
    Row("fa3", "90", "float16", (256, 200), filled=True, bias="1hqk:float32", window="band"),
)
#: Configurations with a boolean mask of every form; for fa3 with every form of its backward pass.
MASKED = (
    Row("fa1", "90", "float16", mask="bhqk"),
    Row("fa1", "75", "float32", (5, 24), FULL, mask="1hqk-blocks", softcap=3.0),
    Row("fa1", "90", "float64", (64, 64), FULL, mask="k", sinks="float64"),
    Row("fa2", "90", "float16", mask="11qk", window="band"),
    Row("fa2", "80", "bfloat16", (40, 64), FULL, filled=True, mask="b1qk-blocks"),
    Row("fa2", "90", "float16", filled=True, deterministic=True, mask="bh1k"),
    Row("fa2", "80", "float32", (5, 24), FULL, mask="hqk", alibi="heads"),
    Row("fa2", "90", "float64", mask="1hq1", bias="11qk"),
    Row("fa3", "90", "float16", filled=True, mask="1hqk-blocks"),
    Row("fa3", "90", "bfloat16", (64, 64), FULL, filled=True, deterministic=True, mask="b11k"),
    Row("fa3", "90", "bfloat16", (128, 128), filled=True, mask="11qk", sinks="float32"),
    Row("fa3", "90", "float16", (128, 72), FULL, filled=True, mask="bhqk", bias="1hqk"),
    Row("fa3", "90", "float16", (192, 128), filled=True, mask="qk", softcap=3.0),
    Row("fa3", "90", "float16", (200, 256), FULL, filled=True, mask="b1qk-blocks"),
)
#: Configurations with dropout in every arithmetic; for fa3 with every form of its backward pass.
DROPPED = (
    Row("fa1", "90", "float16", dropout="0.3"),
    Row("fa1", "75", "float32", (5, 24), FULL, dropout="0.5:4", sinks="float32"),
    Row("fa1", "90", "float64", dropout="0.1:2", window="band"),
    Row("fa1", "75", "float16", causal=FULL, dropout="0.9"),
    Row("fa2", "90", "float16", dropout="0.3", window="band"),
    Row("fa2", "80", "bfloat16", (40, 64), FULL, filled=True, dropout="0.5:4", softcap=3.0),
    Row("fa2", "90", "float16", filled=True, deterministic=True, dropout="0.1:2"),
    Row("fa2", "90", "float16", filled=True, dropout="0.3", alibi="batch"),
    Row("fa2", "80", "float32", (5, 24), dropout="0.3", alibi="heads"),
    Row("fa2", "90", "float32", planned=True, dropout="0.3", mask="1hqk"),
    Row("fa2", "90", "float64", dropout="0.5:4", bias="1hqk"),
    Row("fa2", "80", "float64", (5, 24), FULL, dropout="0.3", softcap=3.0),
    Row("fa2", "75", "float16", dropout="0.3:2", bias="bh1k"),
    Row("fa2", "75", "float64", (5, 24), FULL, dropout="0.3"),
    Row(
        "fa2",
        "90",
        "float16",
        dropout="0.3:4",
        sinks="float32",
        forward_row=ForwardRow(256, 64, 32, 4, paired=True),
    ),
    Row(
        "fa2",
        "80",
        "bfloat16",
        dropout="0.3",
        forward_row=ForwardRow(256, 32, 32, 2, num_stages=1),
    ),
    Row("fa3", "90", "float16", filled=True, dropout="0.3"),
    Row("fa3", "90", "float16", filled=True, dropout="0.3", bias="1hqk"),
    Row("fa3", "90", "bfloat16", (64, 64), FULL, filled=True, deterministic=True, dropout="0.5:4"),
    Row("fa3", "90", "float16", filled=True, dropout="0.3", softcap=3.0, alibi="heads"),
    Row("fa3", "90", "bfloat16", (96, 80), filled=True, dropout="0.1:2", window="band"),
    Row("fa3", "90", "bfloat16", (128, 128), filled=True, blocks=(192, 80), dropout="0.3"),
    Row(
        "fa3", "90", "float16", (128, 72), filled=True, dropout="0.3", softcap=3.0, sinks="float32"
    ),
    Row("fa3", "90", "float16", (128, 128), FULL, filled=True, dropout="0.3", mask="1hqk"),
    Row("fa3", "90", "float16", (192, 128), filled=True, dropout="0.3:4"),
    Row(
        "fa3",
        "90",
        "bfloat16",
        (192, 128),
        FULL,
        filled=True,
        dropout="0.3",
        softcap=3.0,
        alibi="batch",
    ),
    Row("fa3", "90", "float16", (200, 256), filled=True, dropout="0.5", alibi="heads"),
    Row(
        "fa3",
        "90",
        "bfloat16",
        (200, 256),
        FULL,
        filled=True,
        dropout="0.3",
        softcap=3.0,
        bias="b1qk",
    ),
)
